"""The LM head's product on a GPU in Triton kernels: what runs, in which order, on which memory.

Per chunk of tokens, with a gradient: `product` (h W^T; its epilogue stores half-precision exponentials, no logits),
`finalize`, `rescale`, cuBLAS for e W, `own_minus_mixture`; with a trained head cuBLAS for e^T h as well. Without a
gradient `product` and `finalize` alone. float32 operands have no matrix units of their accuracy: there cuBLAS writes
the logits and `logits_tile` turns them into exponentials in place.

Source of the decomposition: d logp / d h = kappa (W[y] - sum_v p_v W[v]), kappa = logit_scale / temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from losses.backends import triton_float8, triton_rows
from losses.backends import triton_kernels as kernels
from losses.backends import triton_vocabulary as vocabulary  # noqa: F401  (`losses.divergence` takes it from here)
from losses.backends.head import Head, Pass, launching_on
from losses.backends.triton_bodies import arguments, device_function
from losses.backends.triton_checks import answers as answers
from losses.backends.triton_terms import evaluate as evaluate
from losses.backends.triton_tiles import INTERPRETED, Tiles, descriptor, tiles_for, tma_ready

AUTOGRAD = False
LOG2_E = 1.4426950408889634
STORED_BYTES = 256 << 20  # of one chunk's exponentials; twice that where a chunk must be longer to fill the GPU
FILLING = 132 * 128 * 256  # rows x width at which e W has a tile for every multiprocessor of an H200
ROWS_WITHOUT_STORE = 4096
# (LIMIT, SHIFT), see `triton_kernels._tile`. float16 holds 2^-24 to 2^15: the shift uses the upper half of it.
LIMITS = {torch.float16: (4.0, 11), torch.bfloat16: (60.0, 0), torch.float32: (60.0, 0)}
TL_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass
class _Chunk:
    start: int
    rows: int
    where: Tensor | slice  # flat positions
    h: Tensor  # (rows, H) in the operands' dtype
    ids: Tensor  # (rows,)
    own: Tensor  # (rows,) base-2 logits of ids
    marks: Tensor  # (row tiles, vocabulary tiles), see `own_logit`


class _Run:
    """One pass: operands prepared once, buffers shared by all chunks."""

    def __init__(
        self, head: Head, ids: Tensor, index: Tensor | None, *, store: bool, entropy: bool, trained: bool = False
    ) -> None:
        self.head, self.index, self.store, self.entropy, self.trained = head, index, store, entropy, trained
        self.device = head.hidden.device
        self.total = head.tokens if index is None else len(index)
        self.ids = ids if index is None else ids[index]
        weight = head.weight.detach().to(head.dtype)
        self.weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self.bias = None if head.bias is None else head.bias.detach().contiguous()
        self.vocab, self.width = weight.shape
        self.float8 = head.precision == "fp8"
        if self.float8 and self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] < 9:
            raise ValueError("precision='fp8' needs a GPU of compute capability 9.0 or newer; use precision='auto'")
        # What exponentials are stored in. Before they go to float8 they need float32's range, not its digits.
        self.e_dtype = torch.bfloat16 if self.float8 else head.dtype
        self.fused = self.e_dtype != torch.float32
        self.limit, self.shift = LIMITS[self.e_dtype]
        self.tiles: Tiles = tiles_for(self.device, self.width, self.float8)
        self.kappa = head.scale / head.temperature
        if head.softcap is None:
            self.inner, self.outer = 1.0, abs(self.kappa) * LOG2_E
        else:
            self.inner, self.outer = head.scale / head.softcap, head.softcap / head.temperature * LOG2_E
        self.rows = self._rows_per_chunk()
        self.mixer: triton_float8.Mixer | None = None
        self._allocate()

    def _allocate(self) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=self.device)

        # A row of a multiple of 16 bytes is what cuBLAS and the copy engine want.
        self.e_stride = -(-self.vocab // 8) * 8
        if self.store or not self.fused:
            self.e = empty(self.rows, self.e_stride, dtype=self.e_dtype)
        if self.float8:
            self.head8 = triton_float8.head_of(self.head.weight, self.weight)
            if self.store:
                self.mixer = triton_float8.Mixer(self.head8, self.rows)
        elif self.store:
            self.mixture = empty(self.rows, self.width)
        self.vocab_tiles = triton.cdiv(self.vocab, self.tiles.n)
        self.row_tiles = triton.cdiv(self.rows, self.tiles.m)
        self.statistics = [empty(self.vocab_tiles, self.rows) for _ in range(3)]  # offsets, sums, moments
        self.offsets, self.keep, self.inverse = (empty(self.rows) for _ in range(3))
        self.own = empty(self.total)

    def _rows_per_chunk(self) -> int:
        if self.total == 0:
            return 0
        if self.head.chunk_size is not None:
            return min(self.head.chunk_size, self.total)
        if self.store or not self.fused:
            fit = STORED_BYTES // (self.e_dtype.itemsize * self.vocab)
            # d weight is read and written once a chunk: with longer chunks, less often.
            wanted = 2 * fit if self.trained else FILLING // self.width
            most = max(128, max(fit, min(2 * fit, wanted)) // 128 * 128)
        else:
            most = ROWS_WITHOUT_STORE
        parts = -(-self.total // most)
        return min(self.total, -(-self.total // parts // 128) * 128)

    def _options(self) -> dict[str, Any]:
        return {
            "DTYPE": TL_DTYPES[self.e_dtype],
            "BLOCK_N": self.tiles.n,
            "SOFTCAP": self.head.softcap is not None,
            "NEGATIVE": self.kappa < 0,
            "BIAS": self.bias is not None,
        }

    def chunks(self) -> Iterator[_Chunk]:
        """Every token's own logit, then the chunks."""
        if self.total == 0:
            return
        h = self.head.hidden.detach()
        chunks = triton.cdiv(self.total, self.rows)
        self.marks = torch.zeros(chunks, self.row_tiles, self.vocab_tiles, dtype=torch.int8, device=self.device)
        kernels.own_logit[(self.total,)](
            h, *h.stride(), h.shape[1], self.index, self.weight, self.weight.stride(0), self.bias, self.ids, self.own,
            self.marks, self.rows, self.row_tiles, self.vocab_tiles, self.width, self.inner, self.outer,
            BLOCK=min(2048, triton.next_power_of_2(self.width)), BLOCK_M=self.tiles.m,
            **(self._options() | {"DTYPE": TL_DTYPES[self.head.dtype]}),
        )  # fmt: skip
        if self.trained:
            # Rows of one token one after another, within each chunk.
            chunk = torch.arange(self.total, device=self.device) // self.rows
            self.order = torch.argsort(chunk * self.vocab + self.ids, stable=True)
        for i, start in enumerate(range(0, self.total, self.rows)):
            stop = min(start + self.rows, self.total)
            where = slice(start, stop) if self.index is None else self.index[start:stop]
            rows = self.head.rows(where).contiguous()
            self.first = i == 0
            yield _Chunk(start, stop - start, where, rows, self.ids[start:stop], self.own[start:stop], self.marks[i])

    def softmax(self, c: _Chunk) -> None:
        """Exponentials and tile statistics of a chunk."""
        options = self._options() | {
            "LIMIT": self.limit, "SHIFT": self.shift, "STORE": self.store, "ENTROPY": self.entropy
        }  # fmt: skip
        if not self.fused:
            logits = self.e[: c.rows, : self.vocab]
            torch.mm(c.h, self.weight.t(), out=logits)
            kernels.logits_tile[(triton.cdiv(c.rows, 8), self.vocab_tiles)](
                logits, self.e_stride, c.rows, self.vocab, self.rows, c.ids, c.own, self.bias, logits, self.e_stride,
                self.inner, self.outer, *self.statistics, BLOCK_M=8, **options,
            )  # fmt: skip
            return
        t = self.tiles
        e: Any = self.e[: c.rows, : self.vocab] if self.store else None
        h: Any = c.h
        weight: Any = self.weight
        h_scale = weight_scale = None
        if self.float8:
            h, h_scale = triton_float8.quantized_rows(h)
            weight, weight_scale = self.head8.rows, self.head8.row_scales
        h_stride, weight_stride = h.stride(0), weight.stride(0)
        tma = t.tma and tma_ready(h) and tma_ready(weight)
        if tma:
            h, weight = descriptor(h, (t.m, t.k)), descriptor(weight, (t.n, t.k))
            e = None if e is None else descriptor(e, (t.m, t.n))
        count, programs = triton.cdiv(c.rows, t.m) * self.vocab_tiles, t.programs(self.device)
        kernels.product[(min(count, programs) or count,)](
            h, h_stride, weight, weight_stride, h_scale, weight_scale, c.rows, self.vocab, self.width, self.rows,
            c.ids, c.own, c.marks, self.bias, e, self.e_stride, self.inner, self.outer, *self.statistics,
            BLOCK_M=t.m, BLOCK_K=t.k, GROUP=t.group, TMA=tma, PROGRAMS=programs, FLATTEN=t.flatten, WIDEN=INTERPRETED,
            SCALED=self.float8, num_warps=t.warps, num_stages=t.stages, **options,
        )  # fmt: skip

    def finalize(self, c: _Chunk, logps: Tensor, entropy: Tensor | None, grad: Tensor | None, term: Any) -> None:
        """Log-probs, entropy and row coefficients of a chunk, and with `term` the token gradients."""
        token: dict[str, Any] = {"SURROGATE": None, "KL": None}
        old = ref = advantage = weight_surrogate = weight_kl = None
        surrogate_args: tuple[float, ...] = ()
        kl_args: tuple[float, ...] = ()
        if term is not None:
            old, ref, advantage = term.old, term.ref, term.advantage
            weight_surrogate, weight_kl = term.weight_surrogate, term.weight_kl
            token["SURROGATE"], surrogate_args = device_function(term.surrogate), arguments(term.surrogate, term.params)
            if weight_kl is not None:
                token["KL"], kl_args = device_function(term.kl), arguments(term.kl, term.params)
        triton_rows.finalize[(triton.cdiv(c.rows, 8),)](
            *self.statistics, self.rows, c.rows, self.vocab_tiles, c.own, c.start, self.index, logps, entropy,
            self.offsets, self.keep, self.inverse, grad, self.kappa, self.outer, old, ref, advantage, weight_surrogate,
            weight_kl, surrogate_args, kl_args,
            BLOCK_M=8, BLOCK_T=min(256, triton.next_power_of_2(self.vocab_tiles)), SHIFT=self.shift,
            SOFTCAP=self.head.softcap is not None, ENTROPY=entropy is not None, **token,
        )  # fmt: skip
        if self.store:
            per_program = 32
            triton_rows.rescale[(triton.cdiv(c.rows, 8), triton.cdiv(self.vocab_tiles, per_program))](
                self.e, self.e_stride, self.statistics[0], self.rows, self.offsets, c.rows, self.vocab,
                self.vocab_tiles, BLOCK_M=8, BLOCK_N=self.tiles.n, TILES=per_program,
            )  # fmt: skip

    def write_u(self, c: _Chunk, out: Tensor, grad: Tensor | None) -> None:
        """Rows of d logp / d hidden, times `grad` where given, at the chunk's positions of out (tokens, H)."""
        e, inverse, columns = self.e[: c.rows, : self.vocab], self.inverse, None
        if self.mixer is not None:
            mixture, inverse, columns = self.mixer(e, inverse), self.mixer.inverse, self.head8.column_scales
        else:
            mixture = self.mixture[: c.rows]
            _mm(e, self.weight, mixture)
        block = min(1024, triton.next_power_of_2(self.width))
        triton_rows.own_minus_mixture[(c.rows, triton.cdiv(self.width, block))](
            mixture, columns, self.weight, self.weight.stride(0), c.ids, self.keep, inverse, grad, c.start, self.index,
            out, mixture.stride(0), self.width, BLOCK=block,
        )  # fmt: skip

    def add_weight_gradient(self, c: _Chunk, d_weight: Tensor | None, d_bias: Tensor | None, grad: Tensor) -> None:
        """Adds a chunk's gradients to d_weight (V, H) and d_bias (V,), float32."""
        e = self.e[: c.rows, : self.vocab]
        block = min(1024, triton.next_power_of_2(self.width))
        grid = (c.rows, triton.cdiv(self.width, block))
        if d_weight is not None:
            largest = None
            if e.dtype == torch.float16:
                # Divided by the largest, so that small coefficients (1 / tokens / odds) do not underflow in float16.
                flat = grad[c.where] * self.inverse[: c.rows]
                largest = flat.abs().amax().clamp(min=1e-30)
            rows = torch.empty_like(c.h, dtype=e.dtype)
            triton_rows.scaled_rows[grid](
                c.h, c.h.stride(0), self.inverse, grad, largest, c.start, self.index, rows, self.width, BLOCK=block
            )
            _add_product(d_weight, e, rows, largest, self.first)
            triton_rows.add_own_rows[grid](
                d_weight, self.order[c.start : c.start + c.rows], c.ids, c.h, c.h.stride(0), self.keep, grad, c.start,
                self.index, c.rows, self.width,
                BLOCK=block,
            )  # fmt: skip
        if d_bias is not None:
            triton_rows.bias_gradient[(triton.cdiv(self.vocab, 128),)](
                d_bias, self.e, self.e_stride, c.ids, self.keep, self.inverse, grad, c.start, self.index, c.rows,
                self.vocab, BLOCK_M=16, BLOCK_N=128,
            )  # fmt: skip


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
    trained = needs[1] or needs[2]
    run = _Run(head, ids, index, store=keep_u or trained, entropy=entropy, trained=trained)
    shape = head.hidden.shape[:2]
    # Zeroed only where tokens are skipped: every other one is written below.
    make = torch.empty if index is None else torch.zeros
    logps = make(shape, dtype=torch.float32, device=run.device)
    out = Pass(logps, make(shape, dtype=torch.float32, device=run.device) if entropy else None)
    if keep_u:
        out.u = make(*shape, run.width, dtype=head.hidden.dtype, device=run.device)
    grad = term = None
    if token_gradient is not None:
        grad = make(logps.numel(), dtype=torch.float32, device=run.device)
        out.folded = folds(head.hidden.dtype)
        _allocate(out, head, needs, run.total)
    with launching_on(run.device):
        for c in run.chunks():
            run.softmax(c)
            if c.start == 0 and token_gradient is not None and hasattr(token_gradient, "elementwise"):
                # Small launches, while the first product keeps the device busy.
                term = token_gradient.elementwise()
            run.finalize(c, logps, out.entropy, grad, term)
            if token_gradient is not None and grad is not None and term is None:
                where = c.where
                if isinstance(where, slice):
                    where = torch.arange(where.start, where.stop, device=run.device)
                grad[c.where] = token_gradient(logps.view(-1)[where], where)
            if out.u is not None:
                run.write_u(c, out.u, grad if out.folded else None)
            if grad is not None and run.trained:
                run.add_weight_gradient(c, out.d_weight, out.d_bias, grad)
    return out


def backward(
    head: Head, ids: Tensor, index: Tensor | None, g: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias for d loss / d logps = g (B, T), from exponentials computed again."""
    run = _Run(head, ids, index, store=True, entropy=False, trained=True)
    out = Pass(g)
    _allocate(out, head, needs, run.total)
    grad = g.detach().float().contiguous().view(-1)
    logps = torch.empty_like(grad)
    d_hidden = None
    if needs[0]:
        make = torch.empty if index is None else torch.zeros
        d_hidden = make(head.hidden.shape, dtype=head.hidden.dtype, device=run.device)
    with launching_on(run.device):
        for c in run.chunks():
            run.softmax(c)
            run.finalize(c, logps, None, None, None)
            if d_hidden is not None:
                run.write_u(c, d_hidden, grad)
            run.add_weight_gradient(c, out.d_weight, out.d_bias, grad)
    return (
        d_hidden,
        None if out.d_weight is None else out.d_weight.to(head.weight.dtype),
        None if out.d_bias is None or head.bias is None else out.d_bias.to(head.bias.dtype),
    )


def folds(dtype: torch.dtype) -> bool:
    """Whether d hidden of this dtype may hold the token gradient before the incoming one: float16 would underflow."""
    return dtype != torch.float16


def scale_rows_(u: Tensor, g: Tensor) -> Tensor:
    """u (B, T, H), contiguous, times g (B, T) in place: multiplied in float32, rounded once."""
    if u.numel():
        width = u.shape[-1]
        block = min(4096, triton.next_power_of_2(width))
        with torch.cuda.device(u.device) if u.is_cuda else nullcontext():
            triton_rows.scale_rows[(u.numel() // width, triton.cdiv(width, block))](
                u, g.contiguous(), width, BLOCK=block
            )
    return u


def scaled_to(d: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """d, contiguous, times a 0-d factor in float32, rounded once to `dtype`; in place where that is d's own."""
    out = d if d.dtype == dtype else torch.empty_like(d, dtype=dtype)
    with torch.cuda.device(d.device) if d.is_cuda else nullcontext():
        triton_rows.scale_all[(triton.cdiv(d.numel(), 4096),)](d, factor, out, d.numel(), BLOCK=4096)
    return out


def _allocate(out: Pass, head: Head, needs: tuple[bool, bool, bool], tokens: int) -> None:
    device = head.weight.device
    if needs[1]:
        # The first chunk writes all of it.
        make = torch.empty if tokens else torch.zeros
        out.d_weight = make(head.weight.shape, dtype=torch.float32, device=device)
    if needs[2]:
        out.d_bias = torch.zeros(head.weight.shape[0], dtype=torch.float32, device=device)


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out (float32) = a b; half-precision operands are accumulated and returned in float32."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # the interpreter
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_product(total: Tensor, e: Tensor, rows: Tensor, largest: Tensor | None, first: bool) -> None:
    """total (V, H, float32) += largest e^T rows; with `first` total is written, whatever it holds."""
    if largest is not None:
        # The factor is known only to the device. Blocks of the vocabulary keep the product's own memory small.
        for start in range(0, total.shape[0], 16384):
            part = torch.empty_like(total[start : start + 16384])
            _mm(e[:, start : start + 16384].t(), rows, part)
            part.mul_(largest)
            total[start : start + 16384].copy_(part) if first else total[start : start + 16384].add_(part)
    elif first:
        _mm(e.t(), rows, total)
    elif e.dtype == total.dtype or not e.is_cuda:
        total.addmm_(e.t().to(total.dtype), rows.to(total.dtype))
    else:
        torch.addmm(total, e.t(), rows, out_dtype=total.dtype, out=total)
