"""From hidden states to log-probs and losses: the LM head's product, through one of the backends.

A backend is a module with one function and, unless autograd does it, a second one:

    forward(head, ids, index, *, entropy, keep_u, token_gradient) -> Pass
    backward(head, ids, index, g, needs) -> (d hidden, d weight, d bias)

With a frozen head d hidden_t = g_t u_t, u_t = d logp_t / d hidden_t, which no loss enters: the forward keeps u, and any
function of the log-probs (every variant, a user's own) is differentiated by scaling its rows with g in float32. With a
trained head a token-level variant gives g_t inside the forward, so that d weight needs no second look at the logits;
the others recompute them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from losses import checks, policy
from losses.backends import resolve
from losses.backends.head import Head, Pass
from losses.spec import LossInputs, LossOutput, Variant, get

P = ParamSpec("P")
R = TypeVar("R")


def _left_out_of_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which `torch.compile` calls as it is: it launches its own kernels and reads values."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return torch.compiler.disable(function)(*args, **kwargs)

    return call


def per_token_logps(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    *,
    lm_head_bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    backend: str = "auto",
    precision: str = "auto",
    completion_mask: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Log-probs (B, T) of completion_ids under softcap((hidden W^T + b) x logit_scale) / temperature; differentiable.

    Args:
        hidden: (B, T, H), the states that predict completion_ids (B, T).
        lm_head_weight: (V, H); lm_head_bias: (V,) or None.
        backend: "auto", "reference" (full logits), "chunked" (torch) or "triton".
        precision: "auto" (the inputs' dtype, or autocast's, accumulated in float32) or "fp8".
        completion_mask: (B, T); tokens with 0 are not computed and get 0.
        chunk_size: tokens whose logits are alive at a time; None: chosen from the vocabulary's size.

    Returns float64 for float64 inputs, otherwise float32.
    """
    return logps_and_entropy(
        hidden, lm_head_weight, completion_ids, lm_head_bias=lm_head_bias, temperature=temperature,
        logit_softcap=logit_softcap, logit_scale=logit_scale, backend=backend, precision=precision,
        completion_mask=completion_mask, chunk_size=chunk_size, entropy=False,
    )[0]  # fmt: skip


@_left_out_of_graphs
def logps_and_entropy(
    hidden: Tensor, lm_head_weight: Tensor, completion_ids: Tensor, *, completion_mask: Tensor | None = None,
    entropy: bool = True, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `per_token_logps`, with the entropy (B, T) of each next-token distribution in nats, without gradient."""
    head, module = _head(hidden, lm_head_weight, completion_ids, completion_mask, **options)
    index, ids = _active(completion_mask), _safe_ids(completion_ids, completion_mask, lm_head_weight)
    return _logps(head, module, ids, index, entropy)


@_left_out_of_graphs
def linear_policy_loss(
    hidden: Tensor,
    lm_head_weight: Tensor,
    inputs: LossInputs,
    variant: str | Variant = "reference",
    *,
    lm_head_bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    backend: str = "auto",
    precision: str = "auto",
    chunk_size: int | None = None,
    **params: Any,
) -> LossOutput:
    """A variant's loss straight from hidden states; no backend but `reference` ever holds more than a chunk of logits.

    Gradients go to hidden, lm_head_weight and lm_head_bias, as they ask for them. Arguments as in `per_token_logps` and
    `policy_loss`; metrics gain "entropy" (nats). With a frozen head d hidden is computed in the forward and scaled in
    place in the backward, so a second backward raises RuntimeError.

    Raises:
        ValueError: as `policy_loss`; head shapes that disagree, token ids past the vocabulary, an unknown backend.
    """
    variant = get(variant)
    values = variant.resolve(params)
    checks.check_tensors(inputs)
    mask = inputs.completion_mask
    questions: list[checks.Question] = []
    with checks.collecting(questions):
        head, module = _head(
            hidden, lm_head_weight, inputs.completion_ids, mask, lm_head_bias=lm_head_bias, temperature=temperature,
            logit_softcap=logit_softcap, logit_scale=logit_scale, backend=backend, precision=precision,
            chunk_size=chunk_size,
        )  # fmt: skip
        checks.check_inputs(variant, inputs, values, inputs.completion_ids.shape)
    answers = getattr(module, "answers", checks.answers)
    if not hidden.is_cuda:
        checks.settle(questions, answers)
        questions.clear()
    ids, index = _safe_ids(inputs.completion_ids, mask, lm_head_weight), _active(mask)  # the second waits
    trained = torch.is_grad_enabled() and (
        lm_head_weight.requires_grad
        or (lm_head_bias is not None and lm_head_bias.requires_grad)
        # Not trained, but d hidden is rounded once instead of twice where g_t is in it from the start.
        or (hidden.requires_grad and getattr(module, "folds", lambda _: False)(hidden.dtype))
    )
    gradient = policy.token_gradient(variant, inputs, values, head.logps_dtype) if trained else None

    def evaluate(n: Tensor, entropy: Tensor | None) -> policy.Terms:
        own = getattr(module, "evaluate", None)  # a backend may have a shorter way to the same terms
        terms = own(variant, n.detach(), inputs, values, entropy) if own else None
        evaluated.append(terms or policy.evaluate(variant, n, inputs, values, entropy))
        return evaluated[0]

    evaluated: list[policy.Terms] = []
    if module.AUTOGRAD or gradient is None:
        logps, entropy = _logps(head, module, ids, index, True)
        out = policy.attach(logps, evaluate(logps, entropy), inputs)
    else:
        loss, logps, entropy = _FusedLoss.apply(
            hidden, lm_head_weight, lm_head_bias, head, module, ids, index, gradient, evaluate
        )
        out = LossOutput(loss, logps, evaluated[0].metrics)
    # On a GPU every check comes last: it waits for the device, and everything above is queued by then.
    with checks.collecting(questions):
        checks.check_finite("the policy's per-token log-probs", logps, mask)
    checks.settle(questions, answers)
    if variant.vocabulary is not None and values["beta"] > 0:
        from losses.divergence import exact_kl  # it stands on this module

        assert inputs.ref_hidden is not None  # checked above
        kl = exact_kl(
            hidden, lm_head_weight, inputs.ref_hidden, inputs.ref_lm_head_weight, completion_mask=mask,
            direction="reverse" if variant.vocabulary == "reverse_kl" else "forward", lm_head_bias=lm_head_bias,
            ref_lm_head_bias=inputs.ref_lm_head_bias, temperature=temperature, logit_softcap=logit_softcap,
            logit_scale=logit_scale, backend=backend, precision=precision, chunk_size=chunk_size,
        )  # fmt: skip
        checks.check_finite("the divergence from the reference (ref_hidden and its head)", kl, mask)
        out = policy.add_vocabulary_kl(out, kl, variant, inputs, values)
    return out


def _logps(head: Head, module: Any, ids: Tensor, index: Tensor | None, entropy: bool) -> tuple[Tensor, Tensor | None]:
    if module.AUTOGRAD:
        done = module.forward(head, ids, index, entropy=entropy)
        return done.logps, done.entropy
    # What a Function is told of its inputs holds under torch.no_grad() as well.
    keep = torch.is_grad_enabled()
    return _Logps.apply(head.hidden, head.weight, head.bias, head, module, ids, index, entropy, keep)


def _head(
    hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor | None, *, lm_head_bias: Tensor | None = None,
    temperature: float = 1.0, logit_softcap: float | None = None, logit_scale: float = 1.0, backend: str = "auto",
    precision: str = "auto", chunk_size: int | None = None,
) -> tuple[Head, Any]:  # fmt: skip
    checks.check_head(hidden, weight, ids, mask, lm_head_bias, temperature, logit_softcap, logit_scale)
    if chunk_size is not None and not (isinstance(chunk_size, int) and chunk_size >= 1):
        raise ValueError(f"chunk_size={chunk_size} must be a whole number, at least 1")
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
    head = Head(
        hidden, weight, lm_head_bias, temperature=float(temperature), softcap=logit_softcap, scale=float(logit_scale),
        dtype=dtype, precision=resolve.precision(precision), chunk_size=chunk_size,
    )  # fmt: skip
    return head, resolve.backend(backend, hidden.device, dtype)


def _active(mask: Tensor | None) -> Tensor | None:
    """Flat positions of the unmasked tokens; None: all of them, or values may not be read."""
    if mask is None or not checks.may_look(mask):
        return None
    index = mask.reshape(-1).nonzero().squeeze(1)
    return None if len(index) == mask.numel() else index


def _safe_ids(ids: Tensor, mask: Tensor | None, weight: Tensor) -> Tensor:
    """Flat ids, 0 where masked: what padding holds need not be a token. On a GPU in the vocabulary, refused or not."""
    ids = (ids if mask is None else torch.where(mask.bool(), ids, 0)).reshape(-1).long()
    return ids.clamp(0, weight.shape[0] - 1) if ids.is_cuda else ids


def _raise_second_backward(ctx: Any) -> None:
    if ctx.used:
        raise RuntimeError("a second backward: d hidden was scaled in place by the first; call the loss again")
    ctx.used = True


def scale_rows_(u: Tensor, g: Tensor) -> Tensor:
    """u (..., H) times g (...), in place: multiplied in float32 (float64 for float64), cast last."""
    flat, rows = u.view(-1, u.shape[-1]), g.reshape(-1, 1)
    if u.is_cuda or u.dtype in (torch.float32, torch.float64):
        flat.mul_(rows)
    else:
        for part, row in zip(flat.split(1024), rows.split(1024), strict=True):
            part.copy_(part.float() * row)
    return u


def _scaled(module: Any, u: Tensor, g: Tensor) -> Tensor:
    """`scale_rows_`, by the backend's own kernel where it has one."""
    return getattr(module, "scale_rows_", scale_rows_)(u, g)


def _scaled_to(module: Any, d: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """d, which may be overwritten, times a 0-d factor, rounded once to `dtype`."""
    own = getattr(module, "scaled_to", None)
    return own(d, factor, dtype) if own else d.mul_(factor).to(dtype)


class _Logps(torch.autograd.Function):
    """Log-probs of any backend without autograd of its own, differentiable in hidden, weight and bias."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head, module, ids, index, entropy, keep):
        needs = ctx.needs_input_grad[:3]
        ctx.frozen, ctx.used = not (needs[1] or needs[2]), False
        done: Pass = module.forward(head, ids, index, entropy=entropy, keep_u=keep and ctx.frozen and needs[0])
        ctx.u, ctx.module, ctx.ids, ctx.index = done.u, module, ids, index
        if not ctx.frozen:
            ctx.save_for_backward(hidden, weight, *([] if bias is None else [bias]))
            ctx.head = replace(head, hidden=None, weight=None, bias=None)
        ctx.mark_non_differentiable(*([] if done.entropy is None else [done.entropy]))
        return done.logps, done.entropy

    @staticmethod
    def backward(ctx, g, _):
        if ctx.frozen:
            _raise_second_backward(ctx)
            u, ctx.u = ctx.u, None
            return _scaled(ctx.module, u, g), None, None, None, None, None, None, None, None
        hidden, weight, *bias = ctx.saved_tensors
        head = replace(ctx.head, hidden=hidden, weight=weight, bias=bias[0] if bias else None)
        grads = ctx.module.backward(head, ctx.ids, ctx.index, g, ctx.needs_input_grad[:3])
        return (*grads, None, None, None, None, None, None)


class _FusedLoss(torch.autograd.Function):
    """A token-level loss with a trained head: every gradient is formed in the forward and scaled in the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head, module, ids, index, gradient, evaluate):
        done: Pass = module.forward(
            head, ids, index, entropy=True, keep_u=ctx.needs_input_grad[0], token_gradient=gradient,
            needs=ctx.needs_input_grad[:3],
        )  # fmt: skip
        loss = evaluate(done.logps, done.entropy)
        ctx.set_materialize_grads(False)  # no zeros for the two outputs without a gradient
        ctx.used = False
        ctx.grads, ctx.module, ctx.folded = (done.u, done.d_weight, done.d_bias), module, done.folded
        ctx.g, ctx.dtypes = loss.grad, (weight.dtype, None if bias is None else bias.dtype)
        ctx.mark_non_differentiable(done.logps, done.entropy)
        return loss.loss.clone(), done.logps, done.entropy

    @staticmethod
    def backward(ctx, grad, *_):
        _raise_second_backward(ctx)
        (u, d_weight, d_bias), ctx.grads = ctx.grads, None
        d_hidden = None
        if u is not None:
            d_hidden = _scaled_to(ctx.module, u, grad, u.dtype) if ctx.folded else _scaled(ctx.module, u, ctx.g * grad)
        d_weight, d_bias = (
            None if d is None else _scaled_to(ctx.module, d, grad, dtype)
            for d, dtype in zip((d_weight, d_bias), ctx.dtypes, strict=True)
        )
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None
