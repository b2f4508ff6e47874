"""How token losses become one number: a weight for each token.

`weights` gives c with loss = sum over tokens of c x token loss. The normaliser is that of the whole accumulated batch
where `num_items` or `num_sequences` is given, so that the parts of a batch add up to the unsplit loss. Completions
without an unmasked token are in no mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from losses import checks

AGGREGATIONS = {
    "sequence_mean": "mean over a completion's tokens, then over completions (GRPO)",
    "token_mean": "mean over all tokens of the batch (DAPO, BNPO)",
    "constant": "sum over tokens / (completions x max_completion_length) (Dr. GRPO)",
    "sequence_sum": "sum over a completion's tokens, mean over completions (LUSPO, REINFORCE)",
}


def weights(
    mask: Tensor,
    aggregation: str,
    *,
    num_items: int | Tensor | None = None,
    num_sequences: int | Tensor | None = None,
    params: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weights (B, T) in `dtype`, 0 where `mask` (B, T, bool) is False; `constant` reads max_completion_length."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {aggregation!r}; known: {', '.join(AGGREGATIONS)}")
    m = mask.to(dtype)
    lengths = m.sum(-1, keepdim=True)
    if aggregation == "token_mean":
        return m / _at_least_one(lengths.sum() if num_items is None else num_items, m)
    sequences = _at_least_one((lengths > 0).sum() if num_sequences is None else num_sequences, m)
    if aggregation == "sequence_mean":
        return m / lengths.clamp(min=1) / sequences
    if aggregation == "sequence_sum":
        return m / sequences
    longest = params.get("max_completion_length")
    if longest is None:
        raise ValueError("max_completion_length is needed by the aggregation 'constant': give the generation limit")
    return m / (longest * sequences)


def _at_least_one(count: int | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(count, dtype=like.dtype, device=like.device).clamp(min=1)


def group_advantages(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-4) -> Tensor:
    """(r - mean) / (std + eps) within each group, float32 (B,): GRPO's advantage (arXiv 2402.03300), TRL's eps and std.

    A NaN reward is missing: it enters no statistic and its advantage is 0. So is that of a group whose rewards differ
    by no more than float32 rounding, and of a completion alone in its group.
    """
    centred, present, index, groups = _centre(rewards, group_ids)
    counts = torch.zeros(groups, device=rewards.device).index_add_(0, index, present.float())
    squares = torch.zeros(groups, device=rewards.device, dtype=torch.float64).index_add_(0, index, centred.square())
    std = (squares / (counts - 1).clamp(min=1)).sqrt()[index]
    return (centred / (std + eps)).float()


def centred_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """r - mean within each group, (B,): Dr. GRPO's advantage (arXiv 2503.20783). NaN as in `group_advantages`."""
    return _centre(rewards, group_ids)[0].float()


def _centre(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Centred rewards (float64, 0 where missing or equal to rounding), presence, group index, group count."""
    if rewards.dim() != 1 or group_ids.shape != rewards.shape:
        raise ValueError(
            f"rewards and group_ids must both be (B,), not {tuple(rewards.shape)} and {tuple(group_ids.shape)}"
        )
    if checks.may_look(rewards) and bool(torch.isinf(rewards).any()):
        where = int(torch.isinf(rewards).nonzero()[0])
        raise ValueError(f"rewards is {rewards[where].item()} at {where}: give finite rewards, NaN for none")
    unique, index = torch.unique(group_ids, return_inverse=True)
    groups = len(unique)
    present = ~torch.isnan(rewards)
    r = torch.where(present, rewards, 0).double()
    zeros = torch.zeros(groups, device=r.device, dtype=r.dtype)
    counts = zeros.index_add(0, index, present.to(r.dtype))
    mean = zeros.index_add(0, index, r) / counts.clamp(min=1)
    centred = torch.where(present, r - mean[index], 0)
    scale = zeros.scatter_reduce(0, index, r.abs(), "amax")
    spread = zeros.scatter_reduce(0, index, centred.abs(), "amax")
    # Sums of equal rewards differ in their last float32 digits; divided by its own deviation that residue is signal.
    equal = spread <= 4 * torch.finfo(torch.float32).eps * scale
    return torch.where(equal[index], 0, centred), present, index, groups
