"""Triton kernels from tiles to rows' numbers, and from products to gradients. See `triton_kernels`."""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finalize(
    tile_offsets, sums, moments, rows_stride, rows, tiles, own, start, positions, logps, entropy, offsets, keep,
    inverse, grad, kappa, outer, old, ref, advantage, weight_surrogate, weight_kl, surrogate_args, kl_args,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr, ENTROPY: tl.constexpr,
    SURROGATE: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    """The rows' numbers from their tiles', and with SURROGATE the token term's derivative (the variant's own body).

    Writes logps, entropy and grad at the tokens' flat positions; offsets (base 2), keep = kappa slope_y (1 - p_y) and
    inverse = kappa 2^-SHIFT / sum at the chunk's rows: u = keep W[y] - inverse (e W).
    """
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = r < rows
    offset = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, tiles, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        at = t[:, None] * rows_stride + r[None, :]
        here = (t < tiles)[:, None] & live[None, :]
        offset = tl.maximum(offset, tl.max(tl.load(tile_offsets + at, mask=here, other=0.0), 0))
    total = tl.zeros([BLOCK_M], tl.float32)
    moment = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, tiles, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        at = t[:, None] * rows_stride + r[None, :]
        here = (t < tiles)[:, None] & live[None, :]
        factor = tl.exp2(tl.load(tile_offsets + at, mask=here, other=0.0) - offset[None, :])
        total += tl.sum(tl.load(sums + at, mask=here, other=0.0) * factor, 0)
        if ENTROPY:
            moment += tl.sum(tl.load(moments + at, mask=here, other=0.0) * factor, 0)
    whole = total + tl.exp2(-offset)
    # log1p(total) where the offset is 0, exact for a sum far below 1.
    one = 1.0 + total
    log1p = tl.where(one == 1.0, total, tl.log(one) * (total / tl.where(one == 1.0, 1.0, one - 1.0)))
    log_sum = tl.where(offset == 0.0, log1p, offset * LN2 + tl.log(whole))
    z = tl.load(own + r, mask=live, other=0.0)
    n = -log_sum + (z - z)  # NaN and infinite logits must not pass for log-probs
    if positions is None:
        place = start + r.to(tl.int64)
    else:
        place = tl.load(positions + start + r.to(tl.int64), mask=live, other=0)
    tl.store(logps + place, n, mask=live)
    if ENTROPY:
        tl.store(entropy + place, tl.maximum(log_sum - LN2 * moment / whole, 0.0), mask=live)
    slope = 1.0
    if SOFTCAP:
        bent = z / outer
        slope = 1.0 - bent * bent
    tl.store(offsets + r, offset, mask=live)
    tl.store(keep + r, kappa * slope * (total / whole), mask=live)
    tl.store(inverse + r, kappa * (2.0**-SHIFT) / whole, mask=live)
    if SURROGATE is not None:
        a = tl.load(advantage + place, mask=live, other=0.0)
        share = tl.load(weight_surrogate + place, mask=live, other=0.0)
        counts = share != 0.0
        if KL is not None:
            share_kl = tl.load(weight_kl + place, mask=live, other=0.0)
            counts = counts | (share_kl != 0.0)
        n = tl.where(counts, n, 0.0)  # a masked token's n may be anything: no exp of it
        o = n
        if old is not None:
            o = tl.load(old + place, mask=live, other=0.0)
        _, g = SURROGATE(n, o, a, *surrogate_args)
        g *= share
        if KL is not None:
            p = tl.load(ref + place, mask=live, other=0.0)
            _, slope_kl = KL(n, p, o, *kl_args)
            g += slope_kl * share_kl
        tl.store(grad + place, g, mask=live)


@triton.jit
def rescale(
    e, e_stride, tile_offsets, rows_stride, offsets, rows, vocab, tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Brings rows with an offset to it, tile by tile; returns at once where no row of the block has one."""
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offset = tl.load(offsets + r, mask=r < rows, other=0.0)
    if tl.max(offset, 0) > 0.0:
        first = tl.program_id(1) * TILES
        for tile in range(first, min(first + TILES, tiles)):
            cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            factor = tl.exp2(tl.load(tile_offsets + tile * rows_stride + r, mask=r < rows, other=0.0) - offset)
            place = e + r.to(tl.int64)[:, None] * e_stride + cols[None, :]
            here = ((r < rows) & (offset > 0.0))[:, None] & (cols < vocab)[None, :]
            value = tl.load(place, mask=here, other=0.0).to(tl.float32) * factor[:, None]
            tl.store(place, value.to(e.dtype.element_ty), mask=here)


@triton.jit
def own_minus_mixture(
    mixture, mixture_scale, weight, weight_stride, ids, keep, inverse, grad, start, positions, out, mixture_stride,
    width, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[position] = g (keep W[y] - inverse mixture), mixture (rows, width) float32 = e W; g = 1 without grad."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = start + row
    if positions is not None:
        place = tl.load(positions + place)
    token = tl.load(ids + row).to(tl.int64)
    mean = tl.load(mixture + row * mixture_stride + k, mask=k < width, other=0.0) * tl.load(inverse + row)
    if mixture_scale is not None:
        mean *= tl.load(mixture_scale + k, mask=k < width, other=0.0)
    mine = tl.load(weight + token * weight_stride + k, mask=k < width, other=0.0).to(tl.float32)
    u = mine * tl.load(keep + row) - mean
    if grad is not None:
        g = tl.load(grad + place)
        u = tl.where(g == 0.0, 0.0, u * g)  # a masked token's u may be anything
    tl.store(out + place * width + k, u.to(out.dtype.element_ty), mask=k < width)


@triton.jit
def scaled_rows(h, h_stride, first, second, largest, start, positions, out, width, BLOCK: tl.constexpr):
    """out (rows, width) = -h x first x second[position] / largest, in out's dtype; rounded once."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = start + row
    if positions is not None:
        place = tl.load(positions + place)
    factor = -tl.load(first + row) * tl.load(second + place)
    if largest is not None:
        factor /= tl.load(largest)
    value = tl.load(h + row * h_stride + k, mask=k < width, other=0.0).to(tl.float32) * factor
    tl.store(out + row * width + k, value.to(out.dtype.element_ty), mask=k < width)


@triton.jit
def scale_rows(u, g, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = u + row * width + k
    factor = tl.load(g + row)
    value = tl.load(at, mask=k < width, other=0.0).to(tl.float32)
    value = tl.where(factor == 0.0, 0.0, value * factor)
    tl.store(at, value.to(u.dtype.element_ty), mask=k < width)


@triton.jit
def scale_all(x, factor, out, size, BLOCK: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.load(factor).to(tl.float32)
    value = tl.load(x + k, mask=k < size, other=0.0).to(tl.float32)
    value = tl.where(f == 0.0, 0.0, value * f)
    tl.store(out + k, value.to(out.dtype.element_ty), mask=k < size)


@triton.jit
def add_own_rows(
    total, order, ids, h, h_stride, keep, grad, start, positions, rows, width, BLOCK: tl.constexpr
):  # fmt: skip
    """total[y] += keep g h over the chunk's rows; one program adds a token's rows in order: always the same bits."""
    i = tl.program_id(0)
    row = tl.load(order + i) - start
    token = tl.load(ids + row).to(tl.int64)
    before = tl.load(order + tl.maximum(i - 1, 0)) - start
    if (i == 0) | (tl.load(ids + before).to(tl.int64) != token):
        k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(total + token * width + k, mask=k < width, other=0.0)
        more = True
        while more:
            place = start + row
            if positions is not None:
                place = tl.load(positions + place)
            factor = tl.load(keep + row) * tl.load(grad + place)
            value += tl.load(h + row * h_stride + k, mask=k < width, other=0.0).to(tl.float32) * factor
            i += 1
            row = tl.load(order + tl.minimum(i, rows - 1)) - start
            more = (i < rows) & (tl.load(ids + row).to(tl.int64) == token)
        tl.store(total + token * width + k, value, mask=k < width)


@triton.jit
def bias_gradient(
    total, e, e_stride, ids, keep, inverse, grad, start, positions, rows, vocab,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """total[v] += sum over rows of g (keep [v = y] - inverse e_v)."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    value = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, rows, BLOCK_M):
        r = first + tl.arange(0, BLOCK_M)
        live = r < rows
        place = start + r.to(tl.int64)
        if positions is not None:
            place = tl.load(positions + place, mask=live, other=0)
        g = tl.load(grad + place, mask=live, other=0.0)
        mean = tl.load(inverse + r, mask=live, other=0.0) * g
        mine = tl.load(keep + r, mask=live, other=0.0) * g
        token = tl.load(ids + r, mask=live, other=-1).to(tl.int32)
        here = live[:, None] & (cols < vocab)[None, :]
        p = tl.load(e + r.to(tl.int64)[:, None] * e_stride + cols[None, :], mask=here, other=0.0).to(tl.float32)
        own = tl.where(cols[None, :] == token[:, None], mine[:, None], 0.0)
        value += tl.sum(own - p * mean[:, None], 0)
    here = cols < vocab
    tl.store(total + cols, tl.load(total + cols, mask=here, other=0.0) + value, mask=here)
