"""Triton kernels of the LM head's product; `triton_launch` says in which order they run. Everything is base 2 inside.

Per token, with z_v the logits over the temperature in units of log 2 and y the sampled token, x_v = z_v - z_y. The exponentials
are taken relative to the sampled token's logit, which is known before the product: 2^x_v is stored by the product's own
epilogue, in half precision, and no second look at the logits is needed to find their maximum. The sum over v != y is the odds
(1 - p_y) / p_y, so log p_y = -log1p(sum) is never positive and right to the last digits also where p_y is near 1.

A tile (rows x BLOCK_N of the vocabulary) whose largest x passes LIMIT is stored relative to that maximum instead; `rescale`
then brings the row, and only such rows, to one offset. What is left per row and tile is the maximum, the sum of 2^(x - offset)
and the sum of 2^(x - offset) x (for the entropy), from which `finalize` makes the row's numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOW = tl.constexpr(-1.0e30)  # stands for log2 of 0: unlike -inf it survives 0 x LOW


@triton.jit
def _tanh(y):
    a = tl.exp2(tl.abs(y) * -2.8853900817779268)
    t = (1.0 - a) / (1.0 + a)
    return tl.where(y < 0, -t, t)


@triton.jit
def _bend(z, inner, outer, SOFTCAP: tl.constexpr):
    """Raw logits to base-2 logits over the temperature, and the softcap's slope."""
    if SOFTCAP:
        t = _tanh(z * inner)
        return t * outer, 1.0 - t * t
    return z * outer, z


@triton.jit
def _tile(
    z, first_row, rows, row_mask, tile, rows_stride, ids, own, bias, e, e_stride, vocab, inner, outer, maxima, sums, moments,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, STORE: tl.constexpr,
    ENTROPY: tl.constexpr, TMA_STORE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """From a tile of raw logits (float32) to stored exponentials and the tile's row statistics."""
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if BIAS:
        z += tl.load(bias + cols, mask=cols < vocab, other=0.0).to(tl.float32)[None, :]
    z, slope = _bend(z, inner, outer, SOFTCAP)
    target = tl.load(ids + rows, mask=row_mask, other=0).to(tl.int32)
    x = z - tl.load(own + rows, mask=row_mask, other=0.0)[:, None]
    # -inf (a banned token's bias) becomes LOW, NaN stays.
    x = tl.maximum(x, LOW, propagate_nan=tl.PropagateNan.ALL)
    x = tl.where((cols[None, :] < vocab) & (cols[None, :] != target[:, None]), x, LOW)
    top = tl.max(x, 1)
    offset = tl.where(top > LIMIT, top, 0.0)
    p = tl.exp2(x - offset[:, None])
    at = tile * rows_stride + rows  # below 2^31: the launch keeps chunks that small
    tl.store(maxima + at, top, mask=row_mask)
    tl.store(sums + at, tl.sum(p, 1), mask=row_mask)
    if ENTROPY:
        tl.store(moments + at, tl.sum(p * x, 1), mask=row_mask)
    if STORE:
        if SOFTCAP:
            p *= slope
        if SHIFT != 0:
            p *= 2.0**SHIFT
        if TMA_STORE:
            e.store([first_row, tile * BLOCK_N], p.to(e.dtype))
        else:
            place = e + rows.to(tl.int64)[:, None] * e_stride + cols[None, :]
            tl.store(place, p.to(e.dtype.element_ty), mask=row_mask[:, None] & (cols[None, :] < vocab))


@triton.jit
def own_logit(
    h, h_stride, weight, weight_stride, bias, ids, own, width, inner, outer,
    BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """own (rows,): the sampled token's base-2 logit, a float32 dot product of h (rows, width) and weight[ids]."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = tl.load(h + row * h_stride + k, mask=k < width, other=0.0).to(tl.float32)
        b = tl.load(weight + token * weight_stride + k, mask=k < width, other=0.0).to(tl.float32)
        total += a * b
    z = tl.sum(total, 0)
    if BIAS:
        z += tl.load(bias + token).to(tl.float32)
    z, _ = _bend(z, inner, outer, SOFTCAP)
    tl.store(own + row, z)


@triton.jit
def _product_tile(
    index, h, h_stride, weight, weight_stride, h_scale, weight_scale, rows, vocab, width, row_tiles, tiles, rows_stride,
    ids, own, bias, e, e_stride, inner, outer, maxima, sums, moments,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    WIDEN: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, STORE: tl.constexpr,
    ENTROPY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    # Tiles run down a group of row blocks first: the group's hidden states stay in L2 and the weight is read once per group.
    per_group = GROUP * tiles
    first = (index // per_group) * GROUP
    height = min(row_tiles - first, GROUP)
    row_tile = first + (index % per_group) % height
    tile = (index % per_group) // height
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    r = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    if TMA:
        for k in range(0, width, BLOCK_K):
            a = h.load([row_tile * BLOCK_M, k])
            b = weight.load([tile * BLOCK_N, k])
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b.T, acc)
    else:
        v = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        a_at = h + r.to(tl.int64)[:, None] * h_stride
        b_at = weight + v.to(tl.int64)[None, :] * weight_stride
        for k in range(0, width, BLOCK_K):
            c = k + tl.arange(0, BLOCK_K)
            a = tl.load(a_at + c[None, :], mask=(r[:, None] < rows) & (c[None, :] < width), other=0.0)
            b = tl.load(b_at + c[:, None], mask=(v[None, :] < vocab) & (c[:, None] < width), other=0.0)
            if WIDEN:
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b, acc)
    if SCALED:
        v = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        acc *= tl.load(h_scale + r, mask=r < rows, other=0.0)[:, None]
        acc *= tl.load(weight_scale + v, mask=v < vocab, other=0.0)[None, :]
    _tile(
        acc, row_tile * BLOCK_M, r, r < rows, tile, rows_stride, ids, own, bias, e, e_stride, vocab, inner, outer, maxima, sums, moments,
        BLOCK_N, SOFTCAP, LIMIT, SHIFT, STORE, ENTROPY, TMA, BIAS,
    )  # fmt: skip


@triton.jit
def product(
    h, h_stride, weight, weight_stride, h_scale, weight_scale, rows, vocab, width, rows_stride,
    ids, own, bias, e, e_stride, inner, outer, maxima, sums, moments,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    PROGRAMS: tl.constexpr, WIDEN: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    STORE: tl.constexpr, ENTROPY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """h (rows, width) x weight (vocab, width)^T, never written: `_tile` takes each tile from the accumulators.

    h and weight are pointers, or with TMA tensor descriptors. PROGRAMS: 0, one tile per program; else that many programs
    share the tiles. WIDEN: multiply in float32 (the interpreter has no half-precision dot).
    """
    row_tiles = tl.cdiv(rows, BLOCK_M)
    tiles = tl.cdiv(vocab, BLOCK_N)
    if PROGRAMS == 0:
        _product_tile(
            tl.program_id(0), h, h_stride, weight, weight_stride, h_scale, weight_scale, rows, vocab, width, row_tiles, tiles,
            rows_stride, ids, own, bias, e, e_stride, inner, outer, maxima, sums, moments,
            BLOCK_M, BLOCK_N, BLOCK_K, GROUP, TMA, WIDEN, SCALED, SOFTCAP, LIMIT, SHIFT, STORE, ENTROPY, BIAS,
        )  # fmt: skip
    else:
        for index in tl.range(tl.program_id(0), row_tiles * tiles, PROGRAMS, flatten=True):
            _product_tile(
                index, h, h_stride, weight, weight_stride, h_scale, weight_scale, rows, vocab, width, row_tiles, tiles,
                rows_stride, ids, own, bias, e, e_stride, inner, outer, maxima, sums, moments,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP, TMA, WIDEN, SCALED, SOFTCAP, LIMIT, SHIFT, STORE, ENTROPY, BIAS,
            )  # fmt: skip


@triton.jit
def logits_tile(
    logits, logits_stride, rows, vocab, rows_stride, ids, own, bias, e, e_stride, inner, outer, maxima, sums, moments,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    STORE: tl.constexpr, ENTROPY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The same epilogue over float32 logits (rows, vocab) that another product wrote; e may be their own memory."""
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(1)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    place = logits + r.to(tl.int64)[:, None] * logits_stride + cols[None, :]
    z = tl.load(place, mask=(r < rows)[:, None] & (cols < vocab)[None, :], other=0.0)
    _tile(
        z, 0, r, r < rows, tile, rows_stride, ids, own, bias, e, e_stride, vocab, inner, outer,
        maxima, sums, moments, BLOCK_N, SOFTCAP, LIMIT, SHIFT, STORE, ENTROPY, False, BIAS,
    )  # fmt: skip


@triton.jit
def _optional(pointer, at, mask, otherwise):
    if pointer is None:
        return otherwise
    return tl.load(pointer + at, mask=mask, other=0.0)


@triton.jit
def finalize(
    maxima, sums, moments, rows_stride, rows, tiles, own, start, positions, logps, entropy, offsets, keep, inverse, grad,
    kappa, inner, outer, old, ref, advantage, weight_surrogate, weight_kl, surrogate_args, kl_args,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, SOFTCAP: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr,
    ENTROPY: tl.constexpr, SURROGATE: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    """The rows' numbers from their tiles', and with SURROGATE the token term's derivative (the variant's own body).

    Writes logps, entropy and grad at the tokens' flat positions; offsets (base 2), keep = kappa slope_y (1 - p_y) and
    inverse = kappa 2^-SHIFT / sum at the chunk's rows: u = keep W[y] - inverse (e W).
    """
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = r < rows
    top = tl.full([BLOCK_M], LOW, tl.float32)
    for first in range(0, tiles, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        at = t[:, None] * rows_stride + r[None, :]
        top = tl.maximum(top, tl.max(tl.load(maxima + at, mask=(t < tiles)[:, None] & live[None, :], other=LOW), 0))
    offset = tl.where(top > LIMIT, top, 0.0)
    total = tl.zeros([BLOCK_M], tl.float32)
    moment = tl.zeros([BLOCK_M], tl.float32)
    for first in range(0, tiles, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        at = t[:, None] * rows_stride + r[None, :]
        here = (t < tiles)[:, None] & live[None, :]
        tile_top = tl.load(maxima + at, mask=here, other=LOW)
        factor = tl.exp2(tl.where(tile_top > LIMIT, tile_top, 0.0) - offset[None, :])
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
        o = _optional(old, place, live, n)
        _, g = SURROGATE(n, o, a, *surrogate_args)
        g *= share
        if KL is not None:
            p = tl.load(ref + place, mask=live, other=0.0)
            _, slope_kl = KL(n, p, o, *kl_args)
            g += slope_kl * share_kl
        tl.store(grad + place, g, mask=live)


@triton.jit
def rescale(
    e, e_stride, maxima, rows_stride, offsets, rows, vocab, tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Brings rows with an offset to it, tile by tile; returns at once where no row of the block has one."""
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offset = tl.load(offsets + r, mask=r < rows, other=0.0)
    if tl.max(offset, 0) > 0.0:
        first = tl.program_id(1) * TILES
        for tile in range(first, min(first + TILES, tiles)):
            cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            top = tl.load(maxima + tile * rows_stride + r, mask=r < rows, other=0.0)
            factor = tl.exp2(tl.where(top > LIMIT, top, 0.0) - offset)
            place = e + r.to(tl.int64)[:, None] * e_stride + cols[None, :]
            here = ((r < rows) & (offset > 0.0))[:, None] & (cols < vocab)[None, :]
            value = tl.load(place, mask=here, other=0.0).to(tl.float32) * factor[:, None]
            tl.store(place, value.to(e.dtype.element_ty), mask=here)


@triton.jit
def own_minus_mixture(
    mixture, mixture_scale, weight, weight_stride, ids, keep, inverse, grad, start, positions, out, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[position] = g (keep W[y] - inverse mixture), mixture (rows, width) float32 = e W; g = 1 where grad is None."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = start + row
    if positions is not None:
        place = tl.load(positions + place)
    token = tl.load(ids + row).to(tl.int64)
    mean = tl.load(mixture + row * width + k, mask=k < width, other=0.0) * tl.load(inverse + row)
    if mixture_scale is not None:
        mean *= tl.load(mixture_scale + k, mask=k < width, other=0.0)
    mine = tl.load(weight + token * weight_stride + k, mask=k < width, other=0.0).to(tl.float32)
    u = mine * tl.load(keep + row) - mean
    if grad is not None:
        u *= tl.load(grad + place)
    tl.store(out + place * width + k, u.to(out.dtype.element_ty), mask=k < width)


@triton.jit
def scaled_rows(h, h_stride, first, second, largest, start, positions, out, width, BLOCK: tl.constexpr):
    """out (rows, width) = h x first x second[position] / largest, in out's dtype; rounded once."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = start + row
    if positions is not None:
        place = tl.load(positions + place)
    factor = tl.load(first + row) * tl.load(second + place)
    if largest is not None:
        factor /= tl.load(largest)
    value = tl.load(h + row * h_stride + k, mask=k < width, other=0.0).to(tl.float32) * factor
    tl.store(out + row * width + k, value.to(out.dtype.element_ty), mask=k < width)


@triton.jit
def add_own_rows(
    total, order, ids, h, h_stride, keep, grad, start, positions, rows, width, BLOCK: tl.constexpr
):  # fmt: skip
    """total[y] += keep g h over the chunk's rows, each token's rows by one program in order: the same bits every time."""
    i = tl.program_id(0)
    row = tl.load(order + i).to(tl.int64)
    token = tl.load(ids + row).to(tl.int64)
    before = tl.load(order + tl.maximum(i - 1, 0)).to(tl.int64)
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
            row = tl.load(order + tl.minimum(i, rows - 1)).to(tl.int64)
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


@triton.jit
def quantize_rows(x, x_stride, row_stride_out, scale, out, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """out = x / scale in float8, scale[row] = max |x| / LARGEST (1 for a row of zeros); x (rows, width)."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.abs(tl.load(x + row * x_stride + k, mask=k < width, other=0.0).to(tl.float32)))
    largest = tl.max(peak, 0)
    s = tl.where(largest > 0.0, largest / LARGEST, 1.0)
    tl.store(scale + row, s)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)
        v = tl.load(x + row * x_stride + k, mask=k < width, other=0.0).to(tl.float32) / s
        v = tl.minimum(tl.maximum(v, -LARGEST), LARGEST)
        tl.store(out + row * row_stride_out + k, v.to(out.dtype.element_ty), mask=k < width)


@triton.jit
def requantize(
    e, e_stride, out, out_stride, maxima, rows_stride, tiles, offsets, inverse, inverse_out, vocab,
    TARGET: tl.constexpr, BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One row of exponentials to float8, its largest brought to 2^TARGET; inverse_out takes the factor back."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.full([BLOCK_T], LOW, tl.float32)
    for first in range(0, tiles, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        top = tl.maximum(top, tl.load(maxima + t * rows_stride + row, mask=t < tiles, other=LOW))
    # A row with nothing beside the sampled token has no maximum to bring anywhere.
    shift = TARGET - tl.ceil(tl.maximum(tl.max(top, 0), -100.0) - tl.load(offsets + row))
    factor = tl.exp2(shift)
    for first in range(0, vocab, BLOCK):
        k = first + tl.arange(0, BLOCK)
        v = tl.load(e + row * e_stride + k, mask=k < vocab, other=0.0).to(tl.float32) * factor
        tl.store(out + row * out_stride + k, v.to(out.dtype.element_ty), mask=k < vocab)
    tl.store(inverse_out + row, tl.load(inverse + row) * tl.exp2(-shift))
