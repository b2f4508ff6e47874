"""A low-rank product added to a linear layer's output, in one Triton kernel, for vLLM's decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

SLICES = 3  # outputs side by side that one launch serves, as of query, key and value
STAGE_BYTES = 64 << 10  # of shared memory, for the tiles that are loaded ahead
PROGRAMS = 96  # wanted at 64 rows: most of a GPU's multiprocessors


@triton.jit
def _slice(
    x, x_stride, y, y_stride, a, b, tile, rows, mapping, active, scale, START: tl.constexpr, WIDTH: tl.constexpr,
    INNER: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, EVEN: tl.constexpr, MAPPED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One tile of one slice: y[:, START:START + WIDTH] += scale (x a^T) b^T, sums in float32."""
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = r < rows
    adapted = inside
    if MAPPED:  # known long before it is needed: only the last store waits for it
        adapted &= tl.load(mapping + r, mask=inside, other=-1) == 0
        adapted &= (tl.load(active) == 0) | (tl.load(active + 1) == 0)
    ranks = tl.arange(0, BLOCK_R)
    of_rank = ranks < RANK
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Offsets are 32-bit: the caller keeps rows, widths and ranks far below what would overflow.
    up = tl.load(b + n[None, :] * RANK + ranks[:, None], mask=(n < WIDTH)[None, :] & of_rank[:, None], other=0.0)
    place = y + r[:, None] * y_stride + START + n[None, :]
    kept = adapted[:, None] & (n < WIDTH)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(0, INNER, BLOCK_K):
        x_mask, a_mask = inside[:, None], of_rank[None, :]
        if not EVEN:
            x_mask &= (start + k < INNER)[None, :]
            a_mask &= (start + k < INNER)[:, None]
        left = tl.load(x + r[:, None] * x_stride + (start + k)[None, :], mask=x_mask, other=0.0)
        down = tl.load(a + ranks[None, :] * INNER + (start + k)[:, None], mask=a_mask, other=0.0)
        if WIDEN:
            left, down = left.to(tl.float32), down.to(tl.float32)
        acc = tl.dot(left, down, acc, input_precision="ieee")
    middle = (acc * scale).to(up.dtype)
    if WIDEN:
        middle, up = middle.to(tl.float32), up.to(tl.float32)
    added = tl.dot(middle, up, input_precision="ieee")
    total = tl.load(place, mask=kept, other=0.0).to(tl.float32) + added
    tl.store(place, total.to(y.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def lora(
    x, x_stride, y, y_stride, a0, b0, a1, b1, a2, b2, rows, mapping, active, scale,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, INNER: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, EVEN: tl.constexpr,
    MAPPED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Programs (row tiles, column tiles of all slices); each repeats the narrow first product for its own rows.

    W0, W1, W2: widths of the slices, 0 where there is none. WIDEN: multiply in float32 (the interpreter has no
    half-precision dot).
    """
    tile = tl.program_id(1)
    T0: tl.constexpr = (W0 + BLOCK_N - 1) // BLOCK_N
    T1: tl.constexpr = (W1 + BLOCK_N - 1) // BLOCK_N
    if tile < T0:
        _slice(
            x, x_stride, y, y_stride, a0, b0, tile, rows, mapping, active, scale, 0, W0,
            INNER, RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, EVEN, MAPPED, WIDEN,
        )  # fmt: skip
    if W1 > 0:  # noqa: SIM102 - known when it is compiled
        if (tile >= T0) & (tile < T0 + T1):
            _slice(
                x, x_stride, y, y_stride, a1, b1, tile - T0, rows, mapping, active, scale, W0, W1,
                INNER, RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, EVEN, MAPPED, WIDEN,
            )  # fmt: skip
    if W2 > 0:  # noqa: SIM102
        if tile >= T0 + T1:
            _slice(
                x, x_stride, y, y_stride, a2, b2, tile - T0 - T1, rows, mapping, active, scale, W0 + W1, W2,
                INNER, RANK, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_R, EVEN, MAPPED, WIDEN,
            )  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    """Sizes of a launch: rows, columns and inner width of a tile, tiles loaded ahead, warps of a program."""

    m: int
    n: int
    k: int
    stages: int
    warps: int = 4


def tiles(rows: int, inner: int, widths: Sequence[int], rank: int, itemsize: int = 2) -> Tiles:
    """The sizes for a shape: a fixed choice, since a launch that is captured into a CUDA graph cannot be tuned.

    Only `m` depends on the rows, so that few kernels are compiled.
    """
    m = 16 if rows <= 128 else 32
    k = 128 if inner % 128 == 0 else 64
    enough = [n for n in (128, 64) if 4 * sum(triton.cdiv(w, n) for w in widths) >= PROGRAMS]
    n = enough[0] if enough else 32
    stage = (m + _padded(rank)) * k * itemsize
    return Tiles(m, n, k, stages=max(2, min(8, STAGE_BYTES // stage, triton.cdiv(inner, k))))


def _padded(rank: int) -> int:
    return max(16, triton.next_power_of_2(rank))  # tl.dot takes no less


def add_lora(
    y: Tensor,
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scale: float = 1.0,
    *,
    mapping: Tensor | None = None,
    active: Tensor | None = None,
    sizes: Tiles | None = None,
) -> None:
    """y += scale (x a_s^T) b_s^T for the slices s of y's columns, in place.

    y (rows, sum of widths) and x (rows, inner): columns contiguous, rows with any stride. a: one to three contiguous
    tensors of inner x rank numbers, row by row (..., rank, inner); b: as many (..., width, rank). mapping (at least
    rows,) and active (2,), int32: as in vLLM's LoRAKernelMeta with one adapter slot; a row is changed only where its
    mapping is 0 and 0 is among the active. Sums are float32; x a^T is rounded to b's dtype. Sizes come from the shape
    where none are given. Nothing is checked: this runs 120 times within a step.
    """
    widths = [w.shape[-2] for w in b]
    rank, inner = a[0].shape[-2:]
    rows = len(x)
    s = sizes or tiles(rows, inner, widths, rank, x.element_size())
    a, b = [*a, *[a[0]] * (SLICES - len(a))], [*b, *[b[0]] * (SLICES - len(b))]
    w0, w1, w2 = [*widths, *[0] * (SLICES - len(widths))]
    grid = (triton.cdiv(rows, s.m), sum(triton.cdiv(w, s.n) for w in widths))
    mapped = mapping is not None
    lora[grid](
        x, x.stride(0), y, y.stride(0), a[0], b[0], a[1], b[1], a[2], b[2], rows,
        mapping if mapped else x, active if mapped else x, scale,
        W0=w0, W1=w1, W2=w2, INNER=inner, RANK=rank, BLOCK_M=s.m, BLOCK_N=s.n, BLOCK_K=s.k, BLOCK_R=_padded(rank),
        EVEN=inner % s.k == 0, MAPPED=mapped, WIDEN=x.device.type == "cpu", num_warps=s.warps, num_stages=s.stages,
    )  # fmt: skip
