"""What AblationTrainer logs beside the loss: metrics pooled over micro-batches, times by part, tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

import losses
from ablate import schema
from ablate.rollout import SYNC, Rollout
from ablate.trainer import AblationTrainer
from tests.ablate.training import PROMPTS, Scripted, digits, history, make


def test_metrics_are_pooled_by_tokens(folder: Path, tmp_path: Path) -> None:
    trainer = make(AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Scripted())
    for clipped, tokens in ((3.0, 12.0), (3.0, 4.0)):
        metric = losses.Metric(torch.tensor(clipped), torch.tensor(tokens))
        trainer._pooled["train"].add({"clip_ratio/region_mean": metric})
    trainer.model.train()
    trainer.log({"loss": 0.0})
    assert trainer.state.log_history[-1]["clip_ratio/region_mean"] == pytest.approx(0.375)


def test_evaluations_leave_the_training_metrics_alone(folder: Path, tmp_path: Path) -> None:
    """TRL's own evaluation (eval_strategy) logs the loss's metrics as eval_*, out of the means of the next step."""
    runs: list[Any] = []
    for config in ({}, {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}):
        trainer = make(
            AblationTrainer, folder, tmp_path / str(len(runs)), loss_variant="reference", engine=Scripted(),
            config=config, eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:4]}),
        )  # fmt: skip
        trainer.train()
        runs.append(trainer)
    for key in ("kl", "entropy"):
        assert history(runs[1], key) == history(runs[0], key)
        assert len(history(runs[1], f"eval_{key}")) == 3


def test_logged_names(folder: Path, tmp_path: Path) -> None:
    trainer = make(AblationTrainer, folder, tmp_path, loss_variant="full_reverse_kl", engine=Scripted())
    trainer.train()
    row = next(r for r in trainer.state.log_history if "loss" in r)
    missing = [name for name in schema.METRICS if name not in row]
    assert not missing
    assert {f"rewards/{f}/{s}" for f in ("digits", "even") for s in ("mean", "std")} <= set(row)


def test_times_by_part(folder: Path, tmp_path: Path) -> None:
    """Each part holds what was spent in it, engine and reward function slowed down, and they add up to the step."""

    class Slow(Scripted):
        def generate(self, *args: Any, **kwargs: Any) -> Rollout:
            time.sleep(0.3)
            return replace(super().generate(*args, **kwargs), stats=dict.fromkeys(SYNC, 0.05))

    def slow(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        time.sleep(0.2)
        return digits(prompts, completions)

    config = {"num_iterations": 2, "max_steps": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    trainer = make(
        AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Slow(), reward_funcs=[slow],
        config={**config, "per_device_eval_batch_size": 16, "eval_strategy": "steps", "eval_steps": 1},
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:4]}),
    )  # fmt: skip
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    parts = [name for name in schema.METRICS if name.startswith("time/")]
    for row in rows:
        assert sum(row[name] for name in parts) == pytest.approx(row["step_time"], rel=1e-6)
        assert all(row[name] >= 0 for name in parts)
        assert row["time/loss"] > 0 and row["time/optimizer"] > 0
    drawn = ("time/rollout", "time/sync", "time/reward", "time/old_logps", "time/reference")
    for row, fresh in zip(rows, (True, False, True, False), strict=True):
        assert all((row[name] > 0) == fresh for name in drawn), row
    assert all(row["time/sync"] == pytest.approx(0.15) for row in rows[::2])
    assert all(0.15 <= row["time/rollout"] < 0.25 and 0.2 <= row["time/reward"] < 0.3 for row in rows[::2])
    assert all(row["step_time"] < 0.5 for row in rows[1::2])  # the evaluations, of half a second each, are left out


@pytest.mark.parametrize(
    "config", [{}, {"num_iterations": 2}, {"steps_per_generation": 2, "per_device_train_batch_size": 8}]
)
def test_tokens_per_second_count_what_was_trained_on(folder: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    """Over all steps of a log, each with the tokens of its own micro-batches."""
    counts: list[int] = []
    trainer = make(
        AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Scripted(),
        config={"logging_steps": 2, "max_steps": 4, **config},
        on_generation=lambda g: counts.extend(
            int(b["completion_mask"].sum()) for _ in range(config.get("num_iterations", 1)) for b in g._batches
        ),
    )  # fmt: skip
    trainer.train()
    for row, steps in zip([r for r in trainer.state.log_history if "loss" in r], (counts[:2], counts[2:]), strict=True):
        assert row["tokens_per_second"] * 2 * row["step_time"] == pytest.approx(sum(steps))
