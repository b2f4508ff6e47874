"""The exact KL over the vocabulary: value and gradients against plain float64 logits, as a function and as a loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import losses
from losses.backends import vocabulary
from tests import oracles, oracles_kl
from tests.losses.common import BACKENDS, close, error
from tests.strategies import DTYPES, PROFILE, Case, cases, chunk_sizes, generator, make_case

both = pytest.mark.parametrize("backend", BACKENDS)
directions = pytest.mark.parametrize("direction", ["reverse", "forward"])
exact = pytest.mark.parametrize("variant", sorted(oracles_kl.EXACT))
NAME = {"reverse": "exact_reverse_kl", "forward": "exact_forward_kl"}


def leaves(case: Case, trained: tuple[str, ...]) -> dict[str, torch.Tensor | None]:
    named = {"hidden": case.hidden, "weight": case.weight, "bias": case.bias}
    return {k: None if x is None else x.detach().clone().requires_grad_(k in trained) for k, x in named.items()}


def exact_kl(case: Case, direction: str, backend: str, upstream: torch.Tensor | None = None, trained=(), **options):
    """KL (B, T), and the gradients of hidden, weight and bias under `upstream`."""
    x = leaves(case, trained)
    kl = losses.exact_kl(
        x["hidden"], x["weight"], case.ref_hidden, case.ref_weight, direction=direction, completion_mask=case.mask,
        backend=backend, **case.head_kwargs | {"lm_head_bias": x["bias"]} | options,
    )  # fmt: skip
    if trained:
        kl.backward(torch.ones_like(kl) if upstream is None else upstream)
    return kl.detach(), {k: None if v is None else v.grad for k, v in x.items()}


def wanted(case: Case, direction: str, upstream: torch.Tensor, dtype: torch.dtype = torch.float64):
    """The same from full logits and autograd, masked tokens never looked at."""
    keep = case.mask != 0
    x = {k: None if v is None else v.to(dtype).detach().requires_grad_(True)
         for k, v in {"hidden": case.hidden, "weight": case.weight, "bias": case.bias}.items()}  # fmt: skip
    head = oracles.Head(x["bias"], case.temperature, case.softcap, case.scale)
    ref_head = oracles.Head(
        None if case.bias is None else case.bias.to(dtype), case.temperature, case.softcap, case.scale
    )
    rows = oracles_kl.divergence(
        NAME[direction], x["hidden"][keep], x["weight"], case.ref_hidden.to(dtype)[keep], case.ref_weight.to(dtype),
        head, ref_head,
    )  # fmt: skip
    asked = [v for v in x.values() if v is not None]
    grads = torch.autograd.grad((rows * upstream.to(dtype)[keep]).sum(), asked, allow_unused=True)
    found = iter(torch.zeros_like(v) if g is None else g for v, g in zip(asked, grads, strict=True))
    kl = torch.zeros(case.mask.shape, dtype=dtype)
    kl[keep] = rows.detach()
    return kl, {k: None if v is None else next(found) for k, v in x.items()}


@both
@directions
@PROFILE
@given(case=cases(), size=chunk_sizes, seed=st.integers(0, 1000))
def test_value_and_gradients(backend, direction, case, size, seed):
    upstream = torch.randn(case.mask.shape, generator=generator(seed), dtype=torch.float64)
    kl, grads = wanted(case, direction, upstream)
    for trained in (("hidden",), ("hidden", "weight", "bias"), ("weight",)):
        got, mine = exact_kl(case, direction, backend, upstream, trained, chunk_size=size)
        close(got, kl, 1e-11, "KL")
        for name in trained:
            close(mine[name], grads[name], 1e-10, f"{name} of {trained}")
    assert float(kl.min()) >= -1e-12


@directions
def test_the_enumerable_problem(direction):
    """Logits log q, reference log p: KL .6349 and the gradients (.4325, -.2081, -.2244) and (.5, -.1, -.4)."""
    hidden = oracles.Q.log().reshape(1, 1, 3).requires_grad_(True)
    kl = losses.exact_kl(
        hidden, torch.eye(3, dtype=torch.float64), oracles.REFERENCE.log().reshape(1, 1, 3), direction=direction
    )
    kl.sum().backward()
    divergence = oracles.reverse_kl if direction == "reverse" else oracles.forward_kl
    close(kl.detach()[0, 0], divergence(oracles.Q.log(), oracles.REFERENCE.log()), 1e-14, "value")
    close(hidden.grad[0, 0], oracles.true_gradient(divergence), 1e-14, "gradient")
    printed = (0.4325, -0.2081, -0.2244) if direction == "reverse" else (0.5, -0.1, -0.4)
    close(hidden.grad[0, 0], torch.tensor(printed, dtype=torch.float64), 1e-4, "printed")


@both
@directions
def test_equal_models_have_no_divergence_and_no_gradient(backend, direction):
    case = make_case(3, mask_kind="full", bias=True, softcap=3.0).cast(torch.float32)
    same = case.rows(slice(None), ref_hidden=case.hidden.clone(), ref_weight=case.weight.clone())
    kl, grads = exact_kl(same, direction, backend, trained=("hidden",))
    assert torch.equal(kl, torch.zeros_like(kl))
    assert float(grads["hidden"].abs().max()) <= (1e-6 if backend == "reference" else 0.0)


@both
@directions
@PROFILE
@given(case=cases(batch=4, length=6, width=8, vocab=17, mask_kind="holes"), dtype=st.sampled_from(DTYPES[1:]))
def test_low_precision(backend, direction, case, dtype):
    """Error against float64 on the same rounded inputs: at most twice that of plain float32 autograd, rounded once."""
    case = case.cast(dtype)
    upstream = torch.ones(case.mask.shape, dtype=torch.float64)
    kl, exact = wanted(case, direction, upstream)
    plain_kl, plain = wanted(case, direction, upstream, torch.float32)
    got, mine = exact_kl(case, direction, backend, None, ("hidden", "weight", "bias"))
    frozen, alone = exact_kl(case, direction, backend, None, ("hidden",))
    unit = torch.finfo(torch.float32).eps
    assert got.dtype == torch.float32 and torch.equal(got, frozen)
    assert float((got - kl).abs().max()) <= 2 * float((plain_kl - kl).abs().max()) + 16 * unit
    for name, true in exact.items():
        for found in (mine, alone) if name == "hidden" else (mine,):
            if true is None or float(true.norm()) == 0:
                assert found[name] is None or not found[name].any(), name
                continue
            assert found[name].dtype == dtype
            assert error(found[name], true) <= 2 * error(plain[name].to(dtype), true) + 16 * unit, name


def test_float16_near_the_reference():
    """The policy a hair from its reference, 163,840 tokens, scale 65,536: v is 1e-6, which float16 does not hold."""
    torch.manual_seed(0)
    hidden = (torch.randn(2, 16, 64) * 0.5).half()
    weight = (torch.randn(97, 64) * 0.1).half()
    nudged = hidden + 0.002 * torch.randn(2, 16, 64).half()
    share = 65536.0 / 163840
    for trained in (False, True):
        x, w = nudged.clone().requires_grad_(True), weight.clone().requires_grad_(trained)
        losses.exact_kl(x, w, hidden, weight).backward(torch.full((2, 16), share))
        y, z = nudged.double().requires_grad_(True), weight.double().requires_grad_(True)
        losses.exact_kl(y, z, hidden.double(), weight.double(), backend="reference").backward(
            torch.full((2, 16), share, dtype=torch.float64)
        )
        assert float(y.grad.abs().median()) < 3e-5
        assert error(x.grad, y.grad) < (3e-3 if float(y.grad.abs().max()) < 6e-5 else 1e-3)
        if trained:
            assert error(w.grad, z.grad) < 1e-3


@both
@directions
@PROFILE
@given(case=cases(batch=4), seed=st.integers(0, 3))
def test_masked_tokens_are_never_read(backend, direction, case, seed):
    spoil = (float("nan"), float("inf"), float("-inf"), 1e30)[seed]
    hidden, ref_hidden = case.hidden.clone(), case.ref_hidden.clone()
    hidden[~case.mask], ref_hidden[~case.mask] = spoil, spoil
    clean, want = exact_kl(case, direction, backend, None, ("hidden", "weight", "bias"))
    got, grads = exact_kl(
        case.rows(slice(None), hidden=hidden, ref_hidden=ref_hidden),
        direction,
        backend,
        None,
        ("hidden", "weight", "bias"),
    )
    assert torch.equal(got, clean) and not got[~case.mask].any()
    assert torch.equal(grads["hidden"], want["hidden"]) and torch.equal(grads["weight"], want["weight"])


def test_nothing_is_stored():
    """Beside v, no buffer grows with the number of tokens."""
    case = make_case(1, batch=1, length=64, width=4, vocab=5, mask_kind="full")
    seen = []
    original = vocabulary._logits

    def spy(head, ops, weight, h, out):
        seen.append(out.shape[0])
        return original(head, ops, weight, h, out)

    vocabulary._logits = spy
    try:
        exact_kl(case, "reverse", "chunked", None, ("hidden",), chunk_size=8)
    finally:
        vocabulary._logits = original
    assert seen == [8] * 16


@both
def test_the_reference_head_defaults_to_the_policys(backend):
    case = make_case(4, mask_kind="holes", bias=True)
    given = losses.exact_kl(
        case.hidden, case.weight, case.ref_hidden, case.weight, lm_head_bias=case.bias, ref_lm_head_bias=case.bias,
        backend=backend,
    )  # fmt: skip
    close(
        losses.exact_kl(case.hidden, case.weight, case.ref_hidden, lm_head_bias=case.bias, backend=backend), given, 0.0
    )
    other = losses.exact_kl(
        case.hidden, case.weight, case.ref_hidden, case.weight, lm_head_bias=case.bias, ref_lm_head_bias=-case.bias,
        backend=backend,
    )  # fmt: skip
    assert float((other - given).abs().max()) > 1e-3


def test_reference_of_another_width_and_dtype():
    case = make_case(5, width=4, vocab=9, mask_kind="full")
    wide = torch.randn(3, 5, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    want = oracles.reverse_kl(case.hidden @ case.weight.T, wide[0] @ wide[1].T)
    for backend in BACKENDS:
        close(losses.exact_kl(case.hidden, case.weight, *wide, backend=backend), want, 1e-12)
        mixed = losses.exact_kl(case.hidden.float(), case.weight.float(), *wide, backend=backend)
        assert mixed.dtype == torch.float32
        close(mixed, want.float(), 1e-5)


def test_a_second_backward_raises():
    case = make_case(6, mask_kind="full")
    hidden = case.hidden.clone().requires_grad_(True)
    kl = losses.exact_kl(hidden, case.weight, case.ref_hidden).sum()
    kl.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward"):
        kl.backward()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"direction": "sideways"}, "direction"),
        ({"ref_hidden": torch.zeros(3, 4, 4, dtype=torch.float64)}, "ref_hidden"),
        ({"ref_lm_head_weight": torch.zeros(10, 4, dtype=torch.float64)}, "ref_lm_head_weight"),
        ({"ref_lm_head_weight": torch.zeros(11, 3, dtype=torch.float64)}, "reference"),
        ({"ref_lm_head_bias": torch.zeros(7, dtype=torch.float64)}, "reference"),
        ({"backend": "chuncked"}, "chunked"),
        ({"temperature": 0.0}, "temperature"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"completion_mask": torch.full((3, 5), 2.0)}, "completion_mask"),
    ],
)
def test_refusals(change, said):
    case = make_case(7, mask_kind="full")
    given = {"hidden": case.hidden, "lm_head_weight": case.weight, "ref_hidden": case.ref_hidden}
    with pytest.raises(ValueError, match=said):
        losses.exact_kl(**given | change)


# as a loss ----------------------------------------------------------------------------------------------------


def expected_loss(variant: str, case: Case, beta: float, aggregate: oracles.Batch):
    """Surrogate by the oracle, plus beta x the mean divergence, and the gradients of both."""
    options = oracles.Options(beta=0.0)
    part = oracles.evaluate(oracles_kl.WITHOUT_KL, case.hidden, case.weight, aggregate, options, case.head)
    upstream = torch.zeros(case.mask.shape, dtype=torch.float64).requires_grad_(True)
    share = torch.autograd.grad(oracles_kl.mean_over_completions(upstream, aggregate), upstream)[0]
    direction = "reverse" if variant == "exact_reverse_kl" else "forward"
    kl, grads = wanted(case, direction, beta * share)
    return part, (beta * share * kl).sum(), kl, grads


@both
@exact
@PROFILE
@given(case=cases(token_advantages=False))
def test_as_a_loss(variant, backend, case):
    beta = case.options["beta"]
    options = {"beta": beta, "epsilon": None}
    case = case.rows(slice(None), sampling=None, ref=None)
    part, loss, kl, grads = expected_loss(variant, case, beta, case.batch)
    for trained in (("hidden",), ("hidden", "weight", "bias")):
        x = leaves(case, trained)
        out = losses.linear_policy_loss(
            x["hidden"], x["weight"], case.inputs(ref_lm_head_bias=case.bias), variant, backend=backend,
            **case.head_kwargs | {"lm_head_bias": x["bias"]} | options,
        )  # fmt: skip
        out.loss.backward()
        close(out.loss.detach(), part.loss + loss, 1e-10, "loss")
        for name in trained:
            if x[name] is not None:
                close(x[name].grad, getattr(part, name) + grads[name], 1e-10, name)
        if beta > 0:
            count = max(int(case.mask.sum()), 1)
            assert float(out.metrics["kl_own"].mean) == pytest.approx(float(kl.sum()) / count, abs=1e-9)


@both
@exact
def test_parts_add_up(variant, backend):
    case = make_case(9, batch=4, mask_kind="right")
    counts = {"num_items": int(case.mask.sum()), "num_sequences": int(case.mask.any(-1).sum())}

    def loss(part: Case) -> torch.Tensor:
        return losses.linear_policy_loss(part.hidden, part.weight, part.inputs(), variant, backend=backend).loss

    parts = loss(case.rows(slice(0, 1), **counts)) + loss(case.rows(slice(1, 4), **counts))
    close(parts, loss(case), 1e-12, "loss")


@exact
def test_log_probs_alone_are_not_enough(variant):
    case = make_case(10)
    with pytest.raises(ValueError, match="linear_policy_loss"):
        losses.policy_loss(case.log_probs, case.inputs(), variant)
    with pytest.raises(ValueError, match="ref_hidden"):
        losses.linear_policy_loss(case.hidden, case.weight, case.inputs(ref_hidden=None), variant)
    alone = losses.policy_loss(case.log_probs, case.inputs(), variant, beta=0.0)
    close(alone.loss, losses.policy_loss(case.log_probs, case.inputs(), "reference", beta=0.0).loss, 0.0)
