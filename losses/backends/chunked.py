"""Torch, chunk by chunk of tokens: one chunk of logits alive, float32 log-sum-exp, on any device.

With z the logits less their row maximum, s = sum exp(z), kappa = scale / T, j = d logits / d raw logits where a softcap
bends them (1 elsewhere), and e = j exp(z):

    u_t = kappa (j_y W[y] - (e W)_t / s_t),     d W = kappa (sum_t g_t j_y onehot_y h_t - e^T (g h / s))

e is in (0, 1] whatever the vocabulary, the one-hot half never enters a half-precision product, and g and 1 / s multiply
float32 results or, for d W, the rows of h after division by their largest: nothing underflows before it is scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from losses.backends.head import Head, Pass
from losses.precision import Products, products

AUTOGRAD = False
CHUNK_BYTES = {"cpu": 96 << 20, "cuda": 512 << 20}  # of one float32 logits buffer
# Elementwise passes over rows that stay in cache between the passes; a GPU gains nothing from blocks of rows.
BLOCK_BYTES = {"cpu": 8 << 20}  # small blocks cost more barriers than they save where threads outnumber cores


@dataclass
class _Chunk:
    index: Tensor | slice  # flat positions
    h: Tensor  # (rows, H)
    ids: Tensor
    e: Tensor  # (rows, V), defined where gradients are wanted
    z_y: Tensor  # (rows,)
    s: Tensor  # (rows,)
    ez: Tensor | None  # (rows,) sum exp(z) z, where the entropy is wanted
    j_y: Tensor | None  # (rows,) where gradients are wanted and a softcap is


def chunk_rows(head: Head) -> int:
    """Tokens per chunk: as asked for, or what fits the byte budget in whole multiples of 32."""
    if head.chunk_size is not None:
        return head.chunk_size
    size = 8 if head.dtype == torch.float64 else 4
    rows = CHUNK_BYTES.get(head.hidden.device.type, 96 << 20) // (size * head.weight.shape[0])
    return max(1, rows // 32 * 32 if rows >= 32 else rows)


def _chunks(
    head: Head, ids: Tensor, index: Tensor | None, ops: Products, weight: Tensor, *, entropy: bool, gradients: bool
) -> Iterator[_Chunk]:
    total = head.tokens if index is None else len(index)
    rows = max(1, min(chunk_rows(head), total))
    logits = torch.empty(rows, weight.shape[0], dtype=head.logps_dtype, device=weight.device)
    budget = BLOCK_BYTES.get(weight.device.type)
    block = rows if budget is None else min(rows, max(1, budget // (logits.element_size() * weight.shape[0])))
    scratch = torch.empty_like(logits[:block])
    bias = None if head.bias is None else head.bias.detach().to(logits.dtype)
    for start in range(0, total, rows):
        stop = min(start + rows, total)
        where = slice(start, stop) if index is None else index[start:stop]
        h, z, y = head.rows(where), logits[: stop - start], ids[where]
        ops.logits(h, weight, z.dtype, out=z, ids=y)
        several = len(z) > block
        parts = []
        for z_part, y_part in zip(z.split(block), y.split(block), strict=True):
            e = scratch[: len(z_part)]
            parts.append(_exponentials(z_part, y_part, e, bias, head, entropy=entropy, gradients=gradients))
            if gradients and several:
                z_part.copy_(e)
        z_y, s, ez, j_y = (_joined(x) for x in zip(*parts, strict=True))
        yield _Chunk(where, h, y, z if several else scratch[: len(z)], z_y, s, ez, j_y)


def _joined(parts: tuple) -> Any:
    return None if parts[0] is None else torch.cat(parts)


def _exponentials(
    z: Tensor, ids: Tensor, e: Tensor, bias: Tensor | None, head: Head, *, entropy: bool, gradients: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """From products z (rows, V), which are overwritten, to `e`; returns z_y, s, ez and j_y."""
    slope = ez = j_y = None
    if bias is not None:
        z.add_(bias)
    if head.softcap is not None:
        z.mul_(head.scale / head.softcap).tanh_()
        if gradients:
            slope = z.square().neg_().add_(1)
        z.mul_(head.softcap / head.temperature)
    elif head.scale != head.temperature:
        z.mul_(head.scale / head.temperature)
    z.sub_(z.amax(1, keepdim=True))
    z_y = z.gather(1, ids.unsqueeze(1)).squeeze(1)
    s = torch.exp(z, out=e).sum(1)
    if entropy:
        ez = z.mul_(e).sum(1)
    if slope is not None:
        j_y = slope.gather(1, ids.unsqueeze(1)).squeeze(1)
        e.mul_(slope)
    return z_y, s, ez, j_y


def forward(
    head: Head,
    ids: Tensor,
    index: Tensor | None,
    *,
    entropy: bool,
    keep_u: bool = False,
    token_gradient: Callable[[Tensor, Tensor], Tensor] | None = None,
    needs: tuple[bool, bool, bool] = (False, False, False),
) -> Pass:
    """Log-probs, and on request the entropy, u, and with `token_gradient` the gradients of weight and bias."""
    shape, device = head.hidden.shape[:2], head.hidden.device
    ops, dtype = products(head), head.logps_dtype
    logps = torch.zeros(head.tokens, dtype=dtype, device=device)
    out = Pass(logps.view(shape))
    if entropy:
        out.entropy = torch.zeros_like(out.logps)
    if keep_u:
        # Zeroed only where rows are skipped: every other row is written below.
        make = torch.empty if index is None else torch.zeros
        out.u = make(*shape, head.hidden.shape[-1], dtype=head.hidden.dtype, device=device)
    if token_gradient is not None:
        _allocate(out, head, needs)
    with torch.autocast(device.type, enabled=False):
        weight = ops.weight(head.weight.detach().to(head.dtype))
        gradients = keep_u or token_gradient is not None
        for c in _chunks(head, ids, index, ops, weight, entropy=entropy, gradients=gradients):
            logp = c.z_y - c.s.log()
            logps[c.index] = logp
            if out.entropy is not None and c.ez is not None:
                out.entropy.view(-1)[c.index] = c.s.log() - c.ez / c.s
            if out.u is not None:
                u = _u(head, ops, weight, c)
                out.u.view(-1, u.shape[1])[c.index] = u.to(out.u.dtype)
            if token_gradient is not None:
                i = c.index
                where = torch.arange(i.start, i.stop, device=device) if isinstance(i, slice) else i
                _add_weight_grad(out, head, ops, c, token_gradient(logp, where))
    return out


def backward(
    head: Head, ids: Tensor, index: Tensor | None, g: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias for d loss / d logps = g (B, T), from logits computed again."""
    ops = products(head)
    out = Pass(g)
    _allocate(out, head, needs)
    flat = g.reshape(-1)
    d_hidden = torch.zeros_like(head.hidden, memory_format=torch.contiguous_format) if needs[0] else None
    with torch.autocast(g.device.type, enabled=False):
        weight = ops.weight(head.weight.detach().to(head.dtype))
        for c in _chunks(head, ids, index, ops, weight, entropy=False, gradients=True):
            if d_hidden is not None:
                rows = _u(head, ops, weight, c) * flat[c.index].unsqueeze(1)
                d_hidden.view(-1, rows.shape[1])[c.index] = rows.to(d_hidden.dtype)
            _add_weight_grad(out, head, ops, c, flat[c.index])
    return (
        d_hidden,
        None if out.d_weight is None else out.d_weight.to(head.weight.dtype),
        None if out.d_bias is None or head.bias is None else out.d_bias.to(head.bias.dtype),
    )


def _allocate(out: Pass, head: Head, needs: tuple[bool, bool, bool]) -> None:
    if needs[1]:
        out.d_weight = torch.zeros(head.weight.shape, dtype=head.logps_dtype, device=head.weight.device)
    if needs[2]:
        out.d_bias = torch.zeros(head.weight.shape[0], dtype=head.logps_dtype, device=head.weight.device)


def _u(head: Head, ops: Products, weight: Tensor, c: _Chunk) -> Tensor:
    """d logp / d hidden of the chunk's rows, (rows, H) in float32 or float64."""
    own = ops.rows(weight, c.ids).to(c.e.dtype)
    if c.j_y is not None:
        own = own * c.j_y.unsqueeze(1)
    return own.sub_(ops.mix(c.e, weight, ids=c.ids).div_(c.s.unsqueeze(1))).mul_(head.scale / head.temperature)


def _add_weight_grad(out: Pass, head: Head, ops: Products, c: _Chunk, g: Tensor) -> None:
    g = g.to(c.e.dtype) * (head.scale / head.temperature)
    own = g if c.j_y is None else g * c.j_y
    share = g / c.s
    if out.d_weight is not None:
        h = c.h.to(c.e.dtype)
        ops.subtract_outer(out.d_weight, c.e, h, share)
        out.d_weight.index_add_(0, c.ids, h * own.unsqueeze(1))
    if out.d_bias is not None:
        # The bias is added before the scale and the softcap, as the products are: the same kappa.
        out.d_bias.sub_(share @ c.e).index_add_(0, c.ids, own)
