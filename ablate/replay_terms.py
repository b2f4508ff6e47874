"""Every variant's loss on one batch, as derivatives with respect to the policy's log-probs: what enters its gradient.

A gradient is surrogate + beta x KL. The surrogate is the variant at beta = 0. The KL part is its KL term, or what a KL
in the reward changes in the surrogate, divided by beta, or the exact divergence over the vocabulary, which is no
function of the sampled log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import losses
from ablate.errors import ConfigError
from ablate.replay_stored import Batch, Stored
from losses import checks
from losses.aggregation import weights
from losses.policy import Terms, evaluate

BINS = 5
SIGNS = (("negative", -1), ("zero", 0), ("positive", 1))
COMMON = ("epsilon", "epsilon_high")


@dataclass(frozen=True)
class Scored:
    """Log-probs (B, T), 0 where masked: n of the policy, o of the one that drew the tokens, p of the reference, mu of
    the sampler or None. off_policy: n and o are of two policies.
    """

    n: Tensor
    o: Tensor
    p: Tensor
    mu: Tensor | None
    off_policy: bool


@dataclass(frozen=True)
class VariantTerms:
    """A variant on the batch: d loss / d n (B, T) of its two parts, the KL's before beta.

    kl None: no KL part. direction: of the exact KL ("reverse" or "forward"), with its aggregation weights in `kl`.
    """

    variant: losses.Variant
    params: dict[str, Any]
    surrogate: Tensor
    kl: Tensor | None
    direction: str | None
    loss: float | None  # without an exact KL's share, which needs both models' logits
    metrics: dict[str, float]

    @property
    def beta(self) -> float:
        return float(self.params["beta"])

    @property
    def total(self) -> Tensor:
        """d loss / d n (B, T), an exact KL left out."""
        return self.surrogate if self.kl is None or self.direction else self.surrogate + self.beta * self.kl


def parameters(variant: losses.Variant, cell: Stored, given: Mapping[str, Any], length: int | None) -> dict[str, Any]:
    """The variant's parameters: those of the run that it has, then `given` ones that it has; resolved.

    length: the run's generation limit, for an aggregation that divides by it. Raises ConfigError naming the parameter.
    """
    loss, trl = cell.config["loss"], cell.config["trl"]
    known = {p.name for p in variant.all_params}
    values: dict[str, Any] = {
        "beta": loss["beta"],
        "sampling_mode": trl.get("vllm_importance_sampling_mode", "sequence_truncate"),
        **{name: loss[name] for name in COMMON},
    }
    if length is not None:
        values["max_completion_length"] = length
    values |= loss["params"]
    values = {name: value for name, value in values.items() if name in known and (value is not None or name in COMMON)}
    values |= {name: value for name, value in given.items() if name in known}
    if "epsilon" in given and "epsilon_high" not in given:
        values.pop("epsilon_high")
    try:
        return variant.resolve(values)
    except ValueError as error:
        raise ConfigError(f"{variant.name}: {error}") from error


def advantages(
    variant: losses.Variant, cell: Stored, batch: Batch, scored: Scored, params: dict[str, Any], beta: float
) -> Tensor:
    """(B,) as the trainer forms them for this variant. Raises ConfigError where the run's reward scaling rules that
    out.
    """
    plain = cell.config["trl"].get("scale_rewards", "group") in ("group", True) and (
        cell.config["trl"].get("multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize"
    )
    own = variant.advantage is not None or variant.shape_reward is not None
    if not plain:
        trained = losses.get(cell.variant)
        if own or trained.advantage is not None or trained.shape_reward is not None:
            raise ConfigError(
                f"variants: {variant.name} sets its own advantages, the run's trl.scale_rewards other ones; leave it "
                "out"
            )
        return batch.advantages
    rewards = batch.total_rewards
    if variant.shape_reward is not None and beta > 0:
        rewards = variant.shape_reward(rewards, scored.o, scored.p, batch.completion_mask, {**params, "beta": beta})
    return (variant.advantage or losses.group_advantages)(rewards, batch.group_ids)


def loss_inputs(
    variant: losses.Variant, cell: Stored, batch: Batch, scored: Scored, params: dict[str, Any], beta: float
) -> losses.LossInputs:
    """The variant's inputs on the whole batch, as the trainer forms them."""
    mask = batch.completion_mask
    return losses.LossInputs(
        completion_ids=batch.completion_ids,
        completion_mask=mask,
        advantages=advantages(variant, cell, batch, scored, params, beta),
        old_per_token_logps=scored.o,
        ref_per_token_logps=scored.p,
        sampling_per_token_logps=scored.mu,
        num_items_in_batch=mask.sum(),
        num_sequences_in_batch=mask.any(-1).sum(),
        group_ids=batch.group_ids,
    )


def terms(variant: losses.Variant, cell: Stored, batch: Batch, scored: Scored, params: dict[str, Any]) -> VariantTerms:
    """The variant on the whole batch. Raises ConfigError where it needs what the batch does not have."""

    def at(beta: float) -> tuple[Terms, losses.LossInputs]:
        values = {**params, "beta": beta}
        inputs = loss_inputs(variant, cell, batch, scored, params, beta)
        try:
            # An exact KL comes from the hidden states, later.
            checks.check_inputs(
                variant, inputs, {**values, "beta": 0.0} if variant.vocabulary else values, scored.n.shape
            )
            return evaluate(variant, scored.n, inputs, values), inputs
        except ValueError as error:
            raise ConfigError(f"variants: {variant.name}: {error}") from error

    beta = float(params["beta"])
    whole, inputs = at(beta)
    surrogate, kl, direction = whole.grad_surrogate, whole.grad_kl, None
    loss: float | None = float(whole.loss)
    if beta > 0 and variant.vocabulary is not None:
        direction, loss = variant.vocabulary.removesuffix("_kl"), None
        mask = batch.completion_mask.bool()
        kl = weights(
            mask, variant.aggregation, num_items=inputs.num_items_in_batch,
            num_sequences=inputs.num_sequences_in_batch, params=params, dtype=surrogate.dtype,
        ).expand_as(surrogate)  # fmt: skip
    elif beta > 0 and (variant.shape_reward is not None or variant.shape_advantage is not None):
        without = at(0.0)[0].grad_surrogate
        shaped = (surrogate - without) / beta
        surrogate, kl = without, shaped if kl is None else shaped + kl
    return VariantTerms(
        variant=variant,
        params=params,
        surrogate=surrogate,
        kl=kl,
        direction=direction,
        loss=loss,
        metrics={name: float(metric.mean) for name, metric in whole.metrics.items()},
    )


@dataclass(frozen=True)
class Components:
    """The distinct gradients that make up all variants', and each variant as a combination of them.

    parts: (direction or None, (B, T) d loss / d n or weights); surrogate, kl: index of each variant's part, None where
    it is exactly 0; factors: beta of each variant.
    """

    parts: list[tuple[str | None, Tensor]]
    surrogate: list[int | None]
    kl: list[int | None]
    factors: list[float]

    def combinations(self, what: str = "total") -> Tensor:
        """(variants, parts) float64: rows that combine the parts to each variant's total, surrogate, or beta x KL."""
        rows = torch.zeros(len(self.factors), len(self.parts), dtype=torch.float64)
        for i, (s, k, beta) in enumerate(zip(self.surrogate, self.kl, self.factors, strict=True)):
            if s is not None and what in ("total", "surrogate"):
                rows[i, s] += 1
            if k is not None and what in ("total", "kl"):
                rows[i, k] += beta
        return rows


def components(found: Sequence[VariantTerms]) -> Components:
    """Equal derivatives are one part, so that variants with one surrogate share its backward pass."""
    parts: list[tuple[str | None, Tensor]] = []

    def index(direction: str | None, g: Tensor | None) -> int | None:
        if g is None or not bool(g.any()):
            return None
        for i, (d, other) in enumerate(parts):
            if d == direction and torch.equal(g, other):
                return i
        parts.append((direction, g))
        return len(parts) - 1

    surrogate = [index(None, t.surrogate) for t in found]
    kl = [index(t.direction, t.kl) for t in found]
    return Components(parts, surrogate, kl, [t.beta for t in found])


def position_bins(batch: Batch) -> list[tuple[int, int]]:
    """At most BINS ranges [start, stop) of about equal width, up to the longest completion."""
    longest = batch.completion_mask.shape[1]
    count = min(BINS, longest)
    edges = [round(i * longest / count) for i in range(count + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))


def token_weights(found: VariantTerms, batch: Batch) -> dict[str, Any]:
    """Mean |d loss / d n| of a token times the number of tokens, by position and by the advantage's sign.

    1 for every token would be a plain mean of log-probs; None where no token is. Shares of the whole by sign. The sign
    is that of the advantage before any KL enters it.
    """
    mask = batch.completion_mask.bool()
    weight = found.total.abs().double() * mask.sum()
    place = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    sign = batch.advantages.sign().unsqueeze(1).expand_as(weight)
    whole = float(weight[mask].sum())

    def mean(where: Tensor) -> float | None:
        return float(weight[where].mean()) if bool(where.any()) else None

    by_sign = {}
    for name, value in SIGNS:
        where = mask & (sign == value)
        share = float(weight[where].sum()) / whole if whole > 0 else None
        by_sign[name] = {"tokens": int(where.sum()), "mean": mean(where), "share": share}
    by_position = [mean(mask & (place >= start) & (place < stop)) for start, stop in position_bins(batch)]
    return {"mean": mean(mask), "by_position": by_position, "by_sign": by_sign}


def masked(x: Tensor | None, mask: Tensor) -> Tensor | None:
    """x with 0 where masked; tokens that are NaN (a sampler that could not score them) stay NaN."""
    return None if x is None else torch.where(mask.bool(), x, 0)


def with_sampling(scored: Scored, mu: Tensor | None) -> Scored:
    """A token that the sampler could not score counts as drawn from the policy, as in training."""
    return replace(scored, mu=None if mu is None else torch.where(torch.isnan(mu), scored.o, mu))
