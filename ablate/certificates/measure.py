"""The expected gradient of each part of a loss, and its variance, from every completion run through `losses`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import losses
from ablate.certificates.problems import F64, Problem


@dataclass(frozen=True)
class Measured:
    """One part of a loss on every completion: values (N,), gradients (N, P), probabilities of being drawn (N,)."""

    values: Tensor
    gradients: Tensor
    drawn: Tensor

    @property
    def gradient(self) -> Tensor:
        """Expected gradient (P,)."""
        return self.drawn @ self.gradients

    @property
    def variance(self) -> float:
        """Of the gradient from one completion: the trace of its covariance."""
        centred = self.gradients - self.gradient
        return float(self.drawn @ centred.square().sum(-1))

    @property
    def value(self) -> float:
        return float(self.drawn @ self.values)

    @property
    def value_deviation(self) -> float:
        return float(self.drawn @ (self.values - self.value).square()) ** 0.5


def own_params(variant: losses.Variant, length: int) -> dict[str, Any]:
    """Values for the parameters that a variant cannot do without: the completions' length."""
    return {p.name: p.type(length) for p in variant.params if p.default is None}


def has_kl(variant: losses.Variant) -> bool:
    hooks = (variant.kl, variant.vocabulary, variant.shape_reward, variant.shape_advantage)
    return any(hook is not None for hook in hooks)


def token_share(variant: losses.Variant, problem: Problem) -> float:
    """The weight of one token of a completion of full length in the variant's mean."""
    from losses.aggregation import weights

    full = torch.ones(1, problem.length, dtype=torch.bool)
    values = variant.resolve(own_params(variant, problem.length))
    return float(weights(full, variant.aggregation, num_sequences=1, params=values, dtype=F64)[0, 0])


def measure(
    variant: losses.Variant, problem: Problem, part: str, *, off_policy: bool, epsilon: float | None = None
) -> Measured:
    """The part "surrogate" (beta 0) or "kl" (beta 1, rewards 0) on each completion alone, as one of a large batch.

    A mean over the batch's tokens is taken at the expected number of tokens, its limit in a large batch.
    """
    n, p = problem.log_probs(problem.policy), problem.log_probs(problem.reference)
    o = problem.log_probs(problem.sampler) if off_policy else None
    drawn = problem.probabilities(problem.source(off_policy))
    tokens = (drawn * problem.mask.sum(-1)).sum()
    params = own_params(variant, problem.length) | {"beta": float(part == "kl"), "epsilon": epsilon}
    rewards = problem.rewards if part == "surrogate" else torch.zeros_like(problem.rewards)
    if part == "kl" and variant.shape_reward is not None:
        rewards = variant.shape_reward(rewards, n if o is None else o, p, problem.mask, variant.resolve(params))
    values, gradients = [], []
    for i in range(len(problem.ids)):
        one = slice(i, i + 1)
        inputs = losses.LossInputs(
            completion_ids=problem.ids[one],
            completion_mask=problem.mask[one],
            advantages=rewards[one],
            old_per_token_logps=None if o is None else o[one],
            ref_per_token_logps=p[one],
            num_items_in_batch=tokens,
            num_sequences_in_batch=1,
            group_ids=torch.zeros(1, dtype=torch.long),
            ref_hidden=problem.states[one],
            ref_lm_head_weight=problem.reference,
        )
        if part == "kl" and variant.vocabulary is not None or problem.temperature != 1.0:
            weight = problem.policy.clone().requires_grad_(True)
            out = losses.linear_policy_loss(
                problem.states[one], weight, inputs, variant, temperature=problem.temperature, **params
            )
            gradient = torch.autograd.grad(out.loss, weight)[0].reshape(-1)
        else:
            leaf = n[one].clone().requires_grad_(True)
            out = losses.policy_loss(leaf, inputs, variant, **params)
            gradient = torch.einsum("t,tp->p", torch.autograd.grad(out.loss, leaf)[0][0], problem.jacobian[i])
        values.append(out.loss.detach())
        gradients.append(gradient)
    return Measured(torch.stack(values), torch.stack(gradients), drawn)
