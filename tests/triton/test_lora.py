"""The low-rank product against float64, and that nothing beside it is written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from losses.backends.triton_lora import Tiles, add_lora, tiles
from tests.triton.common import DEVICE

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16, torch.float16)}
NAN = float("nan")


def inputs(rows, inner, widths, rank, dtype, seed=0):
    """y in the middle of negative zeros, x among NaN and rows further apart than wide, a and b stacked as in vLLM.

    Adding zero to a negative zero makes it positive, so that it shows what was written back as it was.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g).to(DEVICE, dtype)

    around = torch.full((rows + 2, sum(widths) + 9), -0.0, dtype=dtype, device=DEVICE)
    y = around[1:-1, 4:-5]
    y.copy_(draw(*y.shape))
    x = torch.full((rows + 1, inner + 3), NAN, dtype=dtype, device=DEVICE)[:rows, :inner]
    x.copy_(draw(rows, inner))
    a = [draw(1, 1, rank, inner) / inner**0.5 for _ in widths]
    b = [draw(1, 1, width, rank) for width in widths]
    return around, y, x, a, b


def untouched(around, y):
    """Whether all around y still is a negative zero."""
    y.fill_(-0.0)
    return bool(((around == 0) & around.signbit()).all())


def wanted(y, x, a, b, scale):
    """The sum in float64, and how far a correct result may be from it."""
    y, x, a, b = y.double(), x.double(), [w.double()[0, 0] for w in a], [w.double()[0, 0] for w in b]
    exact = y + scale * torch.cat([x @ s.T @ t.T for s, t in zip(a, b, strict=True)], 1)
    sizes = torch.cat([(x @ s.T).abs() @ t.abs().T for s, t in zip(a, b, strict=True)], 1)
    summed = torch.cat([x.abs() @ s.abs().T @ t.abs().T for s, t in zip(a, b, strict=True)], 1)
    return exact, abs(scale) * sizes, abs(scale) * summed


def check(y, before, x, a, b, scale, kept=slice(None)):
    exact, sizes, summed = wanted(before, x, a, b, scale)
    # A whole unit of the middle and of the result, since the interpreter cuts off where a GPU rounds.
    allowed = EPS[y.dtype] * (sizes + exact.abs()) + 64 * EPS[torch.float32] * (summed + before.abs())
    assert ((y.double() - exact).abs() <= allowed)[kept].all()


@settings(max_examples=40)
@given(
    rows=st.integers(1, 70),
    inner=st.integers(1, 300),
    widths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    rank=st.integers(1, 40),
    dtype=st.sampled_from(list(EPS)),
    scale=st.sampled_from([1.0, -0.25]),
    seed=st.integers(0, 99),
)
@example(rows=64, inner=576, widths=[576, 192, 192], rank=16, dtype=torch.bfloat16, scale=1.0, seed=0)
@example(rows=130, inner=128, widths=[1536, 1536], rank=64, dtype=torch.float16, scale=1.0, seed=0)
def test_against_float64(rows, inner, widths, rank, dtype, scale, seed):
    around, y, x, a, b = inputs(rows, inner, widths, rank, dtype, seed)
    before = y.clone()
    add_lora(y, x, a, b, scale)
    check(y, before, x, a, b, scale)
    assert untouched(around, y)


SMOLLM2 = [(576, [576, 192, 192]), (576, [576]), (576, [1536, 1536]), (1536, [576])]  # qkv, o, gate and up, down


@pytest.mark.parametrize("rows", [64, 1])
@pytest.mark.parametrize(("inner", "widths"), SMOLLM2, ids=str)
def test_layers_of_smollm2_as_vllm_calls(rows, inner, widths):
    around, y, x, a, b = inputs(rows, inner, widths, 16, torch.bfloat16)
    before = y.clone()
    mapping = torch.zeros(rows + 9, dtype=torch.int32, device=DEVICE)
    add_lora(y, x, a, b, mapping=mapping, active=torch.tensor([0, -1], dtype=torch.int32, device=DEVICE))
    check(y, before, x, a, b, 1.0)
    assert untouched(around, y)


@pytest.mark.parametrize("active", [(0, -1), (-1, 0)])
def test_rows_without_the_adapter_stay(active):
    around, y, x, a, b = inputs(37, 96, [40, 24], 16, torch.bfloat16)
    before = y.clone()
    x[5:9] = NAN
    mapping = torch.zeros(50, dtype=torch.int32, device=DEVICE)
    mapping[5:9] = -1
    mapping[37:] = 7  # of no row
    add_lora(y, x, a, b, mapping=mapping, active=torch.tensor(active, dtype=torch.int32, device=DEVICE))
    assert torch.equal(y[5:9], before[5:9])
    check(y, before, x, a, b, 1.0, kept=mapping[:37] == 0)
    assert untouched(around, y)


def test_nothing_changes_where_no_request_has_the_adapter():
    """vLLM leaves the mapping of the last step as it was, and says so only in the active slots."""
    _, y, x, a, b = inputs(20, 64, [32], 8, torch.float32)
    before = y.clone()
    mapping = torch.zeros(20, dtype=torch.int32, device=DEVICE)
    add_lora(y, x, a, b, mapping=mapping, active=torch.full((2,), -1, dtype=torch.int32, device=DEVICE))
    assert torch.equal(y, before)


@pytest.mark.parametrize("sizes", [Tiles(16, 32, 64, 2), Tiles(32, 128, 128, 4, 8), Tiles(64, 64, 32, 3, 2)], ids=str)
def test_given_sizes(sizes):
    _, y, x, a, b = inputs(50, 200, [130, 70, 10], 20, torch.float32)
    before = y.clone()
    add_lora(y, x, a, b, sizes=sizes)
    check(y, before, x, a, b, 1.0)


@pytest.mark.parametrize(("inner", "widths"), SMOLLM2)
def test_sizes_fill_a_gpu_and_fit_it(inner, widths):
    for rank in (1, 16, 64):
        s = tiles(64, inner, widths, rank)
        assert 64 <= 64 // s.m * sum(-(-w // s.n) for w in widths) <= 132
        assert s.stages * (s.m + max(16, rank)) * s.k * 2 <= 64 << 10
