"""Torch, chunk by chunk of tokens: one chunk of logits alive, float32 log-sum-exp, on any device.

With z the logits less their row maximum, e = exp(z) x (d logits / d raw logits, where a softcap bends them), s = sum exp(z):

    u_t = kappa (j_y W[y] - (e W)_t / s_t),     d W = kappa (sum_t g_t j_y onehot_y h_t - e^T (g h / s)),     kappa = scale / T

e is in (0, 1] whatever the vocabulary, the one-hot half never enters a half-precision product, and g and 1 / s multiply
float32 results or, for d W, the rows of h after division by their largest: nothing underflows before it is scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from losses.backends.head import Head, Pass
from losses.precision import Products, products

AUTOGRAD = False
CHUNK_BYTES = {"cpu": 48 << 20, "cuda": 512 << 20}  # of one float32 logits buffer; two are alive


@dataclass
class _Chunk:
    index: Tensor | slice  # flat positions
    h: Tensor  # (rows, H)
    ids: Tensor
    z: Tensor  # (rows, V) logits less their row maximum
    buffer: Tensor  # (rows, V) scratch
    z_max: Tensor


def chunk_rows(head: Head) -> int:
    """Tokens per chunk: as asked for, or what fits the byte budget in whole multiples of 32."""
    if head.chunk_size is not None:
        return head.chunk_size
    size = 8 if head.dtype == torch.float64 else 4
    rows = CHUNK_BYTES.get(head.hidden.device.type, 48 << 20) // (size * head.weight.shape[0])
    return max(1, rows // 32 * 32 if rows >= 32 else rows)


def _chunks(head: Head, ids: Tensor, index: Tensor | None, ops: Products, weight: Tensor) -> Iterator[_Chunk]:
    total = head.tokens if index is None else len(index)
    rows = max(1, min(chunk_rows(head), total))
    shape = (rows, weight.shape[0])
    logits = torch.empty(shape, dtype=head.logps_dtype, device=weight.device)
    scratch = torch.empty_like(logits)
    bias = None if head.bias is None else head.bias.detach().to(logits.dtype)
    for start in range(0, total, rows):
        stop = min(start + rows, total)
        where = slice(start, stop) if index is None else index[start:stop]
        h, z = head.rows(where), logits[: stop - start]
        ops.logits(h, weight, z.dtype, out=z)
        if bias is not None:
            z.add_(bias)
        if head.softcap is not None:
            z.mul_(head.scale / head.softcap).tanh_().mul_(head.softcap / head.temperature)
        elif head.scale != head.temperature:
            z.mul_(head.scale / head.temperature)
        z_max = z.amax(1, keepdim=True)
        yield _Chunk(where, h, ids[where], z.sub_(z_max), scratch[: stop - start], z_max)


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
        for c in _chunks(head, ids, index, ops, weight):
            z_y = c.z.gather(1, c.ids.unsqueeze(1)).squeeze(1)
            e = torch.exp(c.z, out=c.buffer)
            s = e.sum(1)
            logp = z_y - s.log()
            logps[c.index] = logp
            j_y = None
            if head.softcap is not None and (keep_u or token_gradient is not None):
                slope = _softcap_slope(c, head)
                j_y = slope.gather(1, c.ids.unsqueeze(1)).squeeze(1)
            if out.entropy is not None:
                products_sum = torch.linalg.vecdot(e, c.z)
                out.entropy.view(-1)[c.index] = s.log() - products_sum / s
            if j_y is not None:
                e.mul_(slope)
            if out.u is not None:
                u = _u(head, ops, weight, c, e, s, j_y)
                out.u.view(-1, u.shape[1])[c.index] = u.to(out.u.dtype)
            if token_gradient is not None:
                where = torch.arange(c.index.start, c.index.stop, device=device) if index is None else c.index
                _add_weight_grad(out, head, ops, c, e, s, j_y, token_gradient(logp, where))
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
        for c in _chunks(head, ids, index, ops, weight):
            slope = _softcap_slope(c, head) if head.softcap is not None else None
            j_y = None if slope is None else slope.gather(1, c.ids.unsqueeze(1)).squeeze(1)
            e = torch.exp(c.z, out=c.buffer)
            s = e.sum(1)
            if slope is not None:
                e.mul_(slope)
            if d_hidden is not None:
                rows = _u(head, ops, weight, c, e, s, j_y) * flat[c.index].unsqueeze(1)
                d_hidden.view(-1, rows.shape[1])[c.index] = rows.to(d_hidden.dtype)
            _add_weight_grad(out, head, ops, c, e, s, j_y, flat[c.index])
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


def _softcap_slope(c: _Chunk, head: Head) -> Tensor:
    """1 - tanh^2 of the raw logits, from z = softcap tanh / temperature."""
    tanh = (c.z + c.z_max).mul_(head.temperature / head.softcap)
    return tanh.square_().neg_().add_(1)


def _u(head: Head, ops: Products, weight: Tensor, c: _Chunk, e: Tensor, s: Tensor, j_y: Tensor | None) -> Tensor:
    """d logp / d hidden of the chunk's rows, (rows, H) in float32 or float64."""
    own = ops.rows(weight, c.ids).to(e.dtype)
    if j_y is not None:
        own = own * j_y.unsqueeze(1)
    return own.sub_(ops.mix(e, weight).div_(s.unsqueeze(1))).mul_(head.scale / head.temperature)


def _add_weight_grad(
    out: Pass, head: Head, ops: Products, c: _Chunk, e: Tensor, s: Tensor, j_y: Tensor | None, g: Tensor
) -> None:
    g = g.to(e.dtype) * (head.scale / head.temperature)
    own = g if j_y is None else g * j_y
    share = g / s
    if out.d_weight is not None:
        h = c.h.to(e.dtype)
        ops.subtract_outer(out.d_weight, e, h, share)
        out.d_weight.index_add_(0, c.ids, h * own.unsqueeze(1))
    if out.d_bias is not None:
        # The bias is added before the scale and the softcap, as the products are: the same kappa.
        out.d_bias.sub_(share @ e).index_add_(0, c.ids, own)
