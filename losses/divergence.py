"""The exact KL divergence between the policy and the reference over the vocabulary, from hidden states and heads."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from losses import checks, linear
from losses.backends import vocabulary
from losses.backends.head import Head

DIRECTIONS = ("reverse", "forward")


def exact_kl(
    hidden: Tensor,
    lm_head_weight: Tensor,
    ref_hidden: Tensor,
    ref_lm_head_weight: Tensor | None = None,
    *,
    direction: Literal["reverse", "forward"] = "reverse",
    lm_head_bias: Tensor | None = None,
    ref_lm_head_bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    backend: str = "auto",
    precision: str = "auto",
    completion_mask: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """KL of each next-token distribution in nats, (B, T) float32 (float64 for float64); differentiable in the policy.

    "reverse" is KL(policy || reference), "forward" KL(reference || policy), both under the same temperature, softcap
    and scale. A chunk of either model's logits is alive at a time, and one to work in; without gradient this is a
    metric for any variant, at the price of two products.

    Args:
        hidden: (B, T, H), the policy's states; gradients go to it, lm_head_weight and lm_head_bias as they ask.
        ref_hidden: (B, T, H'), the reference's states; with LoRA, those of the pass with the adapter off.
        ref_lm_head_weight: (V, H'), ref_lm_head_bias (V,): the reference's head; None: the policy's as it is now, which
            is the reference's only while the head is frozen.
        completion_mask: (B, T); tokens with 0 are not computed and get 0.

    With a frozen head d hidden is computed in the forward and scaled in place in the backward: a second backward raises
    RuntimeError.

    Raises:
        ValueError: shapes that disagree, an unknown direction or backend.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r} is not one of {', '.join(DIRECTIONS)}")
    if hidden.dim() != 3 or ref_hidden.shape[:2] != hidden.shape[:2] or ref_hidden.dim() != 3:
        raise ValueError(
            f"ref_hidden has shape {tuple(ref_hidden.shape)}; it must be (B, T, H') for hidden {tuple(hidden.shape)}"
        )
    if ref_lm_head_weight is None:
        ref_lm_head_weight = lm_head_weight.detach()
        ref_lm_head_bias = lm_head_bias if ref_lm_head_bias is None else ref_lm_head_bias
    elif ref_lm_head_weight.dim() != 2 or ref_lm_head_weight.shape[0] != lm_head_weight.shape[0]:
        raise ValueError(
            f"ref_lm_head_weight has shape {tuple(ref_lm_head_weight.shape)}; it must be "
            f"({lm_head_weight.shape[0]}, {ref_hidden.shape[2]}): both models share one vocabulary"
        )
    elif ref_lm_head_bias is None:
        ref_lm_head_bias = lm_head_bias
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    options: dict[str, Any] = {
        "temperature": temperature, "logit_softcap": logit_softcap, "logit_scale": logit_scale, "backend": backend,
        "precision": precision, "chunk_size": chunk_size,
    }  # fmt: skip
    head, module = linear._head(hidden, lm_head_weight, ids, completion_mask, lm_head_bias=lm_head_bias, **options)
    try:
        ref, _ = linear._head(
            ref_hidden, ref_lm_head_weight, ids, completion_mask,
            lm_head_bias=None if ref_lm_head_bias is None else ref_lm_head_bias.detach(), **options,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"the reference's head: {error}") from error
    if ref.logps_dtype != head.logps_dtype:
        ref = replace(ref, dtype=head.dtype)
    if completion_mask is not None:
        checks.check_mask(completion_mask)
    index = linear._active(completion_mask)
    if module.AUTOGRAD:
        return vocabulary.full(head, ref, index, direction)
    return _ExactKL.apply(
        hidden,
        lm_head_weight,
        lm_head_bias,
        head,
        ref,
        _kernel(module, backend),
        index,
        direction,
        torch.is_grad_enabled(),
    )


def _kernel(module: ModuleType, backend: str) -> ModuleType:
    """What computes it for a backend: its own `vocabulary`, or torch where the backend was not asked for by name."""
    own = getattr(module, "vocabulary", None)
    if own is None and backend == "triton":
        raise ValueError("backend='triton' has no kernel for the exact KL; use backend='auto' or 'chunked'")
    return own or vocabulary


class _ExactKL(torch.autograd.Function):
    """KL (B, T), differentiable in hidden, weight and bias; the reference is a constant."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head: Head, ref: Head, module, index, direction, keep):
        needs = ctx.needs_input_grad[:3]
        ctx.frozen, ctx.used = not (needs[1] or needs[2]), False
        kl, ctx.v, ctx.size = module.forward(head, ref, index, direction, keep and ctx.frozen and needs[0])
        ctx.module, ctx.index, ctx.direction = module, index, direction
        if not ctx.frozen:
            ctx.save_for_backward(hidden, weight, *([] if bias is None else [bias]))
            # Saved as autograd wants inputs saved; the rest of the head is numbers.
            ctx.head = replace(head, hidden=None, weight=None, bias=None)  # type: ignore[arg-type]
            ctx.ref = ref
        return kl

    @staticmethod
    def backward(ctx, g):
        if ctx.frozen:
            linear._raise_second_backward(ctx)
            v, ctx.v = ctx.v, None
            d_hidden = linear._scaled(ctx.module, v, g if ctx.size is None else g * ctx.size)
            return (d_hidden, *[None] * 8)
        hidden, weight, *bias = ctx.saved_tensors
        head = replace(ctx.head, hidden=hidden, weight=weight, bias=bias[0] if bias else None)
        grads = ctx.module.backward(head, ctx.ref, ctx.index, ctx.direction, g, ctx.needs_input_grad[:3])
        return (*grads, *[None] * 6)
