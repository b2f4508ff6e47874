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


def test_completions_end_where_the_engine_says_so(folder: Path, tmp_path: Path) -> None:
    """At a stop string there is no end token; an end token that the engine went past ends nothing."""

    class Says(Scripted):
        def generate(self, *args: Any, **kwargs: Any) -> Rollout:
            rows = super().generate(*args, **kwargs).completion_ids  # every second one ends in the end token
            return Rollout(rows, finished=[row % 4 < 2 for row in range(len(rows))])

    generations: list[Any] = []
    trainer = make(
        AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Says(),
        config={"mask_truncated_completions": True, "eval_strategy": "steps", "eval_steps": 3,
                "per_device_eval_batch_size": 16},
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:4]}), on_generation=generations.append,
    )  # fmt: skip
    trainer.train()
    finished = torch.tensor([True, True, False, False] * 4)
    for step, generation in enumerate(generations):
        assert torch.equal(generation.column("completion_mask").any(1), finished)
        lengths = torch.tensor(generation.lengths)[finished].double()
        for name, value in (("mean", lengths.mean()), ("min", lengths.min()), ("max", lengths.max())):
            assert history(trainer, f"completions/{name}_terminated_length")[step] == pytest.approx(float(value))
    assert history(trainer, "completions/clipped_ratio") == [0.5] * 3
    assert history(trainer, "eval_completions/clipped_ratio") == [0.5]
    assert trainer.mask_truncated_completions

    class Cut(Scripted):
        def generate(self, *args: Any, **kwargs: Any) -> Rollout:
            rows = super().generate(*args, **kwargs).completion_ids
            return Rollout(rows, finished=[False] * len(rows))

    trainer = make(
        AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Cut(),
        config={"mask_truncated_completions": True},
    )  # fmt: skip
    trainer.train()
    assert history(trainer, "completions/clipped_ratio") == [1.0] * 3
    assert history(trainer, "completions/max_terminated_length") == [0.0] * 3
    assert history(trainer, "loss") == [0.0] * 3


def test_what_an_engine_says_of_end_tokens_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """Where completions end at end tokens alone, TRL's own count is the engine's."""

    class Says(Scripted):
        def generate(self, *args: Any, **kwargs: Any) -> Rollout:
            rows = super().generate(*args, **kwargs).completion_ids
            return Rollout(rows, finished=[row[-1] == 1 for row in rows])

    runs = []
    for engine in (Scripted(), Says()):
        trainer = make(
            AblationTrainer, folder, tmp_path, loss_variant="reference", engine=engine,
            config={"mask_truncated_completions": True},
        )  # fmt: skip
        trainer.train()
        runs.append(trainer)
    names = [name for name in runs[0].state.log_history[0] if name.startswith("completions/")]
    assert len(names) == 7
    for name in (*names, "loss", "kl"):
        assert history(runs[0], name) == pytest.approx(history(runs[1], name), abs=1e-6), name


def test_groups_of_an_evaluation_have_its_size(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[bool, list[list[int]]] = {True: [], False: []}
    loss = losses.linear_policy_loss

    def watched(hidden: Any, weight: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen[trainer.model.training].append(inputs.group_ids.tolist())
        return loss(hidden, weight, inputs, *args, **kwargs)

    monkeypatch.setattr(losses, "linear_policy_loss", watched)
    trainer = make(
        AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Scripted(),
        config={"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8,
                "num_generations_eval": 2},
        eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:4]}),
    )  # fmt: skip
    trainer.train()
    assert [sorted(ids) for ids in seen[True]] == [[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4]
    assert seen[False] == [[0, 0, 1, 1, 2, 2, 3, 3]]
