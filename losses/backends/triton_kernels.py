"""Triton kernels of the LM head's product; `triton_launch` says in which order they run. Inside, logarithms are base 2.

Per token, with z_v the logits over the temperature in units of log 2 and y the sampled token, x_v = z_v - z_y:
exponentials are taken relative to the sampled token's own logit, which `own_logit` knows before the product. So 2^x_v
is stored by the product's epilogue in half precision, and no second look at the logits is needed for their maximum. The
sum over v != y is the odds (1 - p_y) / p_y: log p_y = -log1p(sum) is never positive, and right to the last digits where
p_y is near 1.

Where the exponentials of a tile (rows x BLOCK_N of the vocabulary) pass 2^LIMIT, its rows are stored relative to their
maximum in the tile; `rescale` then brings such rows, and no others, to one offset. What is left per row and tile is the
offset, the sum of 2^(x - offset) and, for the entropy, of 2^(x - offset) x: `finalize` makes the row's numbers of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOW = tl.constexpr(-1.0e30)  # stands for log2 of 0: unlike -inf it survives 0 x LOW


@triton.jit
def _tanh(y):
    a = tl.exp2(tl.abs(y) * -2.8853900817779268)
    t = (1.0 - a) / (1.0 + a)
    return tl.where(y < 0, -t, t)


@triton.jit
def _bend(z, inner, SOFTCAP: tl.constexpr, NEGATIVE: tl.constexpr):
    """Raw logits to what `outer` (above 0) makes base-2 logits over the temperature, and the softcap's slope."""
    if SOFTCAP:
        t = _tanh(z * inner)
        return t, 1.0 - t * t
    return -z if NEGATIVE else z, z


@triton.jit
def _tile(
    z, first_row, rows, row_mask, tile, rows_stride, ids, own, exact, bias, e, e_stride, vocab, inner, outer,
    offsets, sums, moments,
    DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, NEGATIVE: tl.constexpr, LIMIT: tl.constexpr,
    SHIFT: tl.constexpr, STORE: tl.constexpr, ENTROPY: tl.constexpr, TMA_STORE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """From a tile of raw logits (float32) to stored exponentials and the tile's row statistics.

    `exact`: whether the tile holds a row's own token or the vocabulary's end.
    """
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if BIAS:
        z += tl.load(bias + cols, mask=cols < vocab, other=0.0).to(tl.float32)[None, :]
    z, slope = _bend(z, inner, SOFTCAP, NEGATIVE)
    if BIAS:
        # -inf (a banned token's bias) becomes LOW, NaN stays.
        z = tl.maximum(z, LOW, propagate_nan=tl.PropagateNan.ALL)
    if exact:
        target = tl.load(ids + rows, mask=row_mask, other=0).to(tl.int32)
        z = tl.where((cols[None, :] < vocab) & (cols[None, :] != target[:, None]), z, LOW)
    base = tl.load(own + rows, mask=row_mask, other=0.0)
    top = tl.max(z, 1) * outer - base
    offset = tl.where(top > LIMIT, top, 0.0)
    x = z * outer - (base + offset)[:, None]
    p = tl.exp2(x)
    total = tl.sum(p, 1)
    at = tile * rows_stride + rows  # below 2^31: the launch keeps chunks that small
    tl.store(offsets + at, offset, mask=row_mask)
    tl.store(sums + at, total, mask=row_mask)
    if ENTROPY:
        tl.store(moments + at, tl.sum(p * x, 1) + offset * total, mask=row_mask)
    if STORE:
        if SOFTCAP:
            p *= slope
        if SHIFT != 0:
            p *= 2.0**SHIFT
        if TMA_STORE:
            e.store([first_row, tile * BLOCK_N], p.to(DTYPE))
        else:
            place = e + rows.to(tl.int64)[:, None] * e_stride + cols[None, :]
            tl.store(place, p.to(DTYPE), mask=row_mask[:, None] & (cols[None, :] < vocab))


@triton.jit
def own_logit(
    h, stride_b, stride_t, stride_h, length, positions, weight, weight_stride, bias, ids, own, marks, chunk, row_tiles,
    tiles, width, inner, outer,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr,
    NEGATIVE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """own (tokens,): each token's own base-2 logit, a float32 dot product of h (B, length, width) and weight[ids].

    marks (chunks x row_tiles, tiles): set where a tile of its chunk holds the token.
    """
    i = tl.program_id(0)
    place = i.to(tl.int64)
    if positions is not None:
        place = tl.load(positions + i)
    at = h + (place // length) * stride_b + (place % length) * stride_t
    token = tl.load(ids + i).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = tl.load(at + k.to(tl.int64) * stride_h, mask=k < width, other=0.0).to(DTYPE).to(tl.float32)
        b = tl.load(weight + token * weight_stride + k, mask=k < width, other=0.0).to(tl.float32)
        total += a * b
    z = tl.sum(total, 0)
    if BIAS:
        z += tl.load(bias + token).to(tl.float32)
    z, _ = _bend(z, inner, SOFTCAP, NEGATIVE)
    tl.store(own + i, z * outer)
    row_tile = i // chunk * row_tiles + i % chunk // BLOCK_M
    tl.store(marks + row_tile * tiles + token // BLOCK_N, 1)


@triton.jit
def _product_tile(
    index, h, h_stride, weight, weight_stride, h_scale, weight_scale, rows, vocab, width, row_tiles, tiles, rows_stride,
    ids, own, marks, bias, e, e_stride, inner, outer, offsets, sums, moments,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, WIDEN: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, NEGATIVE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr, STORE: tl.constexpr, ENTROPY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    # Tiles run down a group of row blocks first: its hidden states stay in L2 and the weight is read once per group.
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
    exact = (tl.load(marks + row_tile * tiles + tile) != 0) | ((tile + 1) * BLOCK_N > vocab)
    _tile(
        acc, row_tile * BLOCK_M, r, r < rows, tile, rows_stride, ids, own, exact, bias, e, e_stride, vocab, inner,
        outer, offsets, sums, moments, DTYPE, BLOCK_N, SOFTCAP, NEGATIVE, LIMIT, SHIFT, STORE, ENTROPY, TMA, BIAS,
    )  # fmt: skip


@triton.jit
def product(
    h, h_stride, weight, weight_stride, h_scale, weight_scale, rows, vocab, width, rows_stride,
    ids, own, marks, bias, e, e_stride, inner, outer, offsets, sums, moments,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr, WIDEN: tl.constexpr, SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, NEGATIVE: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, STORE: tl.constexpr,
    ENTROPY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """h (rows, width) x weight (vocab, width)^T, never written: `_tile` takes each tile from the accumulators.

    h, weight and e are pointers, or with TMA tensor descriptors. PROGRAMS: 0, one tile per program; else that many
    programs share the tiles. WIDEN: multiply in float32 (the interpreter has no half-precision dot).
    """
    row_tiles = tl.cdiv(rows, BLOCK_M)
    tiles = tl.cdiv(vocab, BLOCK_N)
    if PROGRAMS == 0:
        _product_tile(
            tl.program_id(0), h, h_stride, weight, weight_stride, h_scale, weight_scale, rows, vocab, width, row_tiles,
            tiles, rows_stride, ids, own, marks, bias, e, e_stride, inner, outer, offsets, sums, moments,
            DTYPE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, TMA, WIDEN, SCALED, SOFTCAP, NEGATIVE, LIMIT, SHIFT, STORE,
            ENTROPY, BIAS,
        )  # fmt: skip
    else:
        for index in tl.range(tl.program_id(0), row_tiles * tiles, PROGRAMS, flatten=FLATTEN):
            _product_tile(
                index, h, h_stride, weight, weight_stride, h_scale, weight_scale, rows, vocab, width, row_tiles,
                tiles, rows_stride, ids, own, marks, bias, e, e_stride, inner, outer, offsets, sums, moments,
                DTYPE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, TMA, WIDEN, SCALED, SOFTCAP, NEGATIVE, LIMIT, SHIFT, STORE,
                ENTROPY, BIAS,
            )  # fmt: skip


@triton.jit
def logits_tile(
    logits, logits_stride, rows, vocab, rows_stride, ids, own, bias, e, e_stride, inner, outer, offsets, sums, moments,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, NEGATIVE: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr, STORE: tl.constexpr, ENTROPY: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The same epilogue over float32 logits (rows, vocab) that another product wrote; e may be their own memory."""
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(1)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    place = logits + r.to(tl.int64)[:, None] * logits_stride + cols[None, :]
    z = tl.load(place, mask=(r < rows)[:, None] & (cols < vocab)[None, :], other=0.0)
    _tile(
        z, 0, r, r < rows, tile, rows_stride, ids, own, True, bias, e, e_stride, vocab, inner, outer,
        offsets, sums, moments, DTYPE, BLOCK_N, SOFTCAP, NEGATIVE, LIMIT, SHIFT, STORE, ENTROPY, False, BIAS,
    )  # fmt: skip
