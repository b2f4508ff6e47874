"""Torch, chunk by chunk of tokens: one chunk of logits alive, float32 log-sum-exp, on any device.

With p = softmax of a row's logits, kappa = scale / T, j = d logits / d raw logits where a softcap bends them (1
elsewhere), s = 1 / max p for half-precision and float8 products and 1 for others, and e = j p s:

    u_t = kappa (j_y W[y] - (e W)_t / s_t),     d W = kappa (sum_t g_t j_y onehot_y h_t - e^T (g h / s))

In half precision e reaches 1 whatever the vocabulary, the one-hot half never enters a half-precision product, and g and
1 / s multiply float32 results or, for d W, the rows of h after division by their largest: nothing underflows before it
is scaled. A chunk is read and written as few times as torch's operations allow: on a CPU each is a barrier for its
threads, which costs most where they have no core to themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from losses.backends.head import Head, Pass
from losses.precision import Products, products

AUTOGRAD = False
CHUNK_BYTES = {"cpu": 96 << 20, "cuda": 512 << 20}  # of one float32 logits buffer
SCRATCH_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}  # of a softcap's slopes, and of an entropy that no product gives


@dataclass
class _Chunk:
    index: Tensor | slice  # flat positions
    h: Tensor  # (rows, H)
    ids: Tensor
    logp: Tensor  # (rows,)
    lse: Tensor  # (rows,) of the logits
    entropy: Tensor | None  # (rows,) where asked for
    e: Tensor  # (rows, V), where gradients are wanted
    s: Tensor  # (rows,)
    j_y: Tensor | None  # (rows,) where gradients are wanted and a softcap is


def chunk_rows(head: Head) -> int:
    """Tokens per chunk: as asked for, or what fits the byte budget in whole multiples of 32."""
    if head.chunk_size is not None:
        return head.chunk_size
    size = 8 if head.dtype == torch.float64 else 4
    rows = CHUNK_BYTES.get(head.hidden.device.type, CHUNK_BYTES["cpu"]) // (size * head.weight.shape[0])
    return max(1, rows // 32 * 32 if rows >= 32 else rows)


def _chunks(
    head: Head, ids: Tensor, index: Tensor | None, ops: Products, weight: Tensor, *, entropy: bool, gradients: bool
) -> Iterator[_Chunk]:
    total = head.tokens if index is None else len(index)
    rows = max(1, min(chunk_rows(head), total))
    logits = torch.empty(rows, weight.shape[0], dtype=head.logps_dtype, device=weight.device)
    for start in range(0, total, rows):
        stop = min(start + rows, total)
        where = slice(start, stop) if index is None else index[start:stop]
        h, z, y = head.rows(where), logits[: stop - start], ids[where]
        ops.logits(h, weight, z.dtype, out=z, ids=y)
        _bend(z, head)
        z_y = _pick(z, y)
        log_p = torch.log_softmax(z, 1, out=z)
        logp = _pick(log_p, y)
        spread = _entropy(log_p) if entropy else None
        c = _Chunk(where, h, y, logp, z_y - logp, spread, z, torch.ones_like(logp), None)
        if gradients:
            _exponentials(c, head, largest_is_one=ops.native or head.precision == "fp8")
        yield c


def _pick(x: Tensor, ids: Tensor) -> Tensor:
    return x.gather(1, ids.unsqueeze(1)).squeeze(1)


def _bend(z: Tensor, head: Head) -> None:
    """From products to logits, in place."""
    if head.bias is not None:
        z.add_(head.bias.detach().to(z.dtype))
    if head.softcap is not None:
        z.mul_(head.scale / head.softcap).tanh_().mul_(head.softcap / head.temperature)
    elif head.scale != head.temperature:
        z.mul_(head.scale / head.temperature)


def _scratch_rows(x: Tensor) -> int:
    budget = SCRATCH_BYTES.get(x.device.type, SCRATCH_BYTES["cpu"])
    return max(1, budget // (x.element_size() * x.shape[1]))


def _entropy(log_p: Tensor) -> Tensor:
    """-sum p log p of rows of log p, with few rows of p alive."""
    rows = _scratch_rows(log_p)
    scratch = torch.empty_like(log_p[:rows])
    return torch.cat([torch.exp(x, out=scratch[: len(x)]).mul_(x).sum(1).neg_() for x in log_p.split(rows)])


def _exponentials(c: _Chunk, head: Head, *, largest_is_one: bool) -> None:
    """From log p to e, in place; sets s and j_y."""
    log_p, lse = c.e, c.lse
    if largest_is_one:
        top = log_p.amax(1)
        log_p.sub_(top.unsqueeze(1))
        c.s, lse = top.neg().exp_(), lse + top
    if head.softcap is None:
        log_p.exp_()
        return
    rows, picked = _scratch_rows(log_p), []
    for part, ids, shift in zip(log_p.split(rows), c.ids.split(rows), lse.split(rows), strict=True):
        # 1 - tanh^2 of the raw logits, from the logits themselves, softcap tanh / temperature.
        slope = (part + shift.unsqueeze(1)).mul_(head.temperature / head.softcap).square_().neg_().add_(1)
        picked.append(_pick(slope, ids))
        part.exp_().mul_(slope)
    c.j_y = torch.cat(picked)


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
        # E[z] = kappa h . (p W): u's product gives the entropy as well, unless something bends, shifts or rounds.
        free = keep_u and head.softcap is None and head.bias is None and head.precision == "auto" and not ops.native
        for c in _chunks(head, ids, index, ops, weight, entropy=entropy and not free, gradients=gradients):
            logps[c.index] = c.logp
            if out.u is not None:
                mixture = ops.mix(c.e, weight, ids=c.ids).div_(c.s.unsqueeze(1))
                if entropy and free:
                    mean = torch.linalg.vecdot(mixture, c.h.to(mixture.dtype)).mul_(head.scale / head.temperature)
                    c.entropy = (c.lse - mean).clamp_(min=0)
                u = _u(head, ops, weight, c, mixture)
                out.u.view(-1, u.shape[1])[c.index] = u.to(out.u.dtype)
            if out.entropy is not None and c.entropy is not None:
                out.entropy.view(-1)[c.index] = c.entropy
            if token_gradient is not None:
                i = c.index
                where = torch.arange(i.start, i.stop, device=device) if isinstance(i, slice) else i
                _add_weight_grad(out, head, ops, c, token_gradient(c.logp, where))
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
                mixture = ops.mix(c.e, weight, ids=c.ids).div_(c.s.unsqueeze(1))
                rows = _u(head, ops, weight, c, mixture) * flat[c.index].unsqueeze(1)
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


def _u(head: Head, ops: Products, weight: Tensor, c: _Chunk, mixture: Tensor) -> Tensor:
    """d logp / d hidden of the chunk's rows, (rows, H) in float32 or float64; mixture: (e W) / s, overwritten."""
    own = ops.rows(weight, c.ids).to(c.e.dtype)
    if c.j_y is not None:
        own = own * c.j_y.unsqueeze(1)
    return torch.sub(own, mixture, out=mixture).mul_(head.scale / head.temperature)


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
