"""The derivative a variant writes by hand is the derivative of the value beside it, and the value is the paper's."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import losses
from tests import oracles
from tests.losses.common import LENGTH_LIMIT, VARIANTS, close
from tests.strategies import PROFILE, epsilons, generator, seeds

POINTS = 200


def log_probs(seed: int, spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """n, o, p, a at random points: o and p about `spread` nats from n, never positive; a of both signs and 0."""
    rng = generator(seed)
    n = -4 * torch.rand(POINTS, generator=rng, dtype=torch.float64)
    o = (n + spread * torch.randn(POINTS, generator=rng, dtype=torch.float64)).clamp(max=0)
    p = (n + spread * torch.randn(POINTS, generator=rng, dtype=torch.float64)).clamp(max=0)
    a = torch.randn(POINTS, generator=rng, dtype=torch.float64)
    a[::17] = 0.0
    return n, o, p, a


def arguments(variant: losses.Variant, body, low: float | None, high: float | None) -> list[float]:
    """The body's parameters by name; an epsilon that is not set is infinite."""
    values = {p.name: LENGTH_LIMIT if p.default is None else p.default for p in variant.all_params}
    values["epsilon"] = math.inf if low is None else low
    values["epsilon_high"] = values["epsilon"] if high is None else high
    return [values[name] for name in list(inspect.signature(body).parameters)[3:]]


def check(body, three: tuple[torch.Tensor, ...], extra: list[float]) -> torch.Tensor:
    n = three[0].clone().requires_grad_(True)
    value, derivative = body(n, *three[1:], *extra)
    assert value.shape == derivative.shape == n.shape
    assert value.dtype == derivative.dtype == torch.float64
    (automatic,) = torch.autograd.grad(value.sum(), n, allow_unused=True)
    close(derivative.detach(), torch.zeros_like(n) if automatic is None else automatic, 1e-9, "derivative")
    return value.detach()


@pytest.mark.parametrize("name", VARIANTS)
@PROFILE
@given(seed=seeds, spread=st.sampled_from((0.0, 0.1, 2.0, 20.0)), clip=epsilons)
def test_surrogate(name, seed, spread, clip):
    variant = losses.get(name)
    n, o, _, a = log_probs(seed, spread)
    if variant.sequence_term is not None:
        pytest.skip("no token body: the sequence term is held against the oracle")
    value = check(variant.surrogate, (n, o, a), arguments(variant, variant.surrogate, *clip))
    definition = oracles.DEFINITIONS[name]
    ratio = torch.cat([definition.ratio(n[i : i + 1], o[i : i + 1]) for i in range(POINTS)])
    close(value, oracles.clipped_surrogate(ratio, a, *clip), 1e-12, "value")


@pytest.mark.parametrize("name", [v for v in VARIANTS if losses.get(v).kl is not None])
@PROFILE
@given(seed=seeds, spread=st.sampled_from((0.0, 0.1, 2.0, 20.0)))
def test_kl_term(name, seed, spread):
    variant = losses.get(name)
    n, o, p, _ = log_probs(seed, spread)
    value = check(variant.kl, (n, p, o), arguments(variant, variant.kl, None, None))
    close(value, oracles.DEFINITIONS[name].kl(n, p), 1e-12, "value")


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_in_float32_out(name):
    variant = losses.get(name)
    n, o, p, a = (x.float() for x in log_probs(3, 0.3))
    outputs = [variant.surrogate(n, o, a, *arguments(variant, variant.surrogate, 0.2, None))]
    if variant.kl is not None:
        outputs.append(variant.kl(n, p, o, *arguments(variant, variant.kl, None, None)))
    assert all(x.dtype == torch.float32 for pair in outputs for x in pair)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", [v for v in VARIANTS if v != "no_detach"])
def test_the_clip_holds_only_the_side_that_would_gain(name, advantage):
    """The gradient is 0 past the bound that the advantage's sign pushes to, and untouched past the other one."""
    variant = losses.get(name)
    ratios = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.0], dtype=torch.float64)
    o = torch.full_like(ratios, -3.0)
    a = torch.full_like(ratios, advantage)
    _, derivative = variant.surrogate(o + ratios.log(), o, a, *arguments(variant, variant.surrogate, 0.2, 0.28))
    moves = torch.tensor([True, True, True, True, True, False, False])
    if advantage < 0:
        moves = torch.tensor([False, False, True, True, True, True, True])
    assert torch.equal(derivative != 0, moves)
