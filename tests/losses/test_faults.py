"""Faults seen in other GRPO implementations: each kind as a property, and its numbers as one fixed case.

The gradient-free faults of group advantages and of rollouts live with the trainer's tests.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import losses
from tests import oracles
from tests.losses.common import (
    BACKENDS,
    VARIANTS,
    call,
    close,
    error,
    finite,
    identical,
    oracle,
    own_params,
)
from tests.strategies import HALF, PROFILE, cases, generator, make_case

both = pytest.mark.parametrize("backend", BACKENDS)
every = pytest.mark.parametrize("variant", VARIANTS)
half = pytest.mark.parametrize("dtype", HALF, ids=str)
F64 = torch.float64

# --------------------------------------------------------------- detach, and the gradient of the KL term in expectation

SURROGATE = -torch.tensor([0.3150, -0.3100, -0.0050], dtype=F64)
EXPECTED_KL = {
    "reference": "k3",
    "no_detach": "k3",
    "full_reverse_kl": "exp(n) k3",
    "forward_kl": "exp(p) (p-n)",
    "dapo": "k3",
    "dr_grpo": "k3",
    "gspo": "k3",
}


def expected(variant: str, backend: str, sampler: torch.Tensor, old: bool, **params: float) -> torch.Tensor:
    """Expected gradient in the logits: each answer once, as its own batch, weighted with its probability."""
    total = torch.zeros(3, dtype=F64)
    constant = {"max_completion_length": 1} if "max_completion_length" in own_params(variant) else {}
    params = own_params(variant) | constant | params
    for y in range(3):
        z = oracles.Q.log().reshape(1, 1, 3).requires_grad_(True)
        inputs = losses.LossInputs(
            torch.tensor([[y]]),
            torch.ones(1, 1),
            oracles.ADVANTAGES[y : y + 1],
            old_per_token_logps=sampler[y].log().reshape(1, 1) if old else None,
            ref_per_token_logps=oracles.REFERENCE[y].log().reshape(1, 1),
        )
        out = losses.linear_policy_loss(z, torch.eye(3, dtype=F64), inputs, variant, backend=backend, **params)
        out.loss.backward()
        total += sampler[y] * z.grad.flatten()
    return total


@both
@every
@pytest.mark.parametrize("old", [False, True])
def test_row_1_the_surrogate_trains(variant, backend, old):
    got = expected(variant, backend, oracles.Q, old, beta=0.0)
    if variant == "no_detach":
        assert torch.equal(got, torch.zeros(3, dtype=F64))
        return
    close(got, -oracles.policy_gradient(), 1e-12, variant)
    torch.testing.assert_close(got, SURROGATE, rtol=0, atol=5e-5)


@both
@every
def test_row_1_off_policy_surrogate(variant, backend):
    got = expected(variant, backend, oracles.SAMPLER, True, beta=0.0)
    close(got, torch.zeros(3, dtype=F64) if variant == "no_detach" else -oracles.policy_gradient(), 1e-12, variant)


@both
@every
@pytest.mark.parametrize("beta", [0.04, 1.0])
@pytest.mark.parametrize("off_policy", [False, True])
def test_row_2_what_the_kl_term_trains(variant, backend, beta, off_policy):
    sampler = oracles.SAMPLER if off_policy else oracles.Q
    whole = expected(variant, backend, sampler, True, beta=beta)
    alone = (whole - expected(variant, backend, sampler, True, beta=0.0)) / beta
    close(alone, oracles.expected_gradient(oracles.SAMPLED_TERMS[EXPECTED_KL[variant]], sampler), 1e-12, variant)


@both
@PROFILE
@given(case=cases())
def test_row_1_no_detach_ignores_the_advantages(backend, case):
    """Whatever the advantages, old log-probs and clipping: the gradient is that of the KL term."""
    case = case.rows(slice(None), sampling=None)
    got = call("no_detach", case, backend)
    without = call("no_detach", case.rows(slice(None), advantages=torch.zeros_like(case.advantages)), backend)
    close(got.hidden, without.hidden, 1e-12, "hidden")
    close(got.weight, without.weight, 1e-12, "weight")


@both
@pytest.mark.parametrize("dtype", [F64, torch.float32, *HALF], ids=str)
def test_no_detach_has_no_gradient_at_all_while_the_policy_is_the_reference(backend, dtype):
    """|n - p| is 0 to the bit when both come from `per_token_logps`; 1e-7 would be enough for Adam to move."""
    case = make_case(41, batch=4, length=9, width=8, vocab=33, mask_kind="right", bias=True).cast(dtype)
    p = losses.per_token_logps(
        case.hidden, case.weight, case.ids, completion_mask=case.mask, **case.head_kwargs, backend=backend
    ).detach()
    for trained in (("hidden",), ("hidden", "weight", "bias")):
        got = call(
            "no_detach", case, backend, trained=trained, beta=1.0,
            inputs=case.inputs(ref_per_token_logps=p, old_per_token_logps=None),
        )  # fmt: skip
        assert all(not x.any() for x in (got.hidden, got.weight, got.bias) if x is not None)
        assert float(got.metrics["kl"].sum) == 0.0


# ---------------------------------------------------------------------------------------------- nothing to learn from


@both
@every
@PROFILE
@given(case=cases(mask_kind="none"), dtype=st.sampled_from((F64, torch.float32, torch.bfloat16, torch.float16)))
def test_row_3_everything_masked(variant, backend, case, dtype):
    for trained in (("hidden",), ("hidden", "weight", "bias")):
        got = call(variant, case.cast(dtype), backend, trained=trained)
        assert float(got.loss) == 0.0
        assert not got.hidden.any()
        assert got.weight is None or not got.weight.any()
        assert got.bias is None or not got.bias.any()
        assert finite(got)
        assert all(float(m.mean) == 0.0 for m in got.metrics.values())


@every
def test_row_3_everything_masked_from_log_probs(variant):
    case = make_case(42, mask_kind="none", sampling=True)
    n = torch.full(case.mask.shape, float("nan"), requires_grad=True)
    out = losses.policy_loss(n, case.inputs(), variant, **own_params(variant))
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0 and not n.grad.any()
    assert all(torch.isfinite(m.mean) for m in out.metrics.values())


@both
@every
@PROFILE
@given(case=cases(batch=5, mask_kind="empty_rows"))
def test_rows_3_and_16_completions_masked_out_leave_numerator_and_denominator(variant, backend, case):
    """A truncated completion that is masked out counts nowhere: the loss is that of the others alone."""
    kept = case.mask.any(-1)
    got, alone = call(variant, case, backend), call(variant, case.rows(kept), backend)
    close(got.loss, alone.loss, 1e-12, "loss")
    close(got.hidden[kept], alone.hidden, 1e-12, "hidden")
    close(got.weight, alone.weight, 1e-12, "weight")
    assert not got.hidden[~kept].any()
    assert set(got.metrics) == set(alone.metrics)
    for name, metric in alone.metrics.items():
        close(got.metrics[name].mean.double(), metric.mean.double(), 1e-6, name)


# ------------------------------------------------------------------------------------------------------ masked overflow


@every
@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
def test_row_4_masked_overflow(variant, dtype):
    n = torch.tensor([[0.0, -1.0]], dtype=dtype, requires_grad=True)
    inputs = losses.LossInputs(
        torch.zeros(1, 2, dtype=torch.long),
        torch.tensor([[0, 1]]),
        torch.ones(1, dtype=dtype),
        old_per_token_logps=torch.tensor([[-200.0, -1.0]], dtype=dtype),
        ref_per_token_logps=torch.tensor([[200.0, -1.0]], dtype=dtype),
        sampling_per_token_logps=torch.tensor([[-900.0, -1.0]], dtype=dtype),
    )
    params = {"max_completion_length": 1} if own_params(variant) else {}
    out = losses.policy_loss(n, inputs, variant, beta=0.04, **params)
    out.loss.backward()
    kl = {"forward_kl": -0.04 * torch.exp(torch.tensor(-1.0, dtype=F64))}.get(variant, torch.tensor(0.0, dtype=F64))
    slope = 0.0 if variant == "no_detach" else -1.0
    close(out.loss.detach().double(), torch.tensor(-1.0, dtype=F64), 1e-6, "loss")
    close(n.grad.double(), torch.stack([torch.tensor(0.0, dtype=F64), slope + kl])[None], 1e-6, "gradient")
    assert n.grad[0, 0] == 0
    assert all(torch.isfinite(m.mean) for m in out.metrics.values())


# ------------------------------------------------------------------------------------------------- split invariance


@every
def test_row_5_splits_by_hand(variant):
    """Lengths 1, 5, 0 and 3 in four micro-batches of one: a mean of means would be off by far."""
    case = make_case(45, batch=4, length=5, mask_kind="full")
    mask = torch.arange(5)[None] < torch.tensor([1, 5, 0, 3])[:, None]
    case = case.rows(slice(None), mask=mask)
    whole = call(variant, case, "chunked")
    parts = [call(variant, case.rows(slice(i, i + 1), num_items=9, num_sequences=3), "chunked") for i in range(4)]
    close(sum(part.loss for part in parts), whole.loss, 1e-12, "loss")
    close(torch.cat([part.hidden for part in parts]), whole.hidden, 1e-12, "hidden")
    close(sum(part.weight for part in parts), whole.weight, 1e-12, "weight")
    mean_of_means = sum(call(variant, case.rows(slice(i, i + 1)), "chunked").loss for i in (0, 1, 3)) / 4
    assert abs(float(mean_of_means - whole.loss)) > 1e-3 * abs(float(whole.loss))


# ---------------------------------------------------------------------------------------------------------- temperature


@both
def test_row_6_temperature(backend):
    hidden = torch.eye(2, dtype=F64)[None, :1]
    weight = torch.tensor([[2.0, 0.0], [0.0, 0.0]], dtype=F64)
    ids = torch.zeros(1, 1, dtype=torch.long)
    got = losses.per_token_logps(hidden, weight, ids, temperature=0.5, backend=backend)
    assert float(got) == pytest.approx(-0.01815, abs=5e-6)
    out = losses.linear_policy_loss(
        hidden, weight, losses.LossInputs(ids, ids + 1, torch.ones(1)), beta=0.0, temperature=0.5, backend=backend
    )
    assert float(out.per_token_logps) == pytest.approx(-0.01815, abs=5e-6)


# ------------------------------------------------------------------------------------------- half-precision weights


@both
@half
@pytest.mark.parametrize("chunks", [1, 16, 64])
def test_row_8_weight_gradient_over_many_chunks(backend, dtype, chunks):
    """One rounding at the end, however many chunks there are."""
    size = 16
    case = make_case(46, batch=4, length=chunks * size // 4, width=32, vocab=64, mask_kind="full", bias=True).cast(
        dtype
    )
    for variant in ("reference", "gspo"):  # gradients formed in the forward, and in a second pass
        got = call(variant, case, backend, chunk_size=size)
        want = oracle(variant, case)
        limit = 2e-3 if dtype == torch.bfloat16 else 3e-4
        assert error(got.weight, want.weight) <= limit
        assert error(got.bias, want.bias) <= limit


@both
@half
@pytest.mark.parametrize("largest", [5.0, 40.0])
def test_row_9_log_probs_of_half_precision_inputs(backend, dtype, largest):
    rng = generator(47)
    hidden = torch.randn(2, 64, 64, generator=rng).to(dtype)
    weight = torch.randn(128, 64, generator=rng)
    weight = (weight * largest / (hidden.float() @ weight.T).abs().max()).to(dtype)
    logits = hidden.double() @ weight.double().T
    assert logits.abs().max() > 0.9 * largest
    for ids in (logits.argmax(-1), torch.randint(0, 128, (2, 64), generator=rng), logits.argmin(-1)):
        exact = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]
        got = losses.per_token_logps(hidden, weight, ids, backend=backend)
        assert got.dtype == torch.float32
        assert (got <= 0).all()
        assert (got - exact).abs().max() < 1e-3


# ------------------------------------------------------------------------------------------------------ pooled metrics


@pytest.mark.parametrize("variant", [v for v in VARIANTS if losses.get(v).ratio_level == "token" and v != "no_detach"])
def test_row_13_clip_fractions_are_pooled_by_tokens(variant):
    """3 of 12 and 3 of 4 tokens clipped: 6 of 16, not the mean of .25 and .75."""

    def clipped(tokens: int) -> losses.Metric:
        n = torch.zeros(1, tokens)
        n[0, :3] = 1.0  # ratio e > 1.2 with A > 0
        inputs = losses.LossInputs(
            torch.zeros(1, tokens, dtype=torch.long), torch.ones(1, tokens), torch.ones(1), torch.zeros(1, tokens)
        )
        out = losses.policy_loss(n, inputs, variant, beta=0.0, epsilon=0.2, **own_params(variant))
        assert float(out.metrics["clip_ratio/low_mean"].mean) == 0
        assert float(out.metrics["clip_ratio/region_mean"].mean) == 3 / tokens
        return out.metrics["clip_ratio/high_mean"]

    twelve, four = clipped(12), clipped(4)
    assert (float(twelve.mean), float(four.mean)) == (0.25, 0.75)
    assert float((twelve + four).mean) == 0.375
    assert float((four + twelve).mean) == 0.375


def test_an_empty_metric_pools_as_nothing():
    empty = losses.Metric(torch.tensor(0.0), torch.tensor(0.0))
    some = losses.Metric(torch.tensor(3.0), torch.tensor(4.0))
    assert float(empty.mean) == 0.0
    assert float((empty + some).mean) == 0.75


@both
def test_row_16_truncated_completions(backend):
    """Two completions of 4 tokens, one truncated: masked out, the mean is the other's alone, and not half of it."""
    case = make_case(48, batch=2, length=4, mask_kind="full")
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    for variant in VARIANTS:
        got = call(variant, case.rows(slice(None), mask=mask), backend)
        alone = call(variant, case.rows(slice(0, 1)), backend)
        close(got.loss, alone.loss, 1e-12, variant)
        identical(call(variant, case.rows(slice(None), mask=mask), backend), got)
