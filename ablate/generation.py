"""A batch of rollouts: which prompts it holds, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl.trainer.utils import RepeatSampler

if TYPE_CHECKING:
    from ablate.trainer import AblationTrainer


class EpochSampler(RepeatSampler):
    """TRL's RepeatSampler; the order of an epoch does not depend on this process having run those before it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):  # TRL draws one permutation an epoch from one generator
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


class Generation:
    """One batch of rollouts, rows in the order of generation (prompt by prompt, num_generations rows each).

    rewards: (rows, functions) with NaN where a function gave None. Tensors live on the training device.
    """

    def __init__(self, trainer: AblationTrainer, batches: list[dict[str, Any]]) -> None:
        prompts, completions, rewards, self.lengths = trainer._scored
        offset = trainer.accelerator.process_index * len(prompts)
        self.step = trainer.state.global_step + 1
        self.sampling_seed = trainer._sampling_seed
        self.prompts, self.completions = prompts, completions
        self.reward_names = list(trainer.reward_func_names)
        self.rewards = rewards[offset : offset + len(prompts)]
        weights = trainer.reward_weights.to(rewards.device)
        missing = torch.isnan(self.rewards).all(1)
        self.total_rewards = (self.rewards * weights).nansum(1).masked_fill(missing, torch.nan)
        self.num_generations = trainer.num_generations
        self.group_ids = torch.arange(len(prompts), device=rewards.device) // self.num_generations
        self._batches = batches
        self.advantages = self.column("advantages")

    def has(self, name: str) -> bool:
        """Whether the micro-batches hold this tensor."""
        return self._batches[0].get(name) is not None

    def column(self, name: str) -> Tensor:
        """A tensor of the micro-batches, rows back in the order of generation."""
        rows = torch.cat([batch["row"] for batch in self._batches])
        return torch.cat([batch[name] for batch in self._batches])[rows.argsort()]

    def shape_rewards(self, hook: Callable[..., Tensor], params: dict[str, Any]) -> Tensor:
        """Rewards after the variant's hook, which sees old and reference log-probs and the mask."""
        old, ref, mask = (self.column(n) for n in ("old_per_token_logps", "ref_per_token_logps", "completion_mask"))
        return hook(self.total_rewards, old, ref, mask, params)


def loss_mask(batch: dict[str, Tensor]) -> Tensor:
    """(B, T): completion tokens that the loss counts; tool output is not among them."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def extra_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """What a model's forward takes beside ids and mask. Raises ValueError for images."""
    names = ("token_type_ids",)
    if any(name in batch for name in ("pixel_values", "num_images")):
        raise ValueError("image inputs: AblationTrainer trains on text")
    return {name: batch[name] for name in names if name in batch}


def normalise(batches: list[dict[str, Any]], window: int, accelerator: Any) -> None:
    """Gives micro-batches the tokens and completions of their accumulation window, so that they add up to the whole.

    window: micro-batches of an optimizer step.
    """
    whole = len(batches) % window == 0
    size = window if whole else 1
    for start in range(0, len(batches), size):
        part = batches[start : start + size]
        mask = torch.cat([loss_mask(batch) for batch in part]).bool()
        counts = torch.stack([mask.sum(), mask.any(-1).sum()]).float()
        counts = accelerator.reduce(counts, reduction="sum") / accelerator.num_processes
        # A window that spans generations cannot know its later counts: each part then weighs 1 / window.
        counts = counts if whole else counts * window
        for batch in part:
            batch["num_items"], batch["num_sequences"] = counts[0], counts[1]


def length_figures(lengths: Tensor, ended: Tensor) -> dict[str, float]:
    """TRL's metrics of completions (B,) by whether they ended or were cut; 0 where none ended."""
    whole = lengths[ended].double() if ended.any() else torch.zeros(1)
    return {
        "completions/clipped_ratio": 1 - ended.double().mean().item(),
        "completions/mean_terminated_length": whole.mean().item(),
        "completions/min_terminated_length": whole.min().item(),
        "completions/max_terminated_length": whole.max().item(),
    }
