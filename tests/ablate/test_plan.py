"""From config to cells."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate import config, plan
from ablate.errors import ConfigError


def cells(*overrides: str) -> list[plan.Cell]:
    return plan.cells(config.load(overrides, check=False))


def test_default_grid() -> None:
    found = cells()
    assert len(found) == 4 * 3 * 2 and len({cell.hash for cell in found}) == 24
    first = found[0]
    assert (first.name, first.variant, first.seed, first.point) == (
        "reference-seed0-beta0.04",
        "reference",
        0,
        {"beta": 0.04},
    )
    assert first.config.loss.beta == 0.04 and first.config.grid == {}
    assert [cell.seed for cell in found] == sorted(cell.seed for cell in found), "a sweep cut short leaves whole seeds"
    assert {cell.config.loss.beta for cell in found} == {0.04, 1.0}


def test_selectors() -> None:
    import losses

    assert [c.variant for c in cells("variants=forward_kl,reference", "seeds=1", "grid=none")] == [
        "forward_kl",
        "reference",
    ]
    everything = plan.select_variants(config.load(["variants=family"], check=False))
    assert everything == losses.names() and set(losses.founding) < set(everything)
    extra = next(name for name in everything if name not in losses.founding)
    mixed = plan.select_variants(config.load([f"variants=all,{extra},reference"], check=False))
    assert mixed == [*losses.founding, extra]
    with pytest.raises(ConfigError, match="reference is there twice"):
        cells("variants=reference,reference")


def test_preset_decides_what_all_means() -> None:
    c = config.load(["variants_all=no_detach,gspo"], check=False)
    assert plan.select_variants(c) == ["no_detach", "gspo"]


def test_axes_multiply_and_name_the_cells() -> None:
    found = cells(
        "variants=reference",
        "seeds=5,",
        "grid.steps=1,2",
        "grid.lora=true,false",
        "grid.epsilon=null,0.2",
        "grid.beta=1",
    )
    assert len(found) == 8
    assert found[0].name == "reference-seed5-beta1-steps1-loratrue-epsilonnone"
    assert found[0].point == {"beta": 1.0, "steps": 1, "lora": True, "epsilon": None}
    last = found[-1].config
    assert (last.train.steps, last.train.lora, last.loss.epsilon) == (2, False, 0.2)


def test_axis_over_passthrough_names() -> None:
    found = cells("variants=reference", "seeds=1", "grid=none", "grid.trl.weight_decay=0,0.1", "sampling.top_k=3")
    assert [cell.config.trl for cell in found] == [{"weight_decay": 0}, {"weight_decay": 0.1}]
    assert found[1].name == "reference-seed0-trl.weight_decay0.1"
    assert all(cell.config.sampling["top_k"] == 3 for cell in found)


def test_cells_share_nothing_mutable() -> None:
    first, second = cells("variants=reference,no_detach", "seeds=1", "grid=none", "trl.adam_beta2=0.9")
    first.config.trl["adam_beta2"] = 0.1
    assert second.config.trl["adam_beta2"] == 0.9


def test_own_parameters_reach_only_their_variant() -> None:
    import losses

    taker = next(name for name in losses.names() if losses.get(name).params)
    parameter = losses.get(taker).params[0].name
    first, second = cells(f"variants={taker},reference", "seeds=1", "grid=none", f"loss.params.{parameter}=4")
    assert first.config.loss.params == {parameter: 4} and second.config.loss.params == {}


def test_points_that_only_make_sense_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.micro_batch_size=128"):
        cells("train.micro_batch_size=128", "grid.num_generations=8,4")


def test_names_that_would_collide_are_refused() -> None:
    with pytest.raises(ConfigError, match="two cells would be called"):
        cells("variants=reference", "seeds=1", "grid=none", "grid.model=a/b,a_b")


@given(st.text(min_size=1, max_size=300), st.floats() | st.integers() | st.booleans() | st.none())
def test_cell_names_are_safe_folder_names(text: str, value: object) -> None:
    name = plan.cell_name("reference", 0, {"model": text, "beta": value})
    assert re.fullmatch(r"[A-Za-z0-9._+-]+", name) and len(name) <= plan.NAME_LIMIT
    assert name.startswith("reference-seed0-model")


def test_long_names_stay_different() -> None:
    long = ["x" * 300 + end for end in "ab"]
    assert len({plan.cell_name("reference", 0, {"model": value}) for value in long}) == 2
