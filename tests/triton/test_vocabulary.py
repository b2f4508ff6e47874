"""The exact KL's kernels: value and gradients against plain float64 logits, near the reference and at the edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import losses
from losses.backends import triton_vocabulary, vocabulary
from tests.losses.common import error
from tests.losses.test_exact_kl import exact_kl, wanted
from tests.strategies import Case, make_case
from tests.triton.common import DEVICE, HALF, place

directions = pytest.mark.parametrize("direction", ["reverse", "forward"])
FROZEN, TRAINED = ("hidden",), ("hidden", "weight", "bias")
SHAPE = {"batch": 2, "length": 4, "width": 40, "vocab": 75}
# Triton's interpreter cuts float32 off where a GPU rounds it to bfloat16: four times the error.
GRADIENT = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 3e-3 if DEVICE == "cuda" else 1.2e-2}
OPTIONS = {
    "holes": {"mask_kind": "holes"},
    "all options": {"bias": True, "softcap": 2.0, "scale": 2.5, "temperature": 0.7},
    "odd shape": {"width": 37, "vocab": 33, "mask_kind": "full", "scale": -1.0},
    "one word": {"vocab": 1, "mask_kind": "full"},
    "peaked": {"vocab": 32, "spread": 30.0},
}


def kl_and_gradients(case: Case, direction: str, trained=FROZEN, upstream=None, **options):
    upstream = None if upstream is None else upstream.float().to(DEVICE)
    kl, grads = exact_kl(place(case), direction, "triton", upstream, trained, **options)
    return kl.cpu(), {k: None if v is None else v.cpu() for k, v in grads.items()}


def upstream_for(case: Case) -> torch.Tensor:
    return torch.randn(case.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@directions
@pytest.mark.parametrize(
    ("options", "dtype"),
    [(name, torch.float32) for name in OPTIONS]
    + [("holes", torch.bfloat16), ("odd shape", torch.float16), ("all options", torch.float16)],
    ids=str,
)
def test_value_and_gradients(direction, options, dtype):
    case = make_case(41, **(SHAPE | {"mask_kind": "right"} | OPTIONS[options])).cast(dtype)
    upstream = upstream_for(case)
    kl, exact = wanted(case, direction, upstream)
    plain, plain_grads = wanted(case, direction, upstream, torch.float32)
    values = []
    for trained in (FROZEN, TRAINED):
        got, grads = kl_and_gradients(case, direction, trained, upstream)
        values.append(got)
        assert (got - kl).abs().max() <= 2 * (plain - kl).abs().max() + 2e-6 and (got >= 0).all()
        for name in trained:
            mine, true = grads[name], exact[name]
            if true is not None:
                assert mine.dtype == dtype
                # Where the plain computation in float32 is worse than that, so may this one be.
                allowed = max(GRADIENT[dtype], 2 * error(plain_grads[name], true))
                assert error(mine, true) <= allowed or (mine.double() - true).norm() <= 1e-6, (name, trained)
    assert torch.equal(*values)


@directions
@pytest.mark.parametrize("chunk", [1, 5])
def test_any_chunk_size(direction, chunk):
    case = make_case(42, bias=True, mask_kind="holes", **SHAPE).cast(torch.float32)
    want, grads = kl_and_gradients(case, direction, TRAINED)
    got, mine = kl_and_gradients(case, direction, TRAINED, chunk_size=chunk)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert all(error(mine[name], grads[name]) < 3e-6 for name in TRAINED)


@directions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_near_the_reference(direction, dtype):
    """A policy 1e-3 from its reference: a KL of 1e-7, below the rounding of a log-sum-exp, is right in its digits."""
    case = make_case(43, mask_kind="full", **SHAPE)
    near = case.hidden * (1 + 1e-3 * torch.randn(case.hidden.shape, generator=torch.Generator().manual_seed(2)))
    case = replace(case, ref_hidden=near, ref_weight=case.weight.clone()).cast(dtype)
    kl, exact = wanted(case, direction, upstream_for(case))
    got, grads = kl_and_gradients(case, direction, FROZEN, upstream_for(case))
    # What remains is the rounding of the float32 logits themselves, 1e-7 of their differences of 1e-3.
    assert 1e-9 < float(kl.median()) < 1e-5
    assert error(got, kl) < 1e-3
    assert error(grads["hidden"], exact["hidden"]) < 1e-3


@directions
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_equal_models(direction, dtype):
    case = make_case(44, mask_kind="full", bias=True, **SHAPE).cast(dtype)
    same = replace(case, ref_hidden=case.hidden.clone(), ref_weight=case.weight.clone())
    kl, grads = kl_and_gradients(same, direction, TRAINED)
    assert not kl.any() and not any(grads[name].any() for name in TRAINED)


@directions
@pytest.mark.parametrize("trained", [FROZEN, TRAINED], ids=["frozen", "trained"])
def test_masked_tokens_are_never_read(direction, trained):
    case = make_case(45, mask_kind="holes", **SHAPE).cast(torch.float16)
    hidden, ref_hidden = case.hidden.clone(), case.ref_hidden.clone()
    hidden[~case.mask], ref_hidden[~case.mask] = float("nan"), float("inf")
    want, clean = kl_and_gradients(case, direction, trained)
    got, grads = kl_and_gradients(replace(case, hidden=hidden, ref_hidden=ref_hidden), direction, trained)
    assert torch.equal(got, want) and not got[~case.mask].any() and not grads["hidden"][~case.mask].any()
    assert all(grads[name] is None or torch.equal(grads[name], clean[name]) for name in trained)


@directions
def test_no_tokens(direction):
    for options in ({"mask_kind": "none"}, {"length": 0}):
        kl, grads = kl_and_gradients(make_case(46, **(SHAPE | options)).cast(torch.float16), direction, TRAINED)
        assert not kl.any() and not grads["hidden"].any() and not grads["weight"].any()


@directions
def test_banned_tokens(direction):
    """A bias of -inf in both models takes a token out of both distributions."""
    case = make_case(47, bias=True, mask_kind="full", **SHAPE).cast(torch.float32)
    bias = case.bias.clone()
    banned, kept = list(range(0, 75, 7)), [v for v in range(75) if v % 7]
    bias[banned] = -torch.inf
    got, grads = kl_and_gradients(replace(case, bias=bias), direction, TRAINED)
    less = replace(case, weight=case.weight[kept], ref_weight=case.ref_weight[kept], bias=bias[kept])
    want, others = kl_and_gradients(less, direction, TRAINED)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    assert error(grads["hidden"], others["hidden"]) < 2e-6 and not grads["weight"][banned].any()


@directions
def test_a_nan_is_not_passed_over(direction):
    case = make_case(48, mask_kind="full", **SHAPE).cast(torch.float16)
    for name in ("weight", "ref_weight"):
        broken = getattr(case, name).clone()
        broken[3, 2] = torch.nan
        kl, grads = kl_and_gradients(replace(case, **{name: broken}), direction)
        assert kl.isnan().all() and grads["hidden"].isnan().all()


@directions
def test_small_shares_in_float16(direction):
    """163,840 tokens near the reference: v and its share both below float16's normal numbers, the product not."""
    case = make_case(49, mask_kind="full", **SHAPE)
    near = case.hidden + 1e-2 * torch.randn(case.hidden.shape, generator=torch.Generator().manual_seed(3))
    case = replace(case, ref_hidden=near, ref_weight=case.weight.clone()).cast(torch.float16)
    share = torch.full(case.mask.shape, 65536.0 / 163840, dtype=torch.float64)
    _, exact = wanted(case, direction, share)
    for trained in (FROZEN, TRAINED):
        _, grads = kl_and_gradients(case, direction, trained, share)
        assert all(error(grads[name], exact[name]) < 2e-3 for name in trained if exact[name] is not None)


@directions
def test_strided_inputs(direction):
    case = make_case(50, mask_kind="full", **SHAPE).cast(torch.float16)
    strided = torch.empty(2, 4, 80, dtype=torch.float16)[..., ::2]
    strided.copy_(case.hidden)
    turned = replace(case, hidden=strided, weight=case.weight.t().contiguous().t())
    (want, clean), (got, grads) = (kl_and_gradients(x, direction) for x in (case, turned))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert error(grads["hidden"], clean["hidden"]) < 1e-4


@directions
def test_float8_is_the_emulation(direction):
    case = make_case(51, mask_kind="holes", **SHAPE)
    for dtype in (torch.float32, *HALF):
        given = place(case.cast(dtype))
        (got, grads), (want, others) = (
            exact_kl(given, direction, backend, None, FROZEN, precision="fp8") for backend in ("triton", "chunked")
        )
        assert torch.equal(got, want)
        assert error(grads["hidden"], others["hidden"]) < (1e-2 if dtype == torch.bfloat16 else 1e-3)


def test_it_is_what_the_triton_backend_runs(monkeypatch):
    calls = []
    original = triton_vocabulary.forward
    monkeypatch.setattr(triton_vocabulary, "forward", lambda *a: calls.append(1) or original(*a))
    monkeypatch.setattr(vocabulary, "forward", None)
    case = place(make_case(52, mask_kind="full", **SHAPE).cast(torch.float32))
    out = losses.linear_policy_loss(
        case.hidden, case.weight, case.inputs(), "exact_reverse_kl", beta=0.1, backend="triton"
    )
    assert calls and out.metrics["kl_own"].mean > 0


def test_a_second_backward_raises():
    case = place(make_case(53, mask_kind="full", **SHAPE).cast(torch.float32))
    hidden = case.hidden.clone().requires_grad_()
    kl = losses.exact_kl(hidden, case.weight, case.ref_hidden, case.ref_weight, backend="triton").sum()
    kl.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        kl.backward()
