"""A variant's loss from per-token log-probs: value, analytic derivative and metrics, all on (B, T) tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from losses import checks
from losses.aggregation import weights
from losses.elementwise import k3
from losses.spec import LossInputs, LossOutput, Metric, Variant, body_params, get


@dataclass(frozen=True)
class Terms:
    """A variant evaluated and aggregated: loss = loss_surrogate + beta x loss_kl, and its derivative in n likewise.

    The losses are 0-d, the derivatives (B, T) and 0 where masked; the surrogate's hold the correction for the sampler.
    """

    loss_surrogate: Tensor
    grad_surrogate: Tensor
    loss_kl: Tensor | None
    grad_kl: Tensor | None
    beta: float
    metrics: dict[str, Metric]
    whole: tuple[Tensor, Tensor] | None = None  # loss and derivative, where something has added them up already

    @property
    def loss(self) -> Tensor:
        if self.whole is not None:
            return self.whole[0]
        return self.loss_surrogate if self.loss_kl is None else self.loss_surrogate + self.beta * self.loss_kl

    @property
    def grad(self) -> Tensor:
        if self.whole is not None:
            return self.whole[1]
        return self.grad_surrogate if self.grad_kl is None else self.grad_surrogate + self.beta * self.grad_kl


@dataclass(frozen=True)
class Tokens:
    """What the token terms read beside n, cleaned: (B, T), or (tokens,) after `at`. None where there is none."""

    mask: Tensor
    weight: Tensor  # of the aggregation
    a: Tensor
    o: Tensor | None  # None: o = n
    p: Tensor | None
    mu: Tensor | None  # the sampler's log-probs

    def at(self, index: Tensor) -> Tokens:
        """The tokens at flat positions `index`."""
        picked: dict[str, Any] = {name: None if x is None else x.reshape(-1)[index] for name, x in vars(self).items()}
        return Tokens(**picked)


def prepare(
    variant: Variant, inputs: LossInputs, params: dict[str, Any], dtype: torch.dtype, n: Tensor | None = None
) -> Tokens:
    """The token inputs in `dtype`. Masked positions are replaced before any exp, never multiplied away after it.

    `n` (B, T), cleaned, stands for old log-probs that are not given where the variant shapes its advantages with them.
    """
    mask = inputs.completion_mask.bool()

    def clean(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.where(mask, x.detach().to(dtype), 0)

    a, o, p = inputs.advantages, clean(inputs.old_per_token_logps), clean(inputs.ref_per_token_logps)
    a = torch.where(mask, (a if a.dim() == 2 else a.unsqueeze(1)).detach().to(dtype), 0)
    if variant.shape_advantage is not None and params["beta"] > 0:
        a = torch.where(mask, variant.shape_advantage(a, n if o is None else o, p, mask, params), 0)
    weight = weights(
        mask,
        variant.aggregation,
        num_items=inputs.num_items_in_batch,
        num_sequences=inputs.num_sequences_in_batch,
        params=params,
        dtype=dtype,
    )
    return Tokens(
        mask=mask,
        weight=weight,
        a=a,
        o=o,
        p=p,
        mu=clean(inputs.sampling_per_token_logps),
    )


def call_body(body: Callable, log_probs: tuple[Tensor | None, ...], params: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A body on torch tensors, its parameters looked up by name; an epsilon that is not set does not clip."""
    return body(*log_probs, *(_number(params[name]) for name in body_params(body)))


def _number(value: Any) -> float:
    return math.inf if value is None else value


def evaluate(
    variant: Variant, n: Tensor, inputs: LossInputs, params: dict[str, Any], entropy: Tensor | None = None
) -> Terms:
    """The variant at log-probs n (B, T), without autograd. `params` come from `variant.resolve`; entropy: a metric."""
    dtype = torch.float64 if n.dtype == torch.float64 else torch.float32
    n = torch.where(inputs.completion_mask.bool(), n.detach().to(dtype), 0)
    t = prepare(variant, inputs, params, dtype, n)
    mask = t.mask
    o = n if t.o is None else t.o
    metrics: dict[str, Tensor] = {} if entropy is None else {"entropy": entropy}
    w: Tensor | float = 1.0
    if t.mu is not None:
        w = _sampling_weight(o, t, params)
        metrics["sampling/importance_sampling_ratio/mean"] = w.expand_as(n)

    if variant.sequence_term is not None:
        value, grad = variant.sequence_term(n, o, t.p, t.a, mask, inputs, params)
        share = weights(
            mask, "sequence_mean", num_sequences=inputs.num_sequences_in_batch, params=params, dtype=dtype
        ).sum(-1, keepdim=True)
        loss_surrogate, grad_surrogate = (share * value.unsqueeze(1)).sum(), share * grad
    elif variant.ratio_level == "sequence":
        length = mask.sum(-1, keepdim=True).clamp(min=1).to(dtype)
        log_ratio = ((n - o).sum(-1, keepdim=True) / length).expand_as(n)
        value, grad = call_body(variant.surrogate, (log_ratio, torch.zeros_like(n), t.a), params)
        loss_surrogate = (t.weight * w * value).sum()
        # Every token's loss depends on every log-prob of its completion, each with 1 / length.
        grad_surrogate = (t.weight * w * grad).sum(-1, keepdim=True) * mask.to(dtype) / length
        metrics |= _clipped(log_ratio.exp(), t.a, params)
    else:
        value, grad = call_body(variant.surrogate, (n, o, t.a), params)
        loss_surrogate, grad_surrogate = (t.weight * w * value).sum(), t.weight * w * grad
        # A surrogate that does not take epsilon clips nothing, whatever the ratio.
        clips = "epsilon" in body_params(variant.surrogate)
        metrics |= _clipped((n - o).exp() if clips else torch.ones_like(n), t.a, params)

    loss_kl = grad_kl = None
    if params["beta"] > 0 and variant.kl is not None:
        kl, slope = call_body(variant.kl, (n, t.p, o), params)
        loss_kl, grad_kl = (t.weight * kl).sum(), t.weight * slope
        metrics["kl_own"] = kl
    if t.p is not None:
        metrics["kl"] = k3(n, t.p, o)[0]
    return Terms(loss_surrogate, grad_surrogate, loss_kl, grad_kl, params["beta"], token_metrics(metrics, mask))


@dataclass(frozen=True)
class TokenGradient:
    """d loss / d n of single tokens: with it a trained head's weight gradient is formed in the forward, chunk by chunk.

    A backend calls the whole on torch tensors, or takes `elementwise()`. Nothing is computed before it is asked for: a
    GPU is to be given its first product first.
    """

    variant: Variant
    inputs: LossInputs
    params: dict[str, Any]
    dtype: torch.dtype

    @property
    def surrogate(self) -> Callable:
        return self.variant.surrogate

    @property
    def kl(self) -> Callable | None:
        """None: no KL term on samples."""
        return self.variant.kl if self.params["beta"] > 0 else None

    @functools.cached_property
    def tokens(self) -> Tokens:
        return prepare(self.variant, self.inputs, self.params, self.dtype)

    @functools.cached_property
    def sequence_weight(self) -> Tensor | None:
        """(tokens,), where the sampler's correction is one of whole completions."""
        t = self.tokens
        if t.mu is None or not self.params["sampling_mode"].startswith("sequence"):
            return None
        assert t.o is not None  # `token_gradient` asks
        return _sampling_weight(t.o, t, self.params).expand_as(t.mask).reshape(-1)

    def __call__(self, n: Tensor, index: Tensor) -> Tensor:
        """n (tokens,) and their flat positions -> derivatives (tokens,)."""
        here = self.tokens.at(index)
        n = torch.where(here.mask, n, 0)
        o = n if here.o is None else here.o
        _, grad = call_body(self.surrogate, (n, o, here.a), self.params)
        if self.sequence_weight is not None:
            grad = grad * self.sequence_weight[index]
        elif here.mu is not None:
            grad = grad * _sampling_weight(o, here, self.params)
        if self.kl is not None:
            grad = grad + self.params["beta"] * call_body(self.kl, (n, here.p, o), self.params)[1]
        return here.weight * grad

    def elementwise(self) -> Elementwise | None:
        """The same as flat tensors and two bodies, or None where a weight is itself a function of n."""
        t = self.tokens
        weight = t.weight.expand_as(t.mask).reshape(-1)
        surrogate = weight
        if self.sequence_weight is not None:
            surrogate = weight * self.sequence_weight
        elif t.mu is not None:
            if t.o is None:
                return None
            surrogate = (t.weight * _sampling_weight(t.o, t, self.params)).reshape(-1)

        def flat(x: Tensor) -> Tensor:
            return x.expand_as(t.mask).contiguous().view(-1)

        return Elementwise(
            self.surrogate, self.kl, self.params,
            old=None if t.o is None else flat(t.o), ref=None if t.p is None else flat(t.p), advantage=flat(t.a),
            weight_surrogate=surrogate, weight_kl=None if self.kl is None else weight * self.params["beta"],
        )  # fmt: skip


@dataclass(frozen=True)
class Elementwise:
    """d loss / d n = weight_surrogate x surrogate(n, old, advantage)' + weight_kl x kl(n, ref, old)'.

    All are (tokens,) and contiguous. `old` None: n itself. A token whose weights are 0 is masked. `weight_kl` None: no
    KL term.
    """

    surrogate: Callable
    kl: Callable | None
    params: dict[str, Any]
    old: Tensor | None
    ref: Tensor | None
    advantage: Tensor
    weight_surrogate: Tensor
    weight_kl: Tensor | None


def token_gradient(
    variant: Variant, inputs: LossInputs, params: dict[str, Any], dtype: torch.dtype
) -> TokenGradient | None:
    """d loss / d n of single tokens, or None where it needs other tokens'."""
    sequence_weight = inputs.sampling_per_token_logps is not None and params["sampling_mode"].startswith("sequence")
    needs_old = sequence_weight or (variant.shape_advantage is not None and params["beta"] > 0)
    if not variant.token_level or (needs_old and inputs.old_per_token_logps is None):
        return None
    return TokenGradient(variant, inputs, params, dtype)


def add_vocabulary_kl(
    out: LossOutput, kl: Tensor, variant: Variant, inputs: LossInputs, params: dict[str, Any]
) -> LossOutput:
    """`out` with beta x the aggregated divergence kl (B, T) added to its loss, and "kl_own" to its metrics."""
    weight = weights(
        inputs.completion_mask.bool(),
        variant.aggregation,
        num_items=inputs.num_items_in_batch,
        num_sequences=inputs.num_sequences_in_batch,
        params=params,
        dtype=kl.dtype,
    )
    metrics = out.metrics | {"kl_own": token_metric(kl, inputs.completion_mask.bool())}
    return LossOutput(out.loss + params["beta"] * (weight * kl).sum(), out.per_token_logps, metrics)


def token_metrics(values: dict[str, Tensor], mask: Tensor) -> dict[str, Metric]:
    """Means over unmasked tokens, poolable; values (B, T). All at once: a launch each would cost more than the sums."""
    if not values:
        return {}
    sums = torch.where(mask, torch.stack([x.detach() for x in values.values()]), 0).sum((1, 2)).unbind()
    count = mask.sum().to(torch.float32)
    return {name: Metric(total, count) for name, total in zip(values, sums, strict=True)}


def token_metric(values: Tensor, mask: Tensor) -> Metric:
    return token_metrics({"": values}, mask)[""]


def _sampling_weight(o: Tensor, t: Tokens, params: dict[str, Any]) -> Tensor:
    """exp(o - mu) of the completion (B, 1) or of each token (B, T), truncated or masked at sampling_clip_max."""
    level, action = params["sampling_mode"].split("_")
    assert t.mu is not None  # the callers ask
    log_ratio = torch.where(t.mask, o - t.mu, 0)
    ratio = (log_ratio.sum(-1, keepdim=True) if level == "sequence" else log_ratio).exp()
    cap = params["sampling_clip_max"]
    return ratio.clamp(max=cap) if action == "truncate" else torch.where(ratio <= cap, ratio, 0)


def _clipped(ratio: Tensor, a: Tensor, params: dict[str, Any]) -> dict[str, Tensor]:
    low = (ratio < 1 - _number(params["epsilon"])) & (a < 0)
    high = (ratio > 1 + _number(params["epsilon_high"])) & (a > 0)
    parts = (("low", low), ("high", high), ("region", low | high))
    return {f"clip_ratio/{name}_mean": clipped.to(ratio.dtype) for name, clipped in parts}


class _Attach(torch.autograd.Function):
    """`loss` as a function of `n` whose derivative is `grad`: the variant's own, written by hand."""

    @staticmethod
    def forward(ctx, n: Tensor, loss: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        ctx.dtype = n.dtype
        return loss.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = ctx.saved_tensors
        return (grad * grads[0]).to(ctx.dtype), None, None


def policy_loss(
    per_token_logps: Tensor, inputs: LossInputs, variant: str | Variant = "reference", **params: Any
) -> LossOutput:
    """A variant's loss from the policy's log-probs.

    Args:
        per_token_logps: (B, T) float, n. float64 stays float64; all else is computed in float32.
        inputs: see `LossInputs`.
        variant: a registered name, or a `Variant`.
        params: the variant's parameters (`losses.get(name).all_params`).

    Raises:
        ValueError: shapes that disagree, an input that the variant needs and does not get, NaN or infinite numbers at
            unmasked tokens, an unknown variant or parameter.
    """
    variant = get(variant)
    values = variant.resolve(params)
    checks.check_logps(per_token_logps, inputs)
    checks.check_inputs(variant, inputs, values, per_token_logps.shape)
    if variant.vocabulary is not None and values["beta"] > 0:
        raise ValueError(
            f"variant {variant.name!r} with beta={values['beta']} works on the vocabulary: "
            "use linear_policy_loss with ref_hidden, or beta=0"
        )
    checks.check_finite("per_token_logps", per_token_logps, inputs.completion_mask)
    return attach(per_token_logps, evaluate(variant, per_token_logps, inputs, values), inputs)


def attach(per_token_logps: Tensor, terms: Terms, inputs: LossInputs) -> LossOutput:
    """The output whose loss carries the terms' derivative back to `per_token_logps`."""
    loss = _Attach.apply(per_token_logps, terms.loss, terms.grad)
    logps = torch.where(inputs.completion_mask.bool(), per_token_logps.detach(), 0)
    return LossOutput(loss, logps if logps.dtype == torch.float64 else logps.float(), terms.metrics)
