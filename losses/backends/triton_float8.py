"""float8 in the Triton backend: operands to e4m3, the head once while it stays frozen. See `losses.precision`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from losses.backends.triton_tiles import INTERPRETED
from losses.precision import FLOAT8, FLOAT8_MAX, scales

VOCAB_BLOCK = 16384  # rows of the head that are converted at a time


@triton.jit
def _to_float8(v, dtype: tl.constexpr, ROUND: tl.constexpr):
    """e4m3, ties to even. ROUND: done in float32 first, since the interpreter's own conversion does not round so."""
    if ROUND:
        step = tl.exp2(tl.maximum(tl.floor(tl.log2(tl.maximum(tl.abs(v), 1e-30))), -6.0) - 3.0)
        v = (v / step + 12582912.0 - 12582912.0) * step
    return v.to(dtype)


@triton.jit
def quantize_rows(
    x, x_stride, scale, out, out_stride, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr
):
    """out = x / scale in float8, scale[row] = max |x| / LARGEST (1 for a row of zeros); x (rows, width)."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * x_stride + k, mask=k < width, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(value), propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(tl.where(peak == peak, peak, float("inf")), 0)
    s = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    # NaN and infinity must not turn into finite rows.
    s = tl.where(largest == float("inf"), float("nan"), s)
    tl.store(scale + row, s)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)
        v = tl.load(x + row * x_stride + k, mask=k < width, other=0.0).to(tl.float32) / s
        v = tl.minimum(tl.maximum(v, -LARGEST), LARGEST)
        tl.store(out + row * out_stride + k, _to_float8(v, out.dtype.element_ty, ROUND), mask=k < width)


@triton.jit
def requantize(
    e, e_stride, out, out_stride, inverse, inverse_out, vocab,
    TARGET: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """One row of exponentials to float8, its largest brought below 2^TARGET; inverse_out takes the factor back."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        k = first + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.load(e + row * e_stride + k, mask=k < vocab, other=0.0).to(tl.float32))
    # A row with nothing beside the sampled token has no largest to bring anywhere.
    shift = TARGET - tl.ceil(tl.log2(tl.maximum(tl.max(peak, 0), 1e-30)))
    factor = tl.exp2(shift)
    for first in range(0, vocab, BLOCK):
        k = first + tl.arange(0, BLOCK)
        v = tl.load(e + row * e_stride + k, mask=k < vocab, other=0.0).to(tl.float32) * factor
        tl.store(out + row * out_stride + k, _to_float8(v, out.dtype.element_ty, ROUND), mask=k < vocab)
    tl.store(inverse_out + row, tl.load(inverse + row) * tl.exp2(-shift))


@dataclass(frozen=True)
class Float8Head:
    """A weight (V, H) in e4m3 for both products; rows start at multiples of 16 bytes, what is beyond them is 0."""

    rows: Tensor  # (V, H), scaled by row
    row_scales: Tensor  # (V,) float32
    columns: Tensor  # (H, V), scaled by column of the weight
    column_scales: Tensor  # (H,) float32


_frozen: dict[tuple, tuple[StorageWeakRef, int, Float8Head]] = {}


def head_of(original: Tensor, weight: Tensor) -> Float8Head:
    """`weight` (the operand) in float8, kept while `original` (what the caller passed) lives unchanged and untrained.

    Takes as much memory as the bf16 head itself.
    """
    if original.requires_grad:
        return _quantize(weight)
    _forget()
    # By memory, not by tensor: `detach`, or a new view for every call, is the same head.
    key = (original.device, original.data_ptr(), original.shape, original.stride(), original.dtype, weight.dtype)
    known = _frozen.get(key)
    if known is None or known[1] != original._version:
        storage = StorageWeakRef(original.untyped_storage())
        known = _frozen[key] = (storage, original._version, _quantize(weight))
    return known[2]


def _forget() -> None:
    """Drops what belongs to memory that has been freed."""
    for key in [key for key, (storage, _, _) in _frozen.items() if storage.expired()]:
        del _frozen[key]


def _quantize(weight: Tensor) -> Float8Head:
    rows, row_scales = quantized_rows(weight)
    vocab, width = weight.shape
    column_scales = scales(weight, 0).squeeze(0)
    columns = torch.zeros(_padded(width), _padded(vocab), dtype=FLOAT8, device=weight.device)
    for first in range(0, vocab, VOCAB_BLOCK):
        block = weight[first : first + VOCAB_BLOCK].float() / column_scales
        columns[:width, first : first + len(block)] = block.clamp_(-FLOAT8_MAX, FLOAT8_MAX).t().to(FLOAT8)
    return Float8Head(rows, row_scales, columns, column_scales)


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (rows, width) in e4m3 with one float32 scale a row; rows start at multiples of 16 bytes."""
    out = torch.empty(len(x), _padded(x.shape[1]), dtype=FLOAT8, device=x.device)[:, : x.shape[1]]
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    quantize_rows[(len(x),)](
        x, x.stride(0), scale, out, out.stride(0), x.shape[1], LARGEST=FLOAT8_MAX,
        BLOCK=min(4096, triton.next_power_of_2(x.shape[1])), ROUND=INTERPRETED,
    )  # fmt: skip
    return out, scale


class Mixer:
    """e W in float8 for chunks of up to `rows` rows."""

    def __init__(self, head: Float8Head, rows: int) -> None:
        self.head = head
        device = head.rows.device
        # Zeros, so that the padding of a row multiplies to nothing.
        self.e = torch.zeros(-(-rows // 16) * 16, head.columns.shape[1], dtype=FLOAT8, device=device)
        self.inverse = torch.empty(rows, dtype=torch.float32, device=device)
        self.one = torch.ones((), dtype=torch.float32, device=device)

    def __call__(self, e: Tensor, inverse: Tensor) -> Tensor:
        """(rows, H) float32, to be multiplied by the weight's column scales and `self.inverse`."""
        requantize[(len(e),)](
            e,
            e.stride(0),
            self.e,
            self.e.stride(0),
            inverse,
            self.inverse,
            e.shape[1],
            TARGET=8,
            BLOCK=4096,
            ROUND=INTERPRETED,
        )
        a, b = self.e[: -(-len(e) // 16) * 16], self.head.columns.t()
        if not e.is_cuda:  # the interpreter
            return (a.float() @ b.float())[: len(e), : self.head.rows.shape[1]].contiguous()
        # Not the fast accumulation: thousands of partial sums need more than its 14 bits.
        mixture = torch._scaled_mm(a, b, self.one, self.one, out_dtype=torch.float32, use_fast_accum=False)
        return mixture[: len(e), : self.head.rows.shape[1]]


def _padded(size: int) -> int:
    return -(-size // 16) * 16
