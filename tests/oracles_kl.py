"""Plain float64 transcriptions of the KL family: estimates as losses, the exact divergences, the KL in the reward.

Beside `tests.oracles` nothing of this repository is imported; gradients come from autograd, as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.oracles import Batch, Definition, Head, forward_kl, k1, k2, k3, logits, reverse_kl, token_ratio


def fixed_ratio(n: Tensor, o: Tensor) -> Tensor:
    """sg(exp(n - o))."""
    return token_ratio(n, o).detach()


def k1_abs(n: Tensor, p: Tensor) -> Tensor:
    return (n - p).abs()


def k1_value_k2_grad(n: Tensor, p: Tensor) -> Tensor:
    return k2(n, p) - k2(n, p).detach() + k1(n, p).detach()


def k3_value_k2_grad(n: Tensor, p: Tensor) -> Tensor:
    return k2(n, p) - k2(n, p).detach() + k3(n, p).detach()


def take_cost_to_go(a: Tensor, o: Tensor, p: Tensor, beta: float) -> Tensor:
    """A_t - beta sum_{s >= t} (o_s - p_s)."""
    return torch.stack([a[t] - beta * (o - p)[t:].sum() for t in range(len(o))]) if len(o) else a


ESTIMATES = {"k1": k1, "k2": k2, "k3": k3, "k1_abs": k1_abs}

DEFINITIONS = {
    **{name: Definition(token_ratio, term) for name, term in ESTIMATES.items()},
    **{f"{name}_sg_is": Definition(token_ratio, term, kl_weight=fixed_ratio) for name, term in ESTIMATES.items()},
    **{f"{name}_is": Definition(token_ratio, term, kl_weight=token_ratio) for name, term in ESTIMATES.items()},
    "k1_value_k2_grad": Definition(token_ratio, k1_value_k2_grad),
    "k3_value_k2_grad": Definition(token_ratio, k3_value_k2_grad),
    "kl_in_reward": Definition(token_ratio, None),  # the loss sees rewards that hold the KL already
    "kl_in_reward_token": Definition(token_ratio, None, shape=take_cost_to_go),
}

EXACT = {"exact_reverse_kl": reverse_kl, "exact_forward_kl": forward_kl}
"""Variants whose KL term is a divergence of the two models' logits."""

WITHOUT_KL = Definition(token_ratio, None)


def divergence(
    name: str, hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, head: Head, ref_head: Head
) -> Tensor:
    """(..., H), (V, H), (..., H'), (V, H') -> (...), nats; the reference is a constant."""
    return EXACT[name](logits(hidden, weight, head), logits(ref_hidden, ref_weight, ref_head).detach())


def mean_over_completions(values: Tensor, batch: Batch) -> Tensor:
    """The mean over each completion's unmasked tokens, then over the completions that have any."""
    means = [values[b][batch.mask[b] != 0].mean() for b in range(len(values)) if bool((batch.mask[b] != 0).any())]
    count = len(means) if batch.num_sequences is None else batch.num_sequences
    return torch.stack(means).sum() / count if means else (values * 0).sum()
