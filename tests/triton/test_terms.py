"""A variant's loss, derivative and metrics from the kernels against the same in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import losses
from losses import policy
from losses.backends import triton_terms
from tests.losses.common import own_params
from tests.strategies import PROFILE, cases, make_case
from tests.triton.common import DEVICE, VARIANTS, place


def both(variant, case, entropy=None):
    n = case.log_probs.float().to(DEVICE)
    case = place(case.cast(torch.float32))
    chosen = losses.get(variant)
    params = chosen.resolve(case.options | own_params(variant))
    return (
        triton_terms.evaluate(chosen, n, case.inputs(), params, entropy),
        policy.evaluate(chosen, n, case.inputs(), params, entropy),
    )


def compare(got, want):
    for name in ("loss", "loss_surrogate", "loss_kl", "grad", "grad_surrogate", "grad_kl"):
        mine, torchs = getattr(got, name), getattr(want, name)
        assert (mine is None) == (torchs is None), name
        if mine is not None:
            torch.testing.assert_close(
                mine, torchs.expand_as(mine), rtol=2e-5, atol=2e-6, msg=lambda t, n=name: f"{n}: {t}"
            )
    assert got.metrics.keys() == want.metrics.keys()
    for name, metric in want.metrics.items():
        torch.testing.assert_close(
            got.metrics[name].sum, metric.sum, rtol=2e-5, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )
        assert got.metrics[name].count == metric.count


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant):
    case = make_case(41, batch=4, length=9, mask_kind="empty_rows", sampling=True, epsilon=0.1, epsilon_high=0.2)
    got, want = both(variant, case, torch.rand(4, 9, device=DEVICE))
    if losses.get(variant).token_level and losses.get(variant).shape_advantage is None:
        compare(got, want)
    else:
        assert got is None


@settings(PROFILE, max_examples=25)
@given(case=cases(), variant=st.sampled_from(("reference", "dapo", "dr_grpo", "forward_kl")), counts=st.integers(0, 3))
def test_any_structure(case, variant, counts):
    import dataclasses

    case = dataclasses.replace(case, num_items=(None, 40)[counts % 2], num_sequences=(None, 9)[counts // 2])
    compare(*both(variant, case))


def test_masked_tokens_may_hold_anything():
    case = make_case(42, batch=2, length=5, mask_kind="right")
    empty = ~case.mask
    dirty = {
        "old_per_token_logps": torch.where(empty, -torch.inf, case.old),
        "ref_per_token_logps": torch.where(empty, torch.nan, case.ref),
    }
    n = torch.where(case.mask, case.log_probs.float(), -1e30).to(DEVICE)
    case = place(case.cast(torch.float32))
    inputs = case.inputs(**{k: v.float().to(DEVICE) for k, v in dirty.items()})
    got = triton_terms.evaluate(losses.get("reference"), n, inputs, losses.get("reference").resolve({}))
    want = triton_terms.evaluate(losses.get("reference"), n, case.inputs(), losses.get("reference").resolve({}))
    assert torch.equal(got.grad, want.grad) and torch.equal(got.loss, want.loss) and torch.isfinite(got.loss)
