"""A token-level variant's loss, derivative and metrics in three launches, which on (B, T) cost more than the work.

The same numbers as `losses.policy.evaluate` gives, from the same bodies.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from losses import policy
from losses.backends.triton_bodies import arguments, device_function
from losses.spec import LossInputs, Metric, Variant, body_params

AGGREGATIONS = {"sequence_mean": 0, "token_mean": 1, "constant": 2, "sequence_sum": 3}
# Rows of the sums. The first three are the losses and the number of tokens; the rest are metrics.
SURROGATE_LOSS, KL_LOSS, COUNT, SAMPLING, LOW, HIGH, REGION, KL_OWN, KL_K3, ENTROPY = range(10)
METRICS = {
    SAMPLING: "sampling/importance_sampling_ratio/mean", LOW: "clip_ratio/low_mean", HIGH: "clip_ratio/high_mean",
    REGION: "clip_ratio/region_mean", KL_OWN: "kl_own", KL_K3: "kl", ENTROPY: "entropy",
}  # fmt: skip


@triton.jit
def completion_sums(mask, n, old, mu, lengths, log_ratios, length, BLOCK: tl.constexpr):
    """Per completion the unmasked tokens, and with mu the sum of o - mu over them."""
    row = tl.program_id(0)
    count = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, length, BLOCK):
        t = first + tl.arange(0, BLOCK)
        at = row.to(tl.int64) * length + t
        live = tl.load(mask + at, mask=t < length, other=0) != 0
        count += live.to(tl.float32)
        if mu is not None:
            o = tl.load((n if old is None else old) + at, mask=live, other=0.0).to(tl.float32)
            total += tl.where(live, o - tl.load(mu + at, mask=live, other=0.0).to(tl.float32), 0.0)
    tl.store(lengths + row, tl.sum(count, 0))
    if mu is not None:
        tl.store(log_ratios + row, tl.sum(total, 0))


@triton.jit
def token_terms(
    mask, n, old, ref, mu, advantages, entropy, lengths, log_ratios, items, sequences, longest, completions, length,
    grad, grad_surrogate, grad_kl, sums, programs, beta, low, high, cap, surrogate_args, kl_args,
    SURROGATE: tl.constexpr, KL: tl.constexpr, AGGREGATION: tl.constexpr, PER_TOKEN: tl.constexpr, CLIPS: tl.constexpr,
    BY_SEQUENCE: tl.constexpr, TRUNCATE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Derivatives, and this program's part of every sum."""
    row = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * length + t
    live = tl.load(mask + at, mask=t < length, other=0) != 0

    all_items = 0.0
    all_sequences = 0.0
    for first in range(0, completions, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        counts = tl.load(lengths + b, mask=b < completions, other=0.0)
        all_items += tl.sum(counts, 0)
        all_sequences += tl.sum((counts > 0).to(tl.float32), 0)
    if items is not None:
        all_items = tl.load(items).to(tl.float32)
    if sequences is not None:
        all_sequences = tl.load(sequences).to(tl.float32)
    if AGGREGATION == 1:
        weight = 1.0 / tl.maximum(all_items, 1.0)
    else:
        weight = 1.0 / tl.maximum(all_sequences, 1.0)
        if AGGREGATION == 0:
            weight = 1.0 / tl.maximum(tl.load(lengths + row), 1.0) * weight
        if AGGREGATION == 2:
            weight = weight / longest

    x = tl.load(n + at, mask=live, other=0.0).to(tl.float32)
    o = x
    if old is not None:
        o = tl.load(old + at, mask=live, other=0.0).to(tl.float32)
    a = tl.load(advantages + (at if PER_TOKEN else row + t * 0), mask=live, other=0.0).to(tl.float32)
    place = sums + row * tl.num_programs(1) + tl.program_id(1)
    tl.store(place + COUNT_ROW * programs, tl.sum(live.to(tl.float32), 0))

    value, slope = SURROGATE(x, o, a, *surrogate_args)
    if mu is not None:
        if BY_SEQUENCE:
            ratio = tl.exp(tl.load(log_ratios + row)) + tl.zeros_like(x)
        else:
            ratio = tl.exp(tl.where(live, o - tl.load(mu + at, mask=live, other=0.0).to(tl.float32), 0.0))
        ratio = tl.minimum(ratio, cap) if TRUNCATE else tl.where(ratio <= cap, ratio, 0.0)
        value *= ratio
        slope *= ratio
        tl.store(place + SAMPLING_ROW * programs, tl.sum(tl.where(live, ratio, 0.0), 0))
    value = tl.where(live, weight * value, 0.0)
    slope = tl.where(live, weight * slope, 0.0)
    tl.store(place, tl.sum(value, 0))
    tl.store(grad_surrogate + at, slope, mask=t < length)
    if CLIPS:
        r = tl.exp(x - o)
        below = live & (r < low) & (a < 0)
        above = live & (r > high) & (a > 0)
        tl.store(place + LOW_ROW * programs, tl.sum(below.to(tl.float32), 0))
        tl.store(place + HIGH_ROW * programs, tl.sum(above.to(tl.float32), 0))
        tl.store(place + REGION_ROW * programs, tl.sum((below | above).to(tl.float32), 0))
    if ref is not None:
        p = tl.load(ref + at, mask=live, other=0.0).to(tl.float32)
        d = tl.where(live, p - x, 0.0)
        tl.store(place + K3_ROW * programs, tl.sum(tl.exp(d) - d - 1.0, 0))
        if KL is not None:
            kl, slope_kl = KL(x, p, o, *kl_args)
            kl = tl.where(live, kl, 0.0)
            slope_kl = tl.where(live, weight * slope_kl, 0.0)
            tl.store(place + KL_OWN_ROW * programs, tl.sum(kl, 0))
            tl.store(place + programs, tl.sum(weight * kl, 0))
            tl.store(grad_kl + at, slope_kl, mask=t < length)
            slope += beta * slope_kl
    tl.store(grad + at, slope, mask=t < length)
    if entropy is not None:
        tl.store(place + ENTROPY_ROW * programs, tl.sum(tl.load(entropy + at, mask=live, other=0.0), 0))


COUNT_ROW = tl.constexpr(COUNT)
SAMPLING_ROW = tl.constexpr(SAMPLING)
LOW_ROW = tl.constexpr(LOW)
HIGH_ROW = tl.constexpr(HIGH)
REGION_ROW = tl.constexpr(REGION)
KL_OWN_ROW = tl.constexpr(KL_OWN)
K3_ROW = tl.constexpr(KL_K3)
ENTROPY_ROW = tl.constexpr(ENTROPY)


@triton.jit
def add_up(sums, programs, out, beta, rows, BLOCK: tl.constexpr):
    """out[i] = the sum of row i; the last entry of out = the whole loss."""
    i = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, programs, BLOCK):
        k = first + tl.arange(0, BLOCK)
        value = tl.load(sums + i * programs + k, mask=k < programs, other=0.0)
        if i == 0:
            # The row of the KL term comes next.
            value += beta * tl.load(sums + programs + k, mask=k < programs, other=0.0)
            total += value
        else:
            total += value
    if i == 0:
        tl.store(out + rows, tl.sum(total, 0))
        value = tl.zeros([BLOCK], tl.float32)
        for first in range(0, programs, BLOCK):
            k = first + tl.arange(0, BLOCK)
            value += tl.load(sums + k, mask=k < programs, other=0.0)
        tl.store(out, tl.sum(value, 0))
    else:
        tl.store(out + i, tl.sum(total, 0))


def evaluate(
    variant: Variant, n: Tensor, inputs: LossInputs, params: dict[str, Any], entropy: Tensor | None = None
) -> policy.Terms | None:
    """As `policy.evaluate` for n (B, T) float32, or None where the variant is no function of single tokens."""
    if not variant.token_level or variant.shape_advantage is not None or n.numel() == 0:
        return None
    completions, length = n.shape
    kl = variant.kl if params["beta"] > 0 else None
    mu, old, ref = inputs.sampling_per_token_logps, inputs.old_per_token_logps, inputs.ref_per_token_logps
    level, action = params["sampling_mode"].split("_")
    block = min(1024, triton.next_power_of_2(length))
    grid = (completions, triton.cdiv(length, block))
    programs = grid[0] * grid[1]
    sums = torch.zeros(10, programs, device=n.device)
    out = torch.empty(11, device=n.device)
    lengths, log_ratios = torch.empty(2, completions, device=n.device).unbind()
    grad, grad_surrogate = torch.empty_like(n), torch.empty_like(n)
    grad_kl = None if kl is None else torch.empty_like(n)
    # A bool is a byte; the kernels ask for not 0.
    mask = (
        inputs.completion_mask.view(torch.int8)
        if inputs.completion_mask.dtype == torch.bool
        else inputs.completion_mask
    )
    given = [
        None if x is None else x.detach().contiguous() for x in (mask, n, old, ref, mu, inputs.advantages, entropy)
    ]
    counts = [
        None if x is None else torch.as_tensor(x, dtype=torch.float32).to(n.device, non_blocking=True)
        for x in (inputs.num_items_in_batch, inputs.num_sequences_in_batch)
    ]
    epsilon, epsilon_high = (params[name] if params[name] is not None else float("inf") for name in EPSILONS)
    with torch.cuda.device(n.device) if n.is_cuda else nullcontext():
        completion_sums[(completions,)](
            given[0], given[1], given[2], given[4], lengths, log_ratios, length, BLOCK=block
        )
        token_terms[grid](
            *given, lengths, log_ratios, *counts, float(params.get("max_completion_length") or 1.0), completions,
            length, grad, grad_surrogate, grad_kl, sums, programs, params["beta"], 1.0 - epsilon, 1.0 + epsilon_high,
            params["sampling_clip_max"], arguments(variant.surrogate, params),
            () if kl is None else arguments(kl, params),
            SURROGATE=device_function(variant.surrogate), KL=None if kl is None else device_function(kl),
            AGGREGATION=AGGREGATIONS[variant.aggregation], PER_TOKEN=inputs.advantages.dim() == 2,
            CLIPS="epsilon" in body_params(variant.surrogate), BY_SEQUENCE=level == "sequence",
            TRUNCATE=action == "truncate", BLOCK_B=min(256, triton.next_power_of_2(completions)), BLOCK=block,
        )  # fmt: skip
        add_up[(10,)](sums, programs, out, params["beta"] if kl is not None else 0.0, 10, BLOCK=256)
    values = out.unbind()
    left_out = {SAMPLING: mu is None, KL_OWN: kl is None, KL_K3: ref is None, ENTROPY: entropy is None}
    metrics = {
        name: Metric(values[i], values[COUNT]) for i, name in METRICS.items() if not left_out.get(i, False)
    }  # fmt: skip
    return policy.Terms(
        values[SURROGATE_LOSS], grad_surrogate, None if kl is None else values[KL_LOSS], grad_kl, params["beta"],
        metrics, whole=(values[10], grad),
    )  # fmt: skip


EPSILONS = ("epsilon", "epsilon_high")
