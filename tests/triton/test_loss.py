"""Loss, log-probs and gradients of the kernels against the float64 oracle: variants, dtypes, options, shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

import losses
from tests.losses.common import error, finite, identical, oracle, same
from tests.strategies import PROFILE, cases, make_case
from tests.triton.common import DEVICE, HALF, VARIANTS, place, run

FROZEN, TRAINED = ("hidden",), ("hidden", "weight", "bias")
# Relative error in the Frobenius norm: roundings to the operands' dtype, times a small factor for sums of few terms.
GRADIENT = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
MEDIUM = {"batch": 2, "length": 13, "width": 40, "vocab": 75}


def compare(variant, case, trained, tolerance, **options):
    got, want = run(variant, case, trained=trained, **options), oracle(variant, case)
    assert (got.per_token_logps - want.per_token_logps).abs().max() <= 1e-4
    assert (got.per_token_logps <= 0).all()
    torch.testing.assert_close(got.loss.double(), want.loss.double(), rtol=1e-3, atol=2e-5)
    for name in trained:
        mine, exact = getattr(got, name), getattr(want, name)
        if mine is not None:
            assert torch.isfinite(mine).all()
            assert error(mine, exact) <= tolerance or (mine.double() - exact).norm() <= 1e-6, name
    return got


@pytest.mark.parametrize("trained", [FROZEN, TRAINED], ids=["frozen", "trained"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant, trained):
    compare(variant, make_case(1, mask_kind="holes", bias=True, **MEDIUM).cast(torch.float32), trained, 2e-5)


@pytest.mark.parametrize("dtype", GRADIENT, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "softcap": 2.0, "scale": 2.5, "temperature": 0.7},
        {"width": 37, "vocab": 33, "mask_kind": "full"},
    ],
    ids=["plain", "all options", "odd shape"],
)
def test_every_dtype(dtype, options):
    case = make_case(2, **(MEDIUM | {"mask_kind": "right"} | options)).cast(dtype)
    for trained in (FROZEN, TRAINED):
        compare("reference", case, trained, GRADIENT[dtype])


@settings(PROFILE, max_examples=10)
@given(case=cases(groups=2))
def test_any_structure(case):
    compare("reference", case.cast(torch.float32), TRAINED, 5e-5)


@pytest.mark.parametrize("dtype", GRADIENT, ids=str)
@pytest.mark.parametrize("spread", [12.0, 60.0])
def test_peaked_and_unlikely(dtype, spread):
    """Sampled tokens far below the maximum (other offsets than their own logit) and tokens of probability near 1."""
    case = make_case(4, **(MEDIUM | {"mask_kind": "full", "spread": spread, "beta": 0.0, "old": False, "ref": False}))
    best = (case.hidden @ case.weight.T).argmax(-1)
    ids = torch.where(torch.arange(case.ids.shape[1]) % 2 == 0, best, case.ids)
    case = replace(case, ids=ids).cast(dtype)
    got, want = run("reference", case, trained=FROZEN), oracle("reference", case)
    assert want.per_token_logps.min() < -20 and want.per_token_logps.max() > -1e-3
    assert (got.per_token_logps <= 0).all()
    assert ((got.per_token_logps - want.per_token_logps).abs() <= 2e-6 * want.per_token_logps.abs().clamp(min=10)).all()
    assert error(got.hidden, want.hidden) <= GRADIENT[dtype]


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_as_accurate_as_autograd_in_half_precision(dtype):
    """The error budget is data: twice that of an independent computation with operands of the same dtype."""
    case = make_case(6, **(MEDIUM | {"mask_kind": "full", "spread": 3.0})).cast(dtype)
    mine, exact = run("reference", case), oracle("reference", case)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    log_p = torch.log_softmax((hidden @ weight.T).float(), -1)
    losses.policy_loss(log_p.gather(-1, case.ids.unsqueeze(-1)).squeeze(-1), case.inputs()).loss.backward()
    for name, other in (("hidden", hidden.grad), ("weight", weight.grad)):
        assert error(getattr(mine, name), getattr(exact, name)) <= 2 * error(other, getattr(exact, name))


@pytest.mark.parametrize("trained", [FROZEN, TRAINED], ids=["frozen", "trained"])
def test_padding_may_hold_anything(trained):
    case = make_case(7, bias=True, mask_kind="right", **MEDIUM).cast(torch.bfloat16)
    empty = ~case.mask
    dirty = replace(
        case,
        hidden=torch.where(empty.unsqueeze(-1), torch.nan, case.hidden),
        ids=torch.where(empty, 10**6, case.ids),
        old=torch.where(empty, -torch.inf, case.old),
        ref=torch.where(empty, torch.nan, case.ref),
    )
    got, clean = run("reference", dirty, trained=trained), run("reference", case, trained=trained)
    identical(got, clean)
    assert (got.hidden[empty] == 0).all() and (got.per_token_logps[empty] == 0).all()


@pytest.mark.parametrize("chunk", [1, 5, 16, 26])
def test_any_chunk_size(chunk):
    case = make_case(8, bias=True, mask_kind="holes", **MEDIUM).cast(torch.float32)
    same(run("reference", case, chunk_size=chunk), run("reference", case), 2e-6)


def test_strided_and_expanded_inputs():
    case = make_case(9, mask_kind="full", **MEDIUM).cast(torch.bfloat16)
    case = replace(case, hidden=case.hidden[:1].expand_as(case.hidden))
    strided = torch.empty(2, 13, 2 * 40, dtype=case.hidden.dtype)[..., ::2]
    strided.copy_(case.hidden)
    turned = case.weight.t().contiguous().t()
    want = run("reference", replace(case, hidden=case.hidden.contiguous()))
    identical(run("reference", case), want)
    identical(run("reference", replace(case, hidden=strided, weight=turned)), want)


@pytest.mark.parametrize("trained", [FROZEN, TRAINED], ids=["frozen", "trained"])
@pytest.mark.parametrize(
    "shape",
    [{"mask_kind": "none"}, {"length": 0}, {"batch": 1, "length": 1}, {"vocab": 1}],
    ids=["all masked", "no tokens", "one token", "one word"],
)
def test_no_tokens_one_token_one_word(shape, trained):
    case = make_case(10, **(MEDIUM | {"mask_kind": "full"} | shape)).cast(torch.bfloat16)
    got = run("reference", case, trained=trained)
    assert finite(got)
    if case.mask.sum() == 0 or case.weight.shape[0] == 1:
        assert got.hidden.abs().sum() == 0 and got.per_token_logps.abs().sum() == 0


def test_banned_tokens():
    """A bias of -inf takes a token out of the distribution, without NaN."""
    case = make_case(11, bias=True, mask_kind="full", **MEDIUM).cast(torch.bfloat16)
    bias = case.bias.clone()
    banned = [v for v in range(75) if v not in set(case.ids.flatten().tolist())][:9]
    bias[banned] = -torch.inf
    got = run("reference", replace(case, bias=bias))
    kept = [v for v in range(75) if v not in banned]
    index = {v: i for i, v in enumerate(kept)}
    ids = torch.tensor([[index[int(v)] for v in row] for row in case.ids])
    want = run("reference", replace(case, weight=case.weight[kept], bias=bias[kept], ids=ids))
    assert finite(got)
    torch.testing.assert_close(got.per_token_logps, want.per_token_logps, rtol=1e-6, atol=1e-6)
    assert error(got.hidden, want.hidden) <= 2e-3
    assert (got.weight[banned] == 0).all()


def test_nan_is_not_passed_over():
    case = make_case(12, mask_kind="full", **MEDIUM).cast(torch.bfloat16)
    weight = case.weight.clone()
    weight[3, 2] = torch.nan
    for broken in (replace(case, weight=weight), replace(case, hidden=torch.full_like(case.hidden, torch.nan))):
        with pytest.raises(ValueError, match="log-probs is nan"):
            run("reference", broken)


@pytest.mark.parametrize("scale", [65536.0, 1.0, 0.125, 0.0])
@pytest.mark.parametrize("trained", [FROZEN, TRAINED], ids=["frozen", "trained"])
def test_float16_at_any_scale(trained, scale):
    """g / N of a float16 gradient underflows unless the incoming gradient is applied in float32 first."""
    case = replace(make_case(13, **(MEDIUM | {"mask_kind": "full"})).cast(torch.float16), num_sequences=20_000)
    got, want = run("reference", case, trained=trained, upstream=scale), oracle("reference", case)
    for name in ("hidden", "weight")[: len(trained)]:
        mine, exact = getattr(got, name), getattr(want, name) * scale
        # Without a scale the result itself is below float16's normal numbers: off by two of its smallest steps at most.
        assert error(mine, exact) <= 1e-3 or (mine.double() - exact).abs().max() <= 1.2e-7, name
        assert scale != 0 or (mine == 0).all()


def test_an_infinite_upstream_reaches_the_scaler():
    got = run("reference", make_case(14, **MEDIUM).cast(torch.float16), trained=FROZEN, upstream=float("inf"))
    assert not torch.isfinite(got.hidden).all()


@pytest.mark.parametrize("trained", [FROZEN, TRAINED], ids=["frozen", "trained"])
def test_repeated_calls_are_equal_to_the_bit(trained):
    case = make_case(15, bias=True, mask_kind="holes", **(MEDIUM | {"vocab": 7})).cast(torch.bfloat16)
    identical(run("reference", case, trained=trained), run("reference", case, trained=trained))


def test_without_gradient_nothing_else_changes():
    case = place(make_case(16, bias=True, mask_kind="holes", **MEDIUM).cast(torch.bfloat16))
    hidden = case.hidden.clone().requires_grad_()
    keywords = {"lm_head_bias": case.bias, "completion_mask": case.mask, "backend": "triton"}
    with_graph, entropy = losses.logps_and_entropy(hidden, case.weight, case.ids, **keywords)
    with torch.no_grad():
        plain, same_entropy = losses.logps_and_entropy(hidden, case.weight, case.ids, **keywords)
    assert torch.equal(with_graph, plain) and torch.equal(entropy, same_entropy)
    assert with_graph.requires_grad and not plain.requires_grad


def test_entropy():
    case = make_case(17, mask_kind="full", temperature=0.7, spread=3.0, **MEDIUM).cast(torch.float32)
    got = losses.logps_and_entropy(
        *(x.to(DEVICE) for x in (case.hidden, case.weight, case.ids)), temperature=0.7, backend="triton"
    )[1]
    log_p = torch.log_softmax(case.hidden.double() @ case.weight.double().T / 0.7, -1)
    torch.testing.assert_close(got.cpu().double(), -(log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-5)


def test_float64_is_refused():
    with pytest.raises(ValueError, match="float64"):
        run("reference", make_case(18))
