"""Loss, log-probs, gradients and metrics of every variant and backend against the plain float64 transcription."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import losses
from tests import oracles
from tests.losses.common import BACKENDS, VARIANTS, call, close, error, oracle, oracle_options, own_params, same
from tests.strategies import DTYPES, PROFILE, Case, cases, generator, make_case

both = pytest.mark.parametrize("backend", BACKENDS)
every = pytest.mark.parametrize("variant", VARIANTS)


@both
@every
@PROFILE
@given(case=cases())
def test_float64(variant, backend, case):
    got, want = call(variant, case, backend), oracle(variant, case)
    same(got, want)
    check_metrics(variant, got.metrics, want, case)


@every
@PROFILE
@given(case=cases(bias=False))
def test_policy_loss_float64(variant, case):
    """From log-probs alone: the same loss, and the gradient that the head would be handed."""
    n = case.log_probs.requires_grad_(True)
    out = losses.policy_loss(n, case.inputs(), variant, **case.options, **own_params(variant))
    out.loss.backward()
    rows = [row.clone().requires_grad_(True) for row in rows_of(n.detach(), case.mask)]
    loss = oracles.loss_of_rows(oracles.DEFINITIONS[variant], rows, case.batch, oracle_options(variant, case))
    grads = torch.autograd.grad(loss, rows, allow_unused=True)
    want = oracles.scatter(
        [torch.zeros_like(r) if g is None else g for r, g in zip(rows, grads, strict=True)], case.mask
    )
    close(out.loss.detach(), loss.detach(), what="loss")
    close(n.grad, want, what="gradient")
    close(out.per_token_logps, case.log_probs, what="per_token_logps")
    assert not out.per_token_logps.requires_grad
    check_metrics(variant, out.metrics, oracle(variant, case), case, entropy=False)


def rows_of(values: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    return [values[b][mask[b]] for b in range(len(mask))]


def check_metrics(
    variant: str, metrics: dict[str, losses.Metric], want: oracles.Result, case: Case, entropy: bool = True
) -> None:
    """TRL's names, pooled over tokens. A metric that makes no sense for the call may be missing, never wrong."""
    count = int(case.mask.sum())
    expected = {
        "clip_ratio/low_mean": oracles.pooled_mean(want.terms.low),
        "clip_ratio/high_mean": oracles.pooled_mean(want.terms.high),
        "clip_ratio/region_mean": oracles.pooled_mean(
            [a | b for a, b in zip(want.terms.low, want.terms.high, strict=True)]
        ),
    }
    if entropy:
        expected["entropy"] = want.entropy
    if case.ref is not None:
        expected["kl"] = oracles.pooled_mean(want.terms.kl)
        if case.options["beta"] > 0:
            expected["kl_own"] = oracles.pooled_mean(want.terms.own_kl)
    for name, value in expected.items():
        assert name in metrics, f"{name} is not logged"
        assert float(metrics[name].count) == count, name
        assert float(metrics[name].mean) == pytest.approx(value, rel=1e-6, abs=1e-9), name
        assert not metrics[name].sum.requires_grad


@both
@PROFILE
@given(case=cases(), seed=st.integers(0, 1000))
def test_per_token_logps(backend, case, seed):
    """Value, and gradients under an arbitrary upstream gradient."""
    mask = torch.ones_like(case.mask)
    leaves = [x.clone().requires_grad_(True) for x in (case.hidden, case.weight, case.bias) if x is not None]
    bias = leaves[2] if case.bias is not None else None
    got = losses.per_token_logps(
        leaves[0], leaves[1], case.ids, **(case.head_kwargs | {"lm_head_bias": bias}), backend=backend
    )
    twins = [x.detach().clone().requires_grad_(True) for x in leaves]
    head = oracles.Head(twins[2] if bias is not None else None, case.temperature, case.softcap, case.scale)
    want = oracles.log_probs(twins[0], twins[1], case.ids, mask, head)
    close(got.detach(), want.detach(), what="log-probs")
    upstream = torch.randn(got.shape, generator=generator(seed), dtype=torch.float64)
    grads = torch.autograd.grad(got, leaves, upstream)
    wanted = torch.autograd.grad(want, twins, upstream)
    for name, a, b in zip(("hidden", "weight", "bias"), grads, wanted, strict=False):
        close(a, b, what=name)


@both
@PROFILE
@given(case=cases(bias=False))
def test_masked_log_probs_are_skipped(backend, case):
    got = losses.per_token_logps(
        case.hidden, case.weight, case.ids, completion_mask=case.mask, **case.head_kwargs, backend=backend
    )
    close(got, case.log_probs, what="log-probs")
    assert torch.equal(got[~case.mask], torch.zeros_like(got[~case.mask]))


@both
@PROFILE
@given(case=cases())
def test_one_path_for_policy_old_and_reference(backend, case):
    """The loss's log-probs and those of `per_token_logps` agree to the bit, in float32."""
    case = case.cast(torch.float32)
    alone = losses.per_token_logps(
        case.hidden, case.weight, case.ids, completion_mask=case.mask, **case.head_kwargs, backend=backend
    )
    for trained in ((), ("hidden",), ("hidden", "weight", "bias")):
        got = call("reference", case, backend, trained=trained)
        assert torch.equal(got.per_token_logps, alone), trained


# --------------------------------------------------------------------------------------------------------------- dtypes


@both
@every
@PROFILE
@given(case=cases(batch=4, length=7, width=8, vocab=17, mask_kind="holes"), dtype=st.sampled_from(DTYPES[1:]))
def test_low_precision(variant, backend, case, dtype):
    """Error against float64 on the same rounded inputs: at most twice that of plain float32 autograd, rounded once.

    A gradient of a few numbers may be rounded luckily there: one worst-case rounding is always allowed.
    """
    case = case.cast(dtype)
    got, exact, plain = call(variant, case, backend), oracle(variant, case), oracle(variant, case, torch.float32)
    assert got.loss.dtype == got.per_token_logps.dtype == torch.float32
    unit = torch.finfo(torch.float32).eps
    scale = float(torch.cat([row.detach().abs() for row in exact.terms.loss]).sum())
    assert abs(float(got.loss) - float(exact.loss)) <= 2 * abs(float(plain.loss) - float(exact.loss)) + 8 * unit * scale
    assert error(got.per_token_logps, exact.per_token_logps) <= (
        2 * error(plain.per_token_logps, exact.per_token_logps) + 8 * unit
    )
    for name in ("hidden", "weight", "bias"):
        mine, true, other = getattr(got, name), getattr(exact, name), getattr(plain, name)
        if true is None or float(true.norm()) == 0:
            assert mine is None or not mine.any(), name
            continue
        assert mine.dtype == dtype, name
        budget = max(2 * error(other.to(dtype), true), torch.finfo(dtype).eps / 2) + 8 * unit
        assert error(mine, true) <= budget, f"{name}: {error(mine, true):.2e}, budget {budget:.2e}"


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_out(backend, dtype):
    """float64 in, float64 out; otherwise loss and log-probs are float32, whatever else comes in."""
    case = make_case(5, mask_kind="full", sampling=True).cast(dtype)
    want = torch.float64 if dtype == torch.float64 else torch.float32
    got = call("reference", case, backend)
    assert got.loss.dtype == got.per_token_logps.dtype == want
    assert got.hidden.dtype == got.weight.dtype == dtype
    logps = losses.per_token_logps(case.hidden, case.weight, case.ids, backend=backend)
    assert logps.dtype == want
    out = losses.policy_loss(case.log_probs.to(dtype), case.inputs())
    assert out.loss.dtype == out.per_token_logps.dtype == want


@both
def test_half_precision_log_prob_inputs(backend):
    """Old, reference and sampling log-probs and advantages in half precision are read as they are."""
    case = make_case(6, mask_kind="full", sampling=True).cast(torch.float32)
    rounded = {name: getattr(case, name).bfloat16() for name in ("advantages", "old", "ref", "sampling")}
    names = {"old": "old_per_token_logps", "ref": "ref_per_token_logps", "sampling": "sampling_per_token_logps"}
    got = call("reference", case, backend, inputs=case.inputs(**{names.get(k, k): v for k, v in rounded.items()}))
    want = call(
        "reference", case, backend, inputs=case.inputs(**{names.get(k, k): v.float() for k, v in rounded.items()})
    )
    same(got, want, 0.0)


# ----------------------------------------------------------------------------------------------------------------- head


@both
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_head_options(backend, bias, temperature, softcap, scale):
    case = make_case(
        11, mask_kind="holes", bias=bias, temperature=temperature, softcap=softcap, scale=scale, spread=4.0, beta=0.5
    )
    for variant in losses.founding:
        same(call(variant, case, backend), oracle(variant, case))


@both
def test_entropy_metric(backend):
    """Uniform logits have log V, a certain token 0; temperature is part of the distribution."""
    hidden = torch.tensor([[[0.0], [1000.0], [1.0]]], dtype=torch.float64)
    weight = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    inputs = losses.LossInputs(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3), torch.ones(1))
    got = losses.linear_policy_loss(hidden, weight, inputs, beta=0.0, temperature=0.5, backend=backend)
    p = torch.softmax(torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64), 0)
    want = torch.log(torch.tensor(3.0, dtype=torch.float64)) + 0.0 - (p * p.log()).sum()
    assert float(got.metrics["entropy"].sum) == pytest.approx(float(want), abs=1e-9)
    assert float(got.metrics["entropy"].count) == 3


@both
@every
def test_frozen_and_trained_head_agree(variant, backend):
    case = make_case(12, batch=4, mask_kind="holes", bias=True, softcap=5.0, temperature=0.8, epsilon=0.2)
    trained = call(variant, case, backend)
    frozen = call(variant, case, backend, trained=("hidden",))
    assert frozen.weight is None and frozen.bias is None
    close(frozen.loss, trained.loss, 1e-12, "loss")
    close(frozen.hidden, trained.hidden, 1e-12, "hidden")
    head_only = call(variant, case, backend, trained=("weight", "bias"))
    assert head_only.hidden is None
    close(head_only.weight, trained.weight, 1e-12, "weight")
    close(head_only.bias, trained.bias, 1e-12, "bias")
    bias_only = call(variant, case, backend, trained=("bias",))
    close(bias_only.bias, trained.bias, 1e-12, "bias alone")
    with torch.no_grad():
        loss = call(variant, case, backend, trained=()).loss
    close(loss, trained.loss, 1e-12, "loss without gradients")
