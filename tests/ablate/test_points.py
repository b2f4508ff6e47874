"""Named points: a preset's own axis, each value of which sets several keys at once."""

from pathlib import Path

import pytest

from ablate import config, plan
from ablate.config import Config, ConfigError


def load(*overrides: str, check: bool = False) -> Config:
    return config.load(overrides, check=check)


def cells(*overrides: str) -> list[plan.Cell]:
    return plan.cells(load(*overrides))


def preset(folder: Path, text: str) -> str:
    path = folder / "own.yaml"
    path.write_text(text, encoding="utf-8")
    return f"experiment={path}"


POINTS = """
train: {steps: 5}
grid: {beta: [0.04, 1]}
points:
  plain:
  low: {train.dtype: bfloat16, loss.precision: fp8}
  nested: {train: {dtype: float16, lora: true}, peft: {r: 4, rank_pattern: {a.b: 8}}, trl.temperature: 0.5}
"""


def test_points_of_a_preset(tmp_path: Path) -> None:
    own = preset(tmp_path, POINTS)
    c = load(own)
    assert c.points == {
        "plain": {},
        "low": {"train.dtype": "bfloat16", "loss.precision": "fp8"},
        "nested": {
            "train.dtype": "float16",
            "train.lora": True,
            "peft.r": 4,
            "peft.rank_pattern": {"a.b": 8},
            "sampling.temperature": 0.5,
        },
    }
    assert (c.train.dtype, c.loss.precision, c.peft) == ("float32", "auto", {}), "the base stays as it is"
    nested = config.at_points(c)["nested"]
    assert (nested.train.lora, nested.train.steps, nested.peft["r"], nested.points) == (True, 5, 4, {})
    assert list(load(own, "points=low,plain").points) == ["low", "plain"]
    assert list(load(own, "points=[low]").points) == ["low"]
    assert load(own, "points=none").points == {} == load().points
    assert load(own, "points=plain,low", "lora=true").train.lora, "no selected point sets it"


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("points: {a: {train.dtpye: bfloat16}}", [], ["points.a", "train.dtpye", "train.dtype"]),
        ("points: {a: {train.dtype: bfloat}}", [], ["points.a", "train.dtype", "bfloat16"]),
        ("points: {a: {steps: x}}", [], ["points.a", "train.steps=x", "Integer"]),
        ("points: {a: {steps: 0}}", [], ["points.a", "train.steps=0", "1 or more"]),
        ("points: {a: {seeds: 2}}", [], ["points.a", "seeds cannot be set by a point", "axis already"]),
        ("points: {a: {out: x}}", [], ["points.a", "out cannot be set by a point"]),
        ("points: {a: {grid.beta: [1]}}", [], ["points.a", "grid.beta cannot be set by a point"]),
        ("points: {a: {points: {b: {}}}}", [], ["points.a", "points cannot be set by a point"]),
        ("points: {a: {beta: 1, loss.beta: 2}}", [], ["points.a", "loss.beta twice"]),
        ("points: {a: {gsm8k.form: think}}", [], ["gsm8k.form", "task=gsm8k"]),
        ("points: {a: {peft.r: 4}}", [], ["points.a", "peft.r", "train.lora=true"]),
        ("points: {a/b: {steps: 1}}", [], ["points.a/b", "letters"]),
        ("points: {none: {steps: 1}}", [], ["points.none"]),
        ("points: {a: 3}", [], ["points.a", "found 3"]),
        ("points: [a, b]", [], ["points: a preset defines them"]),
        ("points: {a: {steps: 1}, b: {train.steps: 1}}", [], ["a and b come to the same values"]),
        ("points: {a: {steps: 80}, b: {}}", [], ["a and b come to the same values"]),
        ("points: {a: {steps: 1}}\ngrid: {train.steps: [2, 3]}", [], ["train.steps is set twice", "points.a", "grid"]),
        ("points: {a: {steps: 1}}", ["grid.steps=2,3"], ["train.steps is set twice", "points.a", "grid.train.steps"]),
        ("points: {a: {steps: 1}}", ["steps=2"], ["steps is set", "points.a", "points=none"]),
        ("points: {a: {train.dtype: float16}}", ["points=b"], ["points", "'b'", "a"]),
        ("points: {first: {steps: 1}}", ["points=fisrt"], ["fisrt", "did you mean first"]),
        ("points: {a: {steps: 1}}", ["points=a,a"], ["a is there twice"]),
        ("points: {a: {steps: 1}}", ["points.b.steps=2"], ["points.b.steps", "defined in a preset"]),
        ("points: {a: {steps: 1}}", ["grid.points=a"], ["points", "axis already"]),
        ("seeds: 1", ["points=a"], ["points=a", "the preset defines none"]),
        ("points: {a: {steps: 1}, b: {}}\nseeds: 600", [], ["1200 cells"]),
    ],
)
def test_faulty_points(tmp_path: Path, text: str, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(preset(tmp_path, text + "\n"), *overrides)
    for word in words:
        assert word in str(error.value)


def test_names_in_points_are_checked_against_what_is_installed(tmp_path: Path) -> None:
    for text, words in (
        ("points: {a: {variants: x}}", "cannot be set"),
        ("points: {a: {task: gsm9k}}", r"points\.a: task.*gsm8k"),
        ("points: {a: {sampling.temprature: 1}}", r"points\.a: sampling\.temprature.*temperature"),
        ("points: {a: {vllm.kv_cache_dtype: fp8, rollout: transformers}}", r"points\.a: vllm\.kv_cache_dtype.*vllm"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(preset(tmp_path, text + "\n"), check=True)


def test_named_points_are_one_axis(tmp_path: Path) -> None:
    preset = tmp_path / "own.yaml"
    preset.write_text(
        "variants_all: [reference]\nseeds: 2\ngrid: {beta: [0.04, 1]}\n"
        "points: {plain: {}, low: {train.dtype: bfloat16, loss.precision: fp8}, other: {trl.weight_decay: 0.1}}\n"
    )
    found = cells(f"experiment={preset}")
    assert len(found) == 2 * 3 * 2 == len({cell.hash for cell in found})
    first, low = found[0], found[3]
    assert first.name == "reference-seed0-pointplain-beta0.04"
    assert low.name == "reference-seed0-pointlow-beta1" and low.point == {"point": "low", "beta": 1.0}
    assert (low.config.train.dtype, low.config.loss.precision, low.config.loss.beta) == ("bfloat16", "fp8", 1.0)
    assert low.axes == {"point": ["plain", "low", "other"], "beta": [0.04, 1.0]}
    assert low.config.points == {} == low.config.grid and found[4].config.trl == {"weight_decay": 0.1}
    # a cell is what it computes, by whatever keys it was said
    bare = (f"experiment={preset}", "points=none", "seeds=1")
    assert first.hash == cells(*bare)[0].hash
    assert low.hash == cells(*bare, "grid=none", "beta=1", "dtype=bfloat16", "precision=fp8")[0].hash
    assert [c.point for c in cells(f"experiment={preset}", "points=none", "grid=none", "seeds=1")] == [{}]
    selected = cells(f"experiment={preset}", "points=other", "seeds=1")
    assert [c.hash for c in selected] == [c.hash for c in found if c.seed == 0 and c.point["point"] == "other"]


def test_parameters_of_a_variant_in_a_point(tmp_path: Path) -> None:
    preset = tmp_path / "own.yaml"
    preset.write_text(
        "variants: [reference, dr_grpo]\nseeds: 1\npoints: {plain: {}, long: {loss.params.max_completion_length: 9}}\n"
    )
    found = {(c.variant, c.point["point"]): c.config.loss.params for c in cells(f"experiment={preset}")}
    assert found.pop(("dr_grpo", "long")) == {"max_completion_length": 9}
    assert list(found.values()) == [{}, {}, {}]


def test_points_that_differ_in_case_alone_would_share_a_folder(tmp_path: Path) -> None:
    own = preset(tmp_path, "points: {a: {beta: 0.1}, A: {beta: 0.2}}")
    with pytest.raises(ConfigError, match="two cells would be called"):
        cells(own)


@pytest.mark.parametrize("name", ["...yaml", "..hidden.yaml", "a\nb.yaml"])
def test_a_presets_file_cannot_lead_out_of_the_runs_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("seeds: 1\n")
    with pytest.raises(ConfigError, match="runs are kept under the file's name"):
        load(f"experiment={tmp_path / name}")
