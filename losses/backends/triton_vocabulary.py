"""The exact KL divergence between policy and reference over the whole vocabulary on a GPU, chunk by chunk of tokens.

Per chunk cuBLAS writes both models' logits in float32, `divergence_rows` makes of them the KL and, over the same
memory, d KL / d z in half precision, and cuBLAS multiplies that by the weight. With a frozen head that is all: three
products, and the backward scales rows. Two buffers of logits are alive, at most LOGITS_BYTES together.

    reverse   KL = sum q (log q - log p)     d KL / d z = q (log q - log p - KL)
    forward   KL = sum p (log p - log q)     d KL / d z = q - p
    v_t = d KL_t / d hidden_t = kappa (j (d KL / d z)) W,   kappa = scale / temperature, j the softcap's slope

v is kept in float16, each row divided by its largest: half precision with three bits more than bfloat16, so that a
bfloat16 gradient is rounded to that type once, when the incoming gradient is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from losses.backends import triton_divergence as kernels
from losses.backends import triton_launch, triton_rows, vocabulary
from losses.backends.head import Head, launching_on
from losses.backends.triton_tiles import INTERPRETED
from losses.precision import products

LOGITS_BYTES = 1 << 30  # of both buffers of a chunk
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Rows:
    """Shape of `divergence_rows`: tiles of high x wide columns by `warps` warps.

    On an H200 16,384 rows of 128,256 take 8.9 ms with slopes and 4.7 without: 18 and 8 bytes a logit at 4.2 and 3.6
    TB/s. Half the columns a thread cost 14 %, a limit of 64 registers 47 %; 8 warps are as fast.
    """

    high: int
    wide: int
    warps: int


INTERPRETER = Rows(high=2, wide=16, warps=4)
SHORT = Rows(high=4, wide=512, warps=4)
LONG = Rows(high=4, wide=2048, warps=16)


def rows_for(vocab: int) -> Rows:
    if INTERPRETED:
        return INTERPRETER
    return LONG if vocab > 16384 else SHORT


@dataclass
class _Chunk:
    start: int
    rows: int
    where: Tensor | slice  # flat positions
    h: Tensor  # (rows, H) in the operands' dtype
    slope: Tensor  # (rows, V) d KL / d raw logits over kappa; float16: over the row's largest as well
    factor: Tensor  # (rows,) by which slope is to be multiplied


class _Run:
    """One pass: operands prepared once, buffers shared by all chunks. `store`: slopes are wanted, not KL alone."""

    def __init__(self, head: Head, ref: Head, index: Tensor | None, direction: str, *, store: bool) -> None:
        self.head, self.ref, self.index, self.store = head, ref, index, store
        self.reverse = direction == "reverse"
        self.device, self.total = head.hidden.device, head.tokens if index is None else len(index)
        self.weight = _operand(head)
        self.ref_weight = self.weight if _same_operand(head, ref) else _operand(ref)
        self.vocab, self.width = self.weight.shape
        self.rows = self._rows_per_chunk()
        self.shape = rows_for(self.vocab)
        self.kappa = head.scale / head.temperature
        self.inner, self.outer = 1.0, self.kappa
        if head.softcap is not None:
            self.inner, self.outer = head.scale / head.softcap, head.softcap / head.temperature
        # A row of a multiple of 16 bytes, whichever half of it is used, is what cuBLAS wants.
        self.stride = -(-self.vocab // 8) * 8
        self.logits, self.ref_logits = (self._empty(self.rows, self.stride) for _ in range(2))
        self.factor = self._empty(self.rows)
        self.mixture = self._empty(self.rows, self.width) if store else None
        # Slopes in half precision go to the far half of their row's memory, see `divergence_rows`.
        self.slope = self.logits if head.dtype not in HALF else self.logits.view(head.dtype)[:, self.stride :]

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.device)

    def _rows_per_chunk(self) -> int:
        if self.total == 0:
            return 0
        if self.head.chunk_size is not None:
            return min(self.head.chunk_size, self.total)
        most = max(128, LOGITS_BYTES // (8 * self.vocab) // 128 * 128)
        parts = -(-self.total // most)
        return min(self.total, -(-self.total // parts // 128) * 128)

    def chunks(self, kl: Tensor | None) -> Iterator[_Chunk]:
        """Both products of each chunk and `divergence_rows` over them, which writes kl (tokens,) where it is given."""
        ops, ref_ops = products(self.head), products(self.ref)
        bias, ref_bias = (None if x.bias is None else x.bias.detach().contiguous() for x in (self.head, self.ref))
        for start in range(0, self.total, max(self.rows, 1)):
            rows = min(self.rows, self.total - start)
            where = slice(start, start + rows) if self.index is None else self.index[start : start + rows]
            h = self.head.rows(where).contiguous()
            q, p = self.logits[:rows, : self.vocab], self.ref_logits[:rows, : self.vocab]
            ops.logits(h, self.weight, torch.float32, out=q)
            ref_ops.logits(self.ref.rows(where), self.ref_weight, torch.float32, out=p)
            own, other = ((q, bias), (p, ref_bias))[:: 1 if self.reverse else -1]
            kernels.divergence_rows[(rows,)](
                own[0], other[0], self.stride, own[1], other[1], self.vocab, self.inner, self.outer, self.kappa,
                start, self.index, kl, self.slope, self.slope.stride(0), self.factor,
                HIGH=self.shape.high, WIDE=self.shape.wide, SOFTCAP=self.head.softcap is not None,
                REVERSE=self.reverse, STORE=self.store, DIVIDE=self.head.dtype == torch.float16,
                num_warps=self.shape.warps,
            )  # fmt: skip
            yield _Chunk(start, rows, where, h, self.slope[:rows, : self.vocab], self.factor[:rows])

    def write_v(self, c: _Chunk, out: Tensor, size: Tensor | None, grad: Tensor | None) -> None:
        """The chunk's rows of v into out (tokens, H), times `grad`; with `size` over their largest, stored there."""
        assert self.mixture is not None
        mixture = self.mixture[: c.rows]
        triton_launch._mm(c.slope, self.weight, mixture)
        kernels.write_rows[(c.rows,)](
            mixture, c.factor, grad, c.start, self.index, out, size, self.width,
            BLOCK=min(4096, triton.next_power_of_2(self.width)), num_warps=8,
        )  # fmt: skip

    def add_weight_gradient(self, c: _Chunk, d_weight: Tensor | None, d_bias: Tensor | None, grad: Tensor) -> None:
        """Adds a chunk's gradients to d_weight (V, H) and d_bias (V,), float32."""
        minus = -c.factor
        if d_weight is not None:
            largest = None
            if c.slope.dtype == torch.float16:
                # Divided by the largest, so that small shares (1 / tokens / vocabulary) do not underflow in float16.
                largest = (grad[c.where] * minus).abs().amax().clamp(min=1e-30)
            rows = torch.empty_like(c.h)
            block = min(1024, triton.next_power_of_2(self.width))
            triton_rows.scaled_rows[(c.rows, triton.cdiv(self.width, block))](
                c.h, c.h.stride(0), minus, grad, largest, c.start, self.index, rows, self.width, BLOCK=block
            )
            triton_launch._add_product(d_weight, c.slope, rows, largest, c.start == 0)
        if d_bias is not None:
            kernels.add_columns[(triton.cdiv(self.vocab, 128),)](
                d_bias, c.slope, c.slope.stride(0), c.factor, grad, c.start, self.index, c.rows, self.vocab,
                BLOCK_M=16, BLOCK_N=128,
            )  # fmt: skip


def forward(
    head: Head, ref: Head, index: Tensor | None, direction: str, keep_v: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """KL (B, T) in float32, 0 where masked; on request v (B, T, H) and the largest of each of its rows (B, T), by which
    those are divided, for `scale_rows_`.

    v has hidden's dtype, but for bfloat16 its bits are float16's. precision="fp8" is emulated, as in `vocabulary`.
    """
    if head.precision == "fp8":
        kl, v, size = vocabulary.forward(head, ref, index, direction, keep_v)
        if v is not None and v.dtype == torch.bfloat16:
            largest = v.abs().amax(-1).float().clamp_(min=torch.finfo(torch.float32).tiny)
            v, size = (v / largest.unsqueeze(-1)).half().view(v.dtype), largest
        return kl, v, size
    run = _Run(head, ref, index, direction, store=keep_v)
    shape, dtype = head.hidden.shape, head.hidden.dtype
    kl = torch.zeros(shape[:2], dtype=torch.float32, device=run.device)
    v = size = None
    if keep_v:
        # Zeroed only where rows are skipped: every other row is written below.
        make = torch.empty if index is None else torch.zeros
        v = make(shape, dtype=torch.float16 if dtype in HALF else dtype, device=run.device)
        size = torch.zeros_like(kl) if dtype in HALF else None
    with launching_on(run.device):
        for c in run.chunks(kl):
            if v is not None:
                run.write_v(c, v, size, None)
    return kl, v.view(dtype) if v is not None and dtype in HALF else v, size


def backward(
    head: Head, ref: Head, index: Tensor | None, direction: str, g: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias for d loss / d KL = g (B, T), from logits computed again."""
    if head.precision == "fp8":
        return vocabulary.backward(head, ref, index, direction, g, needs)
    run = _Run(head, ref, index, direction, store=True)
    grad = g.detach().float().contiguous().view(-1)
    d_hidden = d_weight = d_bias = None
    if needs[0]:
        make = torch.empty if index is None else torch.zeros
        d_hidden = make(head.hidden.shape, dtype=head.hidden.dtype, device=run.device)
    if needs[1]:
        # The first chunk writes all of it.
        make = torch.empty if run.total else torch.zeros
        d_weight = make(head.weight.shape, dtype=torch.float32, device=run.device)
    if needs[2]:
        d_bias = torch.zeros(run.vocab, dtype=torch.float32, device=run.device)
    with launching_on(run.device):
        for c in run.chunks(None):
            if d_hidden is not None:
                run.write_v(c, d_hidden, None, grad)
            run.add_weight_gradient(c, d_weight, d_bias, grad)
    return (
        d_hidden,
        None if d_weight is None else d_weight.to(head.weight.dtype),
        None if d_bias is None or head.bias is None else d_bias.to(head.bias.dtype),
    )


def scale_rows_(v: Tensor, g: Tensor) -> Tensor:
    """v (B, T, H) of `forward` times g (B, T), in place: multiplied in float32, rounded to v's dtype once."""
    if v.numel():
        stored: Any = v.view(torch.float16) if v.dtype in HALF else v
        width = v.shape[-1]
        block = min(4096, triton.next_power_of_2(width))
        with torch.cuda.device(v.device) if v.is_cuda else nullcontext():
            kernels.scale_rows_to[(v.numel() // width, triton.cdiv(width, block))](
                stored, g.contiguous(), v, width, BLOCK=block
            )
    return v


def _operand(head: Head) -> Tensor:
    weight = head.weight.detach().to(head.dtype)
    return weight if weight.stride(1) == 1 else weight.contiguous()


def _same_operand(head: Head, ref: Head) -> bool:
    """Whether the reference's head is the policy's own memory, as with LoRA: then one cast serves both."""
    a, b = head.weight, ref.weight
    return (
        a.data_ptr() == b.data_ptr()
        and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        and (head.dtype == ref.dtype)
    )
