"""The exact KL divergence between policy and reference over the whole vocabulary, chunk by chunk of tokens, in torch.

With log q and log p a chunk's two log-softmaxes, the only ones alive, and kappa = scale / temperature:

    reverse   KL = sum q (log q - log p)     d KL / d z = q (log q - log p - KL)
    forward   KL = sum p (log p - log q)     d KL / d z = q - p
    v_t = d KL_t / d hidden_t = kappa (j (d KL / d z)) W,   j the softcap's slope

v does not depend on the loss, so that with a frozen head one pass (two products for the logits, one for v) is all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from losses.backends.head import Head
from losses.precision import Products, products

CHUNK_BYTES = {"cpu": 24 << 20, "cuda": 256 << 20}  # of one float32 logits buffer; three are alive


@dataclass
class _Chunk:
    index: Tensor | slice  # flat positions
    h: Tensor  # (rows, H)
    kl: Tensor  # (rows,)
    slope: Tensor | None  # (rows, V) d KL / d raw logits, times kappa; None where no gradient is asked for


def chunk_rows(head: Head) -> int:
    """Tokens per chunk: as asked for, or what fits the byte budget in whole multiples of 32."""
    if head.chunk_size is not None:
        return head.chunk_size
    size = 8 if head.dtype == torch.float64 else 4
    rows = CHUNK_BYTES.get(head.hidden.device.type, 24 << 20) // (size * head.weight.shape[0])
    return max(1, rows // 32 * 32 if rows >= 32 else rows)


def _logits(head: Head, ops: Products, weight: Tensor, h: Tensor, out: Tensor) -> Tensor:
    """softcap((h W^T + b) x scale) / temperature into `out`, (rows, V)."""
    ops.logits(h, weight, out.dtype, out=out)
    if head.bias is not None:
        out.add_(head.bias.detach().to(out.dtype))
    if head.softcap is not None:
        return out.mul_(head.scale / head.softcap).tanh_().mul_(head.softcap / head.temperature)
    return out if head.scale == head.temperature else out.mul_(head.scale / head.temperature)


def _log_softmax_(z: Tensor, scratch: Tensor) -> Tensor:
    """z becomes log softmax(z), in place; returns the log-sum-exp (rows, 1)."""
    top = z.amax(1, keepdim=True)
    total = torch.exp(torch.sub(z, top, out=scratch), out=scratch).sum(1, keepdim=True).log_().add_(top)
    z.sub_(total)
    return total


def _chunks(
    head: Head, ref: Head, index: Tensor | None, direction: str, ops: Products, weight: Tensor, slope: bool
) -> Iterator[_Chunk]:
    total = head.tokens if index is None else len(index)
    rows = max(1, min(chunk_rows(head), total))
    q_buffer = torch.empty(rows, weight.shape[0], dtype=head.logps_dtype, device=weight.device)
    p_buffer, buffer = torch.empty_like(q_buffer), torch.empty_like(q_buffer)
    ref_ops = products(ref)
    ref_weight = ref_ops.weight(ref.weight.detach().to(ref.dtype))
    for start in range(0, total, rows):
        count = min(rows, total - start)
        where = slice(start, start + count) if index is None else index[start : start + count]
        h, scratch = head.rows(where), buffer[:count]
        log_q = _logits(head, ops, weight, h, q_buffer[:count])
        q_total = _log_softmax_(log_q, scratch)
        log_p = _logits(ref, ref_ops, ref_weight, ref.rows(where), p_buffer[:count])
        _log_softmax_(log_p, scratch)
        bend = None
        if slope and head.softcap is not None:
            bend = (log_q + q_total).mul_(head.temperature / head.softcap).square_().neg_().add_(1)
        d = log_p
        if direction == "reverse":
            torch.sub(log_q, log_p, out=d)
            q = log_q.exp_()
            kl = torch.linalg.vecdot(q, d)
            if slope:
                d.sub_(kl.unsqueeze(1)).mul_(q)
        else:
            p = torch.exp(log_p, out=scratch)
            torch.sub(log_p, log_q, out=d)
            kl = torch.linalg.vecdot(p, d)
            if slope:
                torch.sub(log_q.exp_(), p, out=d)
        if bend is not None:
            d.mul_(bend)
        yield _Chunk(where, h, kl, d.mul_(head.scale / head.temperature) if slope else None)


def _divide_by_largest_(d: Tensor) -> Tensor:
    """Divides each row of d, in place, by its largest magnitude, and returns those (rows,)."""
    largest = d.abs().amax(1).clamp_(min=torch.finfo(d.dtype).tiny)
    d.div_(largest.unsqueeze(1))
    return largest


def forward(
    head: Head, ref: Head, index: Tensor | None, direction: str, keep_v: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """KL (B, T) in float32 or float64, 0 where masked; on request v (B, T, H) in hidden's dtype and, for float16 where
    a small v would underflow, the largest of each of its rows (B, T), by which those are divided."""
    shape, device = head.hidden.shape, head.hidden.device
    kl = torch.zeros(head.tokens, dtype=head.logps_dtype, device=device)
    v = size = None
    if keep_v:
        # Zeroed only where rows are skipped: every other row is written below.
        make = torch.empty if index is None else torch.zeros
        v = make(shape, dtype=head.hidden.dtype, device=device)
        size = torch.zeros_like(kl) if v.dtype == torch.float16 else None
    with torch.autocast(device.type, enabled=False):
        ops = products(head)
        weight = ops.weight(head.weight.detach().to(head.dtype))
        for c in _chunks(head, ref, index, direction, ops, weight, keep_v):
            kl[c.index] = c.kl
            if v is not None and c.slope is not None:
                rows = _mix(c.slope, weight, ops)[0]
                if size is not None:
                    size[c.index] = _divide_by_largest_(rows)
                v.view(-1, shape[-1])[c.index] = rows.to(v.dtype)
    return kl.view(shape[:2]), v, None if size is None else size.view(shape[:2])


def _mix(d: Tensor, weight: Tensor, ops: Products) -> tuple[Tensor, Tensor | None]:
    """d W (rows, H) in d's dtype. Near the reference d is tiny throughout: where the product rounds it to half
    precision its rows are divided by their largest before, which is returned with d left so."""
    largest = _divide_by_largest_(d) if ops.native else None
    rows = ops.mix(d, weight)
    return (rows if largest is None else rows.mul_(largest.unsqueeze(1))), largest


def backward(
    head: Head, ref: Head, index: Tensor | None, direction: str, g: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias for d loss / d KL = g (B, T), from logits computed again."""
    flat, device, dtype = g.reshape(-1).to(head.logps_dtype), g.device, head.logps_dtype
    d_hidden = torch.zeros_like(head.hidden, memory_format=torch.contiguous_format) if needs[0] else None
    d_weight = torch.zeros(head.weight.shape, dtype=dtype, device=device) if needs[1] else None
    d_bias = torch.zeros(head.weight.shape[0], dtype=dtype, device=device) if needs[2] else None
    with torch.autocast(device.type, enabled=False):
        ops = products(head)
        weight = ops.weight(head.weight.detach().to(head.dtype))
        for c in _chunks(head, ref, index, direction, ops, weight, True):
            assert c.slope is not None
            share = flat[c.index]
            if d_bias is not None:
                d_bias.add_(share @ c.slope)
            largest = None
            if d_hidden is not None:
                rows, largest = _mix(c.slope, weight, ops)
                d_hidden.view(-1, rows.shape[1])[c.index] = rows.mul_(share.unsqueeze(1)).to(d_hidden.dtype)
            elif d_weight is not None:
                largest = _divide_by_largest_(c.slope) if ops.native else None
            if d_weight is not None:
                share = share if largest is None else share * largest
                ops.subtract_outer(d_weight, c.slope, c.h.to(dtype), -share)
    return (
        d_hidden,
        None if d_weight is None else d_weight.to(head.weight.dtype),
        None if d_bias is None or head.bias is None else d_bias.to(head.bias.dtype),
    )


def full(head: Head, ref: Head, index: Tensor | None, direction: str) -> Tensor:
    """The same from full logits with autograd's own graph, KL (B, T): the plain way, for tests and for float64."""

    def log_softmax(of: Head, frozen: bool) -> Tensor:
        hidden, weight, bias = of.hidden, of.weight, of.bias
        if frozen:
            hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        hidden = hidden.reshape(-1, hidden.shape[-1])
        z = products(of).logits(
            (hidden if index is None else hidden[index]).to(of.dtype), weight.to(of.dtype), of.logps_dtype
        )
        z = (z if bias is None else z + bias.to(z.dtype)) * of.scale
        if of.softcap is not None:
            z = of.softcap * torch.tanh(z / of.softcap)
        return torch.log_softmax(z / of.temperature, -1).to(head.logps_dtype)

    with torch.autocast(head.hidden.device.type, enabled=False):
        log_q, log_p = log_softmax(head, False), log_softmax(ref, True)
        kl = (
            (log_q.exp() * (log_q - log_p)).sum(-1)
            if direction == "reverse"
            else (log_p.exp() * (log_p - log_q)).sum(-1)
        )
    if index is not None:
        kl = torch.zeros(head.tokens, dtype=kl.dtype, device=kl.device).index_copy(0, index, kl)
    return kl.view(head.hidden.shape[:2])
