"""Triton kernels of the exact KL: rows of two models' logits to a divergence and its slope. See `triton_vocabulary`.

With z and y the two models' logits over the temperature, own weights e = exp(z - max z), others' t = exp(y - max y) and

    x = (z - max z) - (y - max y),  so that t = e exp(-x)
    a = E[x],  b = E[exp(-x) - 1 + x]   under e / sum e,

KL(own || other) = a + log(sum t / sum e) = b - (r - log1p(r)) with r = b - a. b is a sum of terms that are never
negative, small where the models agree; the log-sum-exps themselves, whose rounding is as large as the KL of a policy
near its reference, are not in it, nor in own (x - a), the slope.
"""

from __future__ import annotations

import triton
import triton.language as tl

from losses.backends.triton_kernels import _tanh

LOW = tl.constexpr(-1.0e30)  # stands for log of 0: unlike -inf it survives 0 x LOW


@triton.jit
def _load(at, cols, vocab):
    return tl.load(at + cols, mask=(cols >= 0) & (cols < vocab), other=0.0)


@triton.jit
def _logits(z, bias, cols, vocab, inner, outer, SOFTCAP: tl.constexpr):
    """Raw logits to those over the temperature; LOW beyond the vocabulary, and where a bias bans a token."""
    here = cols < vocab
    if bias is not None:
        z += tl.load(bias + cols, mask=here, other=0.0).to(tl.float32)
    if SOFTCAP:
        z = _tanh(z * inner)
    z *= outer
    if bias is not None:
        z = tl.maximum(z, LOW, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(here, z, LOW)


@triton.jit
def _convex(x):
    """exp(-x) - 1 + x for |x| < 1/4, to float32's precision of itself."""
    return x * x * (0.5 - x * (1.0 / 6 - x * (1.0 / 24 - x * (1.0 / 120 - x * (1.0 / 720)))))


@triton.jit
def _moved(e, a, b, t, top, other_top, new_top, new_other_top):
    """Sums of e, e x, e (exp(-x) - 1 + x) and t from one pair of maxima to another, which is not below it."""
    shift = (new_top - new_other_top) - (top - other_top)  # x becomes x - shift
    factor = tl.exp(top - new_top)
    new_e = factor * e
    new_a = factor * (a - shift * e)
    new_t = tl.exp(other_top - new_other_top) * t
    grown = _convex(-shift)
    near = factor * (b + grown * e + (grown + shift) * (b - a))
    new_b = tl.where(tl.abs(shift) < 0.25, near, new_t - new_e + new_a)
    return new_e, new_a, new_b, new_t


@triton.jit
def _slope(
    z, y, top, other_top, inverse, other_inverse, a, log_ratio, outer, SOFTCAP: tl.constexpr, REVERSE: tl.constexpr
):
    """d KL / d raw logits over kappa: of the own model with REVERSE, else of the other one."""
    x = (z - y) - (top - other_top)
    if REVERSE:
        policy = z
        slope = tl.exp(z - top) * inverse * (x - a)
    else:
        policy = y
        share = tl.exp(y - other_top) * other_inverse
        w = x + log_ratio  # log own - log other
        series = w * (1.0 + w * (0.5 + w * (1.0 / 6 + w * (1.0 / 24 + w * (1.0 / 120)))))
        slope = tl.where(tl.abs(w) < 0.25, -share * series, share - tl.exp(z - top) * inverse)
    if SOFTCAP:
        bent = policy / outer
        slope *= 1.0 - bent * bent
    return slope


@triton.jit
def divergence_rows(
    own, other, stride, own_bias, other_bias, vocab, inner, outer, kappa, start, positions, kl, slope, slope_stride,
    factor, HIGH: tl.constexpr, WIDE: tl.constexpr, SOFTCAP: tl.constexpr, REVERSE: tl.constexpr,
    STORE: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """kl[position] = KL(own || other) of a row of float32 logits (rows, stride); with STORE the row's slope as well.

    Statistics are kept per column of a tile, HIGH columns of the vocabulary to one, so that no thread waits for another
    while it reads. `slope` may be the far half of the policy's own row, in half precision: the second look goes from
    the row's end to its beginning, where what is written lies at 2 stride + 2 column bytes and what is not yet read
    below 4 column bytes. It begins where the first look ended, with what is still in L2.
    DIVIDE: slopes are divided by the row's largest. factor: kappa, times that.
    """
    row = tl.program_id(0).to(tl.int64)
    place = start + row
    if positions is not None:
        place = tl.load(positions + place)
    own += row * stride
    other += row * stride
    tile = tl.arange(0, HIGH)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    tiles = tl.cdiv(vocab, HIGH * WIDE)

    top, other_top = tl.full([WIDE], LOW, tl.float32), tl.full([WIDE], LOW, tl.float32)
    e_sum, a_sum = tl.zeros([WIDE], tl.float32), tl.zeros([WIDE], tl.float32)
    b_sum, t_sum = tl.zeros([WIDE], tl.float32), tl.zeros([WIDE], tl.float32)
    for i in range(0, tiles):
        cols = i * (HIGH * WIDE) + tile
        z = _logits(_load(own, cols, vocab), own_bias, cols, vocab, inner, outer, SOFTCAP)
        y = _logits(_load(other, cols, vocab), other_bias, cols, vocab, inner, outer, SOFTCAP)
        new_top, new_other_top = tl.maximum(top, tl.max(z, 0)), tl.maximum(other_top, tl.max(y, 0))
        e_sum, a_sum, b_sum, t_sum = _moved(e_sum, a_sum, b_sum, t_sum, top, other_top, new_top, new_other_top)
        top, other_top = new_top, new_other_top
        x = (z - y) - (top - other_top)[None, :]
        e, t = tl.exp(z - top[None, :]), tl.exp(y - other_top[None, :])
        ex = e * x
        e_sum += tl.sum(e, 0)
        t_sum += tl.sum(t, 0)
        a_sum += tl.sum(ex, 0)
        b_sum += tl.sum(tl.where(tl.abs(x) < 0.25, e * _convex(x), t - e + ex), 0)

    new_top, new_other_top = tl.max(top, 0), tl.max(other_top, 0)
    e_sum, a_sum, b_sum, t_sum = _moved(e_sum, a_sum, b_sum, t_sum, top, other_top, new_top, new_other_top)
    e_total, t_total = tl.sum(e_sum, 0), tl.sum(t_sum, 0)
    a, b = tl.sum(a_sum, 0) / e_total, tl.sum(b_sum, 0) / e_total
    r = b - a  # t_total / e_total - 1
    series = r * r * (0.5 - r * (1.0 / 3 - r * (0.25 - r * (0.2 - r * (1.0 / 6 - r * (1.0 / 7))))))
    near = b - tl.where(tl.abs(r) < 0.05, series, r - tl.log(tl.maximum(1.0 + r, 1e-30)))
    value = tl.where(b < 0.5, near, a + (tl.log(t_total) - tl.log(e_total)))
    value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if kl is not None:
        tl.store(kl + place, value)

    if STORE:
        log_ratio = value - a
        inverse, other_inverse = 1.0 / e_total, 1.0 / t_total
        scale = 1.0
        line = tl.arange(0, HIGH * WIDE)
        if DIVIDE:
            largest = tl.zeros([HIGH * WIDE], tl.float32)
            for i in range(0, tiles):
                cols = i * (HIGH * WIDE) + line
                z = _logits(_load(own, cols, vocab), own_bias, cols, vocab, inner, outer, SOFTCAP)
                y = _logits(_load(other, cols, vocab), other_bias, cols, vocab, inner, outer, SOFTCAP)
                d = _slope(
                    z, y, new_top, new_other_top, inverse, other_inverse, a, log_ratio, outer, SOFTCAP, REVERSE
                )  # fmt: skip
                largest = tl.maximum(largest, tl.where(cols < vocab, tl.abs(d), 0.0))
            most = tl.maximum(tl.max(largest, 0), 1e-30)
            scale = 1.0 / most
            kappa *= most
        tl.store(factor + row, kappa)
        slope += row * slope_stride
        cols = (tiles - 1) * (HIGH * WIDE) + line
        raw, other_raw = _load(own, cols, vocab), _load(other, cols, vocab)
        for _ in range(0, tiles):
            next_cols = cols - HIGH * WIDE
            next_raw, next_other_raw = _load(own, next_cols, vocab), _load(other, next_cols, vocab)
            z = _logits(raw, own_bias, cols, vocab, inner, outer, SOFTCAP)
            y = _logits(other_raw, other_bias, cols, vocab, inner, outer, SOFTCAP)
            d = _slope(z, y, new_top, new_other_top, inverse, other_inverse, a, log_ratio, outer, SOFTCAP, REVERSE)
            if DIVIDE:
                d *= scale
            tl.debug_barrier()  # every thread has read its part of this tile
            tl.store(slope + cols, d.to(slope.dtype.element_ty), mask=cols < vocab)
            cols, raw, other_raw = next_cols, next_raw, next_other_raw


@triton.jit
def write_rows(mixture, factor, grad, start, positions, out, size, width, BLOCK: tl.constexpr):
    """out[position] = factor mixture, times grad[position] where given; with `size` over its largest, stored there."""
    row = tl.program_id(0).to(tl.int64)
    place = start + row
    if positions is not None:
        place = tl.load(positions + place)
    scale = tl.load(factor + row)
    if grad is not None:
        scale *= tl.load(grad + place)
    mixture += row * width
    if size is not None:
        peak = tl.zeros([BLOCK], tl.float32)
        for first in range(0, width, BLOCK):
            k = first + tl.arange(0, BLOCK)
            value = tl.abs(tl.load(mixture + k, mask=k < width, other=0.0))
            peak = tl.maximum(peak, tl.where(value == value, value, float("inf")))
        largest = tl.max(peak, 0)
        # NaN and infinity must not turn into finite rows.
        tl.store(size + place, tl.where(largest == float("inf"), float("nan"), scale * largest))
        scale = tl.where((largest > 0.0) & (largest < float("inf")), 1.0 / tl.maximum(largest, 1e-38), 0.0)
    for first in range(0, width, BLOCK):
        k = first + tl.arange(0, BLOCK)
        value = tl.load(mixture + k, mask=k < width, other=0.0) * scale
        tl.store(out + place * width + k, value.to(out.dtype.element_ty), mask=k < width)


@triton.jit
def scale_rows_to(v, g, out, width, BLOCK: tl.constexpr):
    """out = v g, row by row; out may be v's memory in another type of the same size."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * width + k
    value = tl.load(v + at, mask=k < width, other=0.0).to(tl.float32) * tl.load(g + row)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=k < width)


@triton.jit
def add_columns(
    total, slope, slope_stride, factor, grad, start, positions, rows, vocab,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """total[v] += sum over rows of factor grad slope[v]."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    value = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, rows, BLOCK_M):
        r = first + tl.arange(0, BLOCK_M)
        live = r < rows
        place = start + r.to(tl.int64)
        if positions is not None:
            place = tl.load(positions + place, mask=live, other=0)
        share = tl.load(factor + r, mask=live, other=0.0) * tl.load(grad + place, mask=live, other=0.0)
        at = slope + r.to(tl.int64)[:, None] * slope_stride + cols[None, :]
        d = tl.load(at, mask=live[:, None] & (cols < vocab)[None, :], other=0.0).to(tl.float32)
        value += tl.sum(d * share[:, None], 0)
    here = cols < vocab
    tl.store(total + cols, tl.load(total + cols, mask=here, other=0.0) + value, mask=here)
