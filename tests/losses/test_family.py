"""The KL family: each estimate against its transcription, and the invariants that the founding variants are held to."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import losses
from tests import oracles, oracles_kl
from tests.losses import test_against_oracle as against
from tests.losses import test_bodies as bodies
from tests.losses import test_invariance as invariance
from tests.losses.common import BACKENDS, call, close, oracle, same
from tests.strategies import Case, generator, make_case

FAMILY = tuple(oracles_kl.DEFINITIONS)
TERMS = tuple(name for name in FAMILY if losses.get(name).kl is not None)
both = pytest.mark.parametrize("backend", BACKENDS)
every = pytest.mark.parametrize("variant", FAMILY)


def some(**fixed) -> list[Case]:
    """A handful of cases of different structure, where hypothesis would draw hundreds."""
    plain = {"batch": 4, "length": 5, "vocab": 7, "beta": 0.5}
    return [
        make_case(101, mask_kind="holes", bias=True, softcap=3.0, temperature=0.7, **plain | fixed),
        make_case(102, mask_kind="empty_rows", old=False, token_advantages=True, **plain | fixed),
        make_case(103, mask_kind="right", sampling=True, epsilon=0.2, sampling_mode="token_truncate", **plain | fixed),
    ]


def test_names_say_what_they_are():
    """Every estimate comes with no ratio, the detached and the undetached one; nothing registered lacks an oracle."""
    for estimate in oracles_kl.ESTIMATES:
        assert {estimate, f"{estimate}_sg_is", f"{estimate}_is"} <= set(losses.names())
    assert set(FAMILY) | set(oracles_kl.EXACT) | set(oracles.DEFINITIONS) == set(losses.names())


@pytest.mark.parametrize("spread", [0.0, 0.1, 2.0, 20.0])
@pytest.mark.parametrize("name", TERMS)
def test_the_term(name, spread):
    """The value is the paper's; the derivative is what autograd makes of the value, at n = p too."""
    n, o, p, _ = bodies.log_probs(7, spread)
    n, o, p = n[10:], o[10:], p[10:]
    definition = oracles_kl.DEFINITIONS[name]
    value, derivative = losses.get(name).kl(n, p, o)
    m = n.clone().requires_grad_(True)
    want = definition.kl(m, p) * (1 if definition.kl_weight is None else definition.kl_weight(m, o))
    close(value, want.detach(), 1e-11, "value")
    close(derivative, torch.autograd.grad(want.sum(), m)[0], 1e-11, "derivative against the paper's")
    m = n.clone().requires_grad_(True)
    own = torch.autograd.grad(losses.get(name).kl(m, p, o)[0].sum(), m)[0]
    close(derivative, own, 1e-11, "derivative against the value beside it")


@pytest.mark.parametrize("name", TERMS)
def test_float32_in_float32_out(name):
    n, o, p, _ = (x.float() for x in bodies.log_probs(3, 0.3))
    assert all(x.dtype == torch.float32 for x in losses.get(name).kl(n, p, o))


def test_k3_is_reference():
    assert losses.get("k3").kl is losses.get("reference").kl
    assert losses.get("k3").surrogate is losses.get("reference").surrogate
    assert losses.get("k3").aggregation == losses.get("reference").aggregation


@both
@every
def test_against_the_oracle(variant, backend):
    for case in some():
        got, want = call(variant, case, backend), oracle(variant, case)
        same(got, want)
        if losses.get(variant).kl is not None:
            against.check_metrics(variant, got.metrics, want, case)


@every
def test_policy_loss(variant):
    for case in some():
        n = case.log_probs.requires_grad_(True)
        out = losses.policy_loss(n, case.inputs(), variant, **case.options)
        close(out.loss.detach(), oracle(variant, case).loss, 1e-10, "loss")
        head = call(variant, case, "reference")
        leaf = case.hidden.clone().requires_grad_(True)
        again = oracles.log_probs(leaf, case.weight, case.ids, case.mask, case.head)
        out.loss.backward()
        again.backward(torch.where(case.mask, n.grad, 0))
        close(leaf.grad, head.hidden, 1e-10, "hidden")


INVARIANTS = [
    invariance.test_padding_never_matters,
    invariance.test_padding_never_matters_to_policy_loss,
    invariance.test_order_of_completions,
    invariance.test_normalisers_are_used,
    invariance.test_memory_layout,
    invariance.test_repeated_calls_are_equal_to_the_bit,
    invariance.test_chunk_size,
    against.test_low_precision,
    against.test_frozen_and_trained_head_agree,
]


class Order:
    """Stands for hypothesis's data: one fixed permutation."""

    def draw(self, _strategy):
        return torch.tensor([2, 0, 3, 1])


@every
@pytest.mark.parametrize("test", INVARIANTS, ids=lambda test: test.__name__.removeprefix("test_"))
def test_what_the_founding_variants_are_held_to(variant, test):
    """The bodies of those tests, on fixed cases, with the chunked backend."""
    inner = getattr(getattr(test, "hypothesis", None), "inner_test", test)
    asked = inspect.signature(inner).parameters
    offered = {"variant": variant, "backend": "chunked", "seed": 1, "dtype": torch.float32, "size": 3, "data": Order()}
    offered |= {"trained": ("hidden", "weight", "bias")}
    for case in some(length=6, width=8) if "case" in asked else [None]:
        inner(**{name: case if name == "case" else offered[name] for name in asked})


@both
@every
def test_parts_of_a_batch_add_up(variant, backend):
    for case in some():
        whole = call(variant, case, backend)
        counts = {"num_items": int(case.mask.sum()), "num_sequences": int(case.mask.any(-1).sum())}
        parts = [call(variant, case.rows(part, **counts), backend) for part in (slice(0, 1), slice(1, 4))]
        same(invariance.total(parts), whole, 1e-11)


@given(seed=st.integers(0, 10**6))
def test_kl_in_reward_hook(seed):
    """R - beta x the completion's summed log-ratio; masked positions are not read."""
    rng = generator(seed)
    n, p = torch.randn(3, 4, generator=rng), torch.randn(3, 4, generator=rng)
    rewards = torch.randn(3, generator=rng)
    mask = torch.rand(3, 4, generator=rng) < 0.5
    hook = losses.get("kl_in_reward").shape_reward
    want = torch.stack([rewards[b] - 0.5 * (n - p)[b][mask[b]].sum() for b in range(3)])
    for given_mask in (mask, mask.int(), mask.float()):
        close(hook(rewards, n, p, given_mask, {"beta": 0.5}), want, 1e-6)
    n[~mask] = float("nan")
    close(hook(rewards, n, p, mask, {"beta": 0.5}), want, 1e-6)


def test_kl_in_reward_token_asks_for_the_reference():
    case = make_case(5, ref=False)
    with pytest.raises(ValueError, match="ref_per_token_logps"):
        losses.policy_loss(case.log_probs, case.inputs(), "kl_in_reward_token")
    losses.policy_loss(case.log_probs, case.inputs(), "kl_in_reward_token", beta=0.0)


def test_kl_in_reward_token_is_the_hook_with_the_past_left_out():
    """Summed over a completion, first token's advantage: the whole log-ratio; last token's: its own."""
    case = make_case(6, batch=1, length=3, mask_kind="full")
    hook = losses.get("kl_in_reward_token").shape_advantage
    ratio = (case.old - case.ref)[0]
    a = hook(torch.zeros(1, 3, dtype=torch.float64), case.old, case.ref, case.mask, {"beta": 2.0})[0]
    close(a, -2.0 * torch.stack([ratio.sum(), ratio[1:].sum(), ratio[2]]), 1e-12)
