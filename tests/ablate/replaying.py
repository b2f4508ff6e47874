"""Short runs to replay, and their gradients taken directly: full logits, log_softmax, autograd of `policy_loss`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import losses
from ablate import cell as cells
from ablate import config as configs
from ablate import plan, replay
from ablate.rundir import CellDir

BASE = ["train.prompts_per_step=4", "train.num_generations=4", "train.checkpoint_every=0", "seeds=0,", "grid=none"]
BASE += ["eval.prompts=4", "train.warmup_steps=0", "variants=reference"]
FULL = ["train.steps=5", "train.rollouts_every=2", "train.adapter_every=2"]
LORA = ["train.steps=5", "train.lora=true", "peft.r=4", "learning_rate=2e-2", "train.micro_batch_size=8"]
LORA += ["train.num_iterations=2", "epsilon=0.1", "train.rollouts_every=2", "train.adapter_every=2"]
PAD = 0  # the tiny model's


def train(folder: Path, *overrides: str) -> Path:
    """Folder of an experiment with one cell."""
    config = configs.load([*BASE, *overrides], check=False)
    (cell,) = plan.cells(config)
    directory = CellDir(folder / cell.name)
    directory.write_config(cell)
    directory.finish(cells.run_cell(cell, directory, lambda *a: None))
    return folder


def run(folder: Path, *words: str) -> dict[str, Any]:
    return replay.replay(replay.parse([f"run={folder}", *words]))


def by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {v["name"]: v for v in result["variants"]}


def cosine(result: dict[str, Any], a: str, b: str, what: str = "cosine") -> float | None:
    names = [v["name"] for v in result["variants"]]
    return result[what][names.index(a)][names.index(b)]


def cell_of(folder: Path) -> Path:
    return folder / "reference-seed0"


def copied(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


class Direct:
    """The rollouts of a step, and flat gradients of the policy at them."""

    def __init__(self, folder: Path, step: int, model: Any, reference: Callable[[], Any], drawn: Any = None) -> None:
        rows = pd.read_parquet(cell_of(folder) / "rollouts" / f"step-{step:06d}.parquet")
        prompts, done = rows["prompt_ids"].tolist(), rows["completion_ids"].tolist()
        self.start, width = max(map(len, prompts)), max(map(len, done))
        self.ids = torch.tensor(
            [
                [PAD] * (self.start - len(p)) + [*p, *c] + [PAD] * (width - len(c))
                for p, c in zip(prompts, done, strict=True)
            ]
        )
        self.attention = torch.tensor(
            [[0] * (self.start - len(p)) + [1] * (len(p) + len(c)) + [0] * (width - len(c))
             for p, c in zip(prompts, done, strict=True)]
        )  # fmt: skip
        self.mask = self.attention[:, self.start :].bool()
        self.groups = torch.tensor(rows["group"].tolist())
        self.rewards = torch.tensor([sum(r.values()) for r in rows["rewards"]], dtype=torch.float32)
        self.model = model.eval()
        self.trained = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            self.ref = self.distribution(reference())
            self.old = self.of_tokens(self.distribution(drawn or model))
        self.p = self.of_tokens(self.ref)

    def distribution(self, model: Any) -> torch.Tensor:
        logits = model(input_ids=self.ids, attention_mask=self.attention).logits
        return logits[:, self.start - 1 : -1].log_softmax(-1)

    def of_tokens(self, log_probs: torch.Tensor) -> torch.Tensor:
        return log_probs.gather(-1, self.ids[:, self.start :].unsqueeze(-1)).squeeze(-1)

    def advantages(self, name: str, beta: float) -> torch.Tensor:
        rewards = self.rewards.double()
        if name == "kl_in_reward":
            rewards = rewards - beta * ((self.old - self.p) * self.mask).sum(-1)
        out = torch.zeros_like(rewards)
        for group in self.groups.unique():
            inside = rewards[self.groups == group]
            scale = 1.0 if name == "dr_grpo" else inside.std() + 1e-4
            out[self.groups == group] = (inside - inside.mean()) / scale
        return out.float()

    def gradient(self, name: str, beta: float, **params: Any) -> torch.Tensor:
        log_probs = self.distribution(self.model)
        variant = losses.get(name)
        if name == "dr_grpo":
            params["max_completion_length"] = 4
        inputs = losses.LossInputs(
            self.ids[:, self.start :], self.mask, self.advantages(name, beta), self.old, self.p, group_ids=self.groups
        )
        exact = beta if variant.vocabulary else 0.0
        loss = losses.policy_loss(
            self.of_tokens(log_probs), inputs, name, beta=0.0 if exact else beta, **params
        ).loss  # fmt: skip
        if exact:
            a, b = (log_probs, self.ref) if variant.vocabulary == "reverse_kl" else (self.ref, log_probs)
            kl = (a.exp() * (a - b)).sum(-1) * self.mask
            loss = loss + exact * (kl.sum(-1) / self.mask.sum(-1)).mean()
        found = torch.autograd.grad(loss, self.trained, allow_unused=True)
        return torch.cat(
            [torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(self.trained, found, strict=True)]
        ).double()


def agree(result: dict[str, Any], direct: Direct, names: list[str], beta: float, **params: Any) -> None:
    """Norms of the gradient and its two parts, and every cosine, against gradients at beta and at 0."""
    found = by_name(result)
    at = {name: direct.gradient(name, beta, **params) for name in names}
    scale = max(float(g.norm()) for g in at.values())
    close = {"rel": 2e-5, "abs": 2e-6 * scale}
    for name in names:
        zero = direct.gradient(name, 0.0, **params)
        assert found[name]["grad_norm"] == pytest.approx(float(at[name].norm()), **close), name
        assert found[name]["surrogate_norm"] == pytest.approx(float(zero.norm()), **close), name
        assert found[name]["kl_norm"] == pytest.approx(float((at[name] - zero).norm()), **close), name
    for a in names:
        for b in names:
            value = cosine(result, a, b)
            size = float(at[a].norm() * at[b].norm())
            if value is None:
                assert size <= 1e-12
            else:
                assert value == pytest.approx(float(at[a] @ at[b]) / size, abs=1e-5), (a, b)
