"""Cells whose frozen base is in 4 bits: trained, resumed, replayed, and refused where bitsandbytes cannot do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ablate import cell as cells
from ablate import config as configs
from ablate import models, plan, replay
from ablate.errors import ConfigError
from ablate.rundir import CellDir

SMALL = ("train.steps=4", "train.prompts_per_step=4", "train.num_generations=4", "seeds=0,", "grid=none")
SMALL += (
    "eval.prompts=8",
    "eval.every=0",
    "train.checkpoint_every=2",
    "train.rollouts_every=1",
    "train.adapter_every=2",
)
SMALL += ("variants=reference",)
QLORA = ("train.load_in_4bit=true", "train.lora=true", "peft.r=4", "learning_rate=1e-2", "train.warmup_steps=0")
TIMES = ("time/", "step_time", "tokens_per_second", "peak_memory_bytes", "memory/")


def run(folder: Path, *overrides: str, stop: int = 0) -> CellDir:
    class Killed(BaseException):
        pass

    def on_step(done: int, total: int, row: dict[str, Any]) -> None:
        if done == stop:
            raise Killed

    (cell,) = plan.cells(configs.load([*SMALL, *QLORA, *overrides]))
    directory = CellDir(folder / "default" / cell.name)
    directory.write_config(cell)
    try:
        directory.finish(cells.run_cell(cell, directory, on_step))
    except Killed:
        assert stop
    return directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> CellDir:
    return run(tmp_path_factory.mktemp("whole"))


def test_the_base_is_quantised_and_the_head_is_not() -> None:
    full, small = models.load("tiny").build(), models.load("tiny", load_in_4bit=True).build()
    kinds = {name: type(module).__name__ for name, module in small.named_modules() if "proj" in name}
    assert set(kinds.values()) == {"Linear4bit"}
    assert torch.equal(small.lm_head.weight, full.lm_head.weight)
    assert small.get_memory_footprint() < 0.3 * full.get_memory_footprint()
    ids = torch.arange(8).unsqueeze(0)
    gap = (small(ids).logits - full(ids).logits).abs().max()
    assert 0 < gap < 5


def test_a_cell_trains_an_adapter_on_it(whole: CellDir) -> None:
    rows = whole.metrics()
    assert rows[0]["kl"] == 0, "the reference is the 4-bit base with the adapter off"
    assert rows[-1]["kl"] > 0 and rows[-1]["weight_distance"] > 0
    from safetensors.torch import load_file

    policies = sorted(whole.rollouts_dir.glob("policy-*/adapter_model.safetensors"))
    assert policies and {tensor.dtype for tensor in load_file(policies[-1]).values()} == {torch.float32}


def test_another_base_is_another_cell(whole: CellDir, tmp_path: Path) -> None:
    plain = run(tmp_path, "train.load_in_4bit=false")
    assert plain.read_config()["hash"] != whole.read_config()["hash"]
    first = [directory.evals()[0]["eval/probability"] for directory in (plain, whole)]
    assert first[0] != first[1]


@pytest.mark.parametrize("step", [1, 3])
def test_a_cell_stopped_ends_with_the_same_numbers(whole: CellDir, tmp_path: Path, step: int) -> None:
    run(tmp_path, stop=step)
    resumed = run(tmp_path)

    def numbers(directory: CellDir) -> list[dict[str, Any]]:
        rows = [*directory.metrics(), *directory.evals()]
        return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]

    assert numbers(resumed) == numbers(whole)


@pytest.mark.parametrize("stored", [True, False], ids=["stored adapter", "adapter drawn again"])
def test_a_cell_is_replayed(whole: CellDir, tmp_path: Path, stored: bool) -> None:
    cell = whole if stored else run(tmp_path, "train.adapter_every=0")
    assert bool(list(cell.rollouts_dir.glob("policy-*"))) == stored
    assert replay.main([f"run={cell.path}", "step=1"]) == 0
    assert (cell.path / "replay" / "step-000001" / "replay.json").is_file()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.lora=false"], r"train\.load_in_4bit: 4-bit weights stay frozen.*train\.lora=true"),
        (["grid.train.lora=true,false"], r"train\.load_in_4bit: 4-bit weights stay frozen"),
    ],
)
def test_refusals(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configs.load(["train.load_in_4bit=true", *overrides])


def test_where_bitsandbytes_cannot_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes

    def no_kernel(*arguments: Any, **options: Any) -> None:
        raise NotImplementedError("no 4-bit kernel for this device")

    monkeypatch.setattr(bitsandbytes.nn.Linear4bit, "forward", no_kernel)
    with pytest.raises(ConfigError, match=r"train\.load_in_4bit: bitsandbytes cannot do it on cpu: no 4-bit kernel"):
        configs.load([*QLORA, "device=cpu"])
