"""The backward pass: incoming gradients, second backwards, GradScaler's scaling, autocast."""

from __future__ import annotations

import pytest
import torch

import losses
from tests import oracles
from tests.losses.common import BACKENDS, VARIANTS, call, close, error, oracle, own_params
from tests.strategies import HALF, make_case

both = pytest.mark.parametrize("backend", BACKENDS)
every = pytest.mark.parametrize("variant", VARIANTS)
heads = pytest.mark.parametrize("trained", [("hidden",), ("hidden", "weight", "bias")], ids=["frozen", "trained"])


# -------------------------------------------------------------------------------------------------- incoming gradients


@both
@every
@heads
@pytest.mark.parametrize("upstream", [0.125, -2.0, 0.0, 65536.0])
def test_incoming_gradient(variant, backend, trained, upstream):
    """grad(c L) = c grad(L), exactly for powers of two."""
    for dtype in (torch.float64, torch.float32):
        case = make_case(51, mask_kind="holes", bias=True).cast(dtype)
        plain = call(variant, case, backend, trained=trained)
        scaled = call(variant, case, backend, trained=trained, upstream=upstream)
        for name in trained:
            assert torch.equal(getattr(scaled, name), getattr(plain, name) * upstream), name


@both
@every
@heads
def test_second_backward(variant, backend, trained):
    """It raises, or it adds the same gradient once more; it never scales what was scaled before."""
    case = make_case(52, mask_kind="full")
    hidden = case.hidden.clone().requires_grad_(True)
    weight = case.weight.clone().requires_grad_("weight" in trained)
    out = losses.linear_policy_loss(hidden, weight, case.inputs(), variant, backend=backend, **own_params(variant))
    out.loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    if backend == "chunked" and "weight" not in trained:
        with pytest.raises(RuntimeError, match="second backward|second time"):
            out.loss.backward()
        assert torch.equal(hidden.grad, once)
        return
    try:
        out.loss.backward()
    except RuntimeError as raised:
        assert "second backward" in str(raised) or "second time" in str(raised)
        assert torch.equal(hidden.grad, once)
    else:
        close(hidden.grad, 2 * once, 1e-12, "hidden")


@both
@heads
def test_second_backward_of_log_probs(backend, trained):
    case = make_case(53, mask_kind="full")
    hidden = case.hidden.clone().requires_grad_(True)
    weight = case.weight.clone().requires_grad_("weight" in trained)
    logps = losses.per_token_logps(hidden, weight, case.ids, backend=backend)
    (once,) = torch.autograd.grad(logps.sum(), hidden, retain_graph=True)
    kept = once.clone()
    try:
        (again,) = torch.autograd.grad(logps.sum(), hidden)
    except RuntimeError as raised:
        assert "second backward" in str(raised)
    else:
        close(again, kept, 1e-12, "hidden")
    assert torch.equal(once, kept)


@both
@every
@heads
def test_gradient_reaches_a_model_below(variant, backend, trained):
    """The loss amid a graph: two losses of one hidden state, added, and a layer under it."""
    case = make_case(54, mask_kind="holes")
    layer = torch.nn.Linear(4, 4, dtype=torch.float64)
    weight = case.weight.clone().requires_grad_("weight" in trained)
    hidden = layer(case.hidden)
    params = own_params(variant)
    first = losses.linear_policy_loss(hidden, weight, case.inputs(), variant, backend=backend, **params).loss
    second = losses.linear_policy_loss(hidden, weight, case.inputs(), "reference", backend=backend).loss
    (first + 3 * second).backward()
    at = case.rows(slice(None), hidden=hidden.detach())
    want = oracle(variant, at).hidden + 3 * oracle("reference", at).hidden
    grad = torch.autograd.grad(layer(case.hidden), layer.weight, want)[0]
    close(layer.weight.grad, grad, 1e-10, "layer")


@both
@heads
def test_a_loss_of_one_s_own_on_the_log_probs(backend, trained):
    """`per_token_logps` then any torch loss: the gradient is that loss's, even one that is no mean."""
    case = make_case(55, mask_kind="full", bias=True, softcap=4.0)
    hidden = case.hidden.clone().requires_grad_(True)
    weight = case.weight.clone().requires_grad_("weight" in trained)
    bias = case.bias.clone().requires_grad_("bias" in trained)
    n = losses.per_token_logps(hidden, weight, case.ids, **(case.head_kwargs | {"lm_head_bias": bias}), backend=backend)
    (n.exp().sum() ** 2 + n[0, 0] * n[-1, -1]).backward()
    twins = [x.detach().clone().requires_grad_(True) for x in (hidden, weight, bias)]
    m = oracles.log_probs(twins[0], twins[1], case.ids, case.mask, oracles.Head(twins[2], softcap=4.0))
    (m.exp().sum() ** 2 + m[0, 0] * m[-1, -1]).backward()
    close(hidden.grad, twins[0].grad, 1e-10, "hidden")
    if "weight" in trained:
        close(weight.grad, twins[1].grad, 1e-10, "weight")
        close(bias.grad, twins[2].grad, 1e-10, "bias")


@both
def test_outputs_carry_no_graph_but_the_loss(backend):
    case = make_case(56, mask_kind="full")
    hidden = case.hidden.clone().requires_grad_(True)
    out = losses.linear_policy_loss(hidden, case.weight, case.inputs(), backend=backend)
    assert out.loss.requires_grad and out.loss.ndim == 0
    assert not out.per_token_logps.requires_grad
    assert all(not x.requires_grad for m in out.metrics.values() for x in (m.sum, m.count))
    with torch.no_grad():
        assert not losses.linear_policy_loss(hidden, case.weight, case.inputs(), backend=backend).loss.requires_grad


# ------------------------------------------------------------------------------------------ float16 under a GradScaler

TOKENS = 163_840
SCALE = 65_536.0  # GradScaler's start


def half_case(dtype: torch.dtype, batch: int = 40):
    return make_case(57, batch=batch, length=TOKENS // batch, width=4, vocab=8, mask_kind="full").cast(dtype)


@both
@every
@heads
def test_row_7_float16_gradients_at_163840_tokens(variant, backend, trained):
    """A gradient entry is about 1e-6, half of float16's least normal number, until the scale is applied."""
    case = half_case(torch.float16)
    names = tuple(name for name in trained if name != "bias")
    constant = {"max_completion_length": TOKENS // 40} if own_params(variant) else {}
    got = call(variant, case, backend, trained=names, upstream=SCALE, **constant)
    exact = call(variant, case.cast(torch.float64), "reference", **constant)  # on the same rounded inputs
    assert abs(float(got.loss) - float(exact.loss)) < 1e-4 * max(1.0, abs(float(exact.loss)))
    for name in names:
        mine, true = getattr(got, name), getattr(exact, name)
        assert mine.dtype == torch.float16 and torch.isfinite(mine).all()
        assert error(mine.double() / SCALE, true) < 1e-3, name
        assert int((mine == 0).sum()) <= int((true.abs() * SCALE < 1e-7).sum()) + mine.numel() // 1000, name


@both
@heads
def test_row_7_incoming_gradient_in_float16(backend, trained):
    """grad(0.125 L) = 0.125 grad(L), to float16's rounding, with the scale on both."""
    case = half_case(torch.float16)
    whole = call("reference", case, backend, trained=trained, upstream=SCALE)
    eighth = call("reference", case, backend, trained=trained, upstream=0.125 * SCALE)
    for name in trained:
        if getattr(case, name) is None:
            continue
        assert error(eighth_of := getattr(eighth, name), 0.125 * getattr(whole, name).double()) < 1e-3, name
        assert eighth_of.any()


@both
@heads
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_under_autocast(backend, trained, dtype):
    """float32 master weights under autocast with half-precision hidden states, as a trainer has them."""
    case = make_case(58, batch=8, length=64, width=16, vocab=32, mask_kind="right")
    hidden = case.hidden.to(dtype).requires_grad_(True)
    weight = case.weight.float().requires_grad_("weight" in trained)
    rest = case.cast(torch.float32)
    rounded = case.rows(slice(None), hidden=hidden.detach().double(), weight=weight.detach().to(dtype).double())
    want = oracle("reference", rounded.rows(slice(None), old=rest.old, ref=rest.ref))
    with torch.autocast("cpu", dtype=dtype):
        out = losses.linear_policy_loss(hidden, weight, rest.inputs(), backend=backend)
    (out.loss * SCALE).backward()
    assert out.loss.dtype == out.per_token_logps.dtype == torch.float32
    assert (out.per_token_logps - want.per_token_logps).abs().max() < 1e-4
    unit = 2 ** -(11 if dtype == torch.float16 else 8)
    assert hidden.grad.dtype == dtype
    assert error(hidden.grad.double() / SCALE, want.hidden) < unit
    if "weight" in trained:
        assert weight.grad.dtype == torch.float32
        assert error(weight.grad.double() / SCALE, want.weight) < unit


@pytest.mark.parametrize("dtype", HALF, ids=str)
@both
def test_hidden_and_weight_of_different_dtypes(backend, dtype):
    """Without autocast nothing is rounded: half hidden states times a float32 head are a float32 product."""
    case = make_case(59, batch=4, length=8, width=16, vocab=32, mask_kind="right")
    hidden = case.hidden.to(dtype).requires_grad_(True)
    weight = case.weight.float().requires_grad_(True)
    rest = case.cast(torch.float32)
    out = losses.linear_policy_loss(hidden, weight, rest.inputs(), backend=backend)
    out.loss.backward()
    rounded = rest.rows(slice(None), hidden=hidden.detach().double(), weight=weight.detach().double())
    want = oracle("reference", rounded)
    assert (out.per_token_logps - want.per_token_logps).abs().max() < 1e-5
    assert hidden.grad.dtype == dtype and weight.grad.dtype == torch.float32
    assert error(weight.grad, want.weight) < 1e-5
