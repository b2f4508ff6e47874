"""Log-probs, ratios and logits far from anything that training should see: finite where the value is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import losses
from tests import oracles
from tests.losses.common import BACKENDS, VARIANTS, call, close, finite, oracle, oracle_options, own_params
from tests.strategies import PROFILE, generator, make_case

both = pytest.mark.parametrize("backend", BACKENDS)
every = pytest.mark.parametrize("variant", VARIANTS)
F64 = torch.float64


@every
@PROFILE
@given(seed=st.integers(0, 10**6), far=st.sampled_from((30.0, 200.0, 300.0)))
def test_extreme_log_probs_in_float64(variant, seed, far):
    """Log-ratios of hundreds of nats: exact in float64, where nothing overflows."""
    case = make_case(seed, batch=3, length=4, mask_kind="holes")
    rng = generator(seed)
    n, o, p = (-far * torch.rand(3, 4, generator=rng, dtype=F64) for _ in range(3))
    case = case.rows(slice(None), old=o, ref=p)
    n.requires_grad_(True)
    out = losses.policy_loss(n, case.inputs(), variant, **own_params(variant))
    out.loss.backward()
    m = n.detach().clone().requires_grad_(True)
    rows = [m[b][case.mask[b]] for b in range(3)]
    want = oracles.loss_of_rows(oracles.DEFINITIONS[variant], rows, case.batch, oracle_options(variant, case))
    want.backward()
    torch.testing.assert_close(out.loss, want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(n.grad, m.grad, rtol=1e-9, atol=1e-12)


@both
@every
@pytest.mark.parametrize("trained", [("hidden",), ("hidden", "weight", "bias")], ids=["frozen", "trained"])
def test_an_impossible_reference_or_sampler_overflows_nothing(variant, backend, trained):
    """p and o far below or above n, where the value is finite: exp underflows, the cap holds, the clip holds."""
    case = make_case(43, batch=2, length=3, mask_kind="full").cast(torch.float32)
    n = case.log_probs.float()
    for changes in (
        {"ref": n - 1e4},
        {"old": n + 1e4},
        {"old": n, "sampling": n - 1e4},  # the weight overflows: capped
        {"old": n, "sampling": n + 1e4},
    ):
        got = call(variant, case.rows(slice(None), **changes), backend, trained=trained)
        assert finite(got), changes.keys()
    masked = call(
        variant, case.rows(slice(None), old=n, sampling=n - 1e4), backend, trained=trained,
        sampling_mode="sequence_mask", beta=0.0,
    )  # fmt: skip
    assert finite(masked) and float(masked.loss) == 0.0 and not masked.hidden.any()


@every
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_ratio_past_float32_is_clipped_where_the_advantage_lets_it(variant, advantage):
    """exp(n - o) = inf with A = 1 is clipped to 1.2, and with A = 0 it is worth 0, not inf x 0."""
    n = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    inputs = losses.LossInputs(
        torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2), torch.tensor([advantage]), torch.full((1, 2), -120.0)
    )
    out = losses.policy_loss(n, inputs, variant, beta=0.0, epsilon=0.2, **own_params(variant))
    out.loss.backward()
    assert torch.isfinite(out.loss) and torch.isfinite(n.grad).all()
    assert not n.grad.any()
    if advantage == 0.0:
        assert float(out.loss.detach()) == 0.0


@both
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
def test_extreme_logits(backend, dtype):
    """Logits of +-10,000: log-probs and entropy stay finite, never positive, and match float64."""
    hidden = torch.tensor([[[100.0, 0.0], [-100.0, 1.0], [0.0, 100.0]]], dtype=dtype)
    weight = torch.tensor([[100.0, 0.0], [-100.0, 1.0], [0.0, 99.0]], dtype=dtype)
    case = make_case(44, batch=1, length=3, width=2, vocab=3, mask_kind="full", old=False).cast(dtype)
    case = case.rows(
        slice(None), hidden=hidden, weight=weight, ids=torch.tensor([[1, 0, 2]]), ref=None, options={"beta": 0.0}
    )
    got, want = call("reference", case, backend), oracle("reference", case)
    assert finite(got) and (got.per_token_logps <= 0).all()
    close(got.per_token_logps.double(), want.per_token_logps, 1e-6, "log-probs")


@both
@PROFILE
@given(seed=st.integers(0, 10**6), spread=st.sampled_from((1.0, 20.0, 100.0)))
def test_log_probs_are_never_positive(backend, seed, spread):
    """Also where one token has all the probability and rounding decides."""
    for dtype in (F64, torch.float32, torch.bfloat16, torch.float16):
        case = make_case(seed, batch=2, length=8, width=8, vocab=16, spread=spread).cast(dtype)
        best = (case.hidden.double() @ case.weight.double().T).argmax(-1)
        assert (losses.per_token_logps(case.hidden, case.weight, best, backend=backend) <= 0).all()
