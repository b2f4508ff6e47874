"""Every variant's bodies as device functions against the same bodies on torch tensors."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import losses
from losses.backends.triton_bodies import arguments, device_function
from losses.policy import call_body
from tests.losses.common import own_params
from tests.triton.common import DEVICE

VARIANTS = losses.names()


@triton.jit
def apply_body(x, y, a, value, slope, args, BODY: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    v, d = BODY(tl.load(x + at), tl.load(y + at), tl.load(a + at), *args)
    tl.store(value + at, v)
    tl.store(slope + at, d)


@pytest.mark.parametrize("part", ["surrogate", "kl"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_body_is_the_same_function_in_a_kernel(variant, part):
    chosen = losses.get(variant)
    body = getattr(chosen, part)
    if body is None:
        pytest.skip("no KL term on samples")
    params = chosen.resolve({"epsilon": 0.2, "epsilon_high": 0.3} | own_params(variant))
    rng = torch.Generator().manual_seed(5)
    x, y, a = (torch.randn(64, generator=rng).to(DEVICE) for _ in range(3))
    x, y = x - 2, y - 2
    want = call_body(body, (x, y, a), params)
    value, slope = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    apply_body[(1,)](x, y, a, value, slope, arguments(body, params), BODY=device_function(body), SIZE=64)
    torch.testing.assert_close(value, want[0].expand_as(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope, want[1].expand_as(x), rtol=1e-5, atol=1e-6)


def test_a_body_with_a_closure_is_refused():
    factor = 2.0

    def body(n, o, a):
        return n * factor, n

    with pytest.raises(ValueError, match="closes over"):
        device_function(body)
