"""precision="fp8" in the kernels: against the torch emulation, against float64, and at the edges of float8's range."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.losses.common import error, oracle
from tests.strategies import make_case
from tests.triton.common import HALF, run

LARGE = {"batch": 2, "length": 11, "width": 64, "vocab": 75, "mask_kind": "holes"}


def cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "softcap": 4.0, "scale": 0.5, "temperature": 0.7}, {"width": 37, "vocab": 33}],
    ids=["plain", "all options", "odd shape"],
)
@pytest.mark.parametrize("trained", [("hidden",), ("hidden", "weight", "bias")], ids=["frozen", "trained"])
def test_kernels_and_emulation_agree(dtype, options, trained):
    case = make_case(31, **(LARGE | options)).cast(dtype)
    mine, torchs = (
        run("reference", case, backend, trained=trained, precision="fp8") for backend in ("triton", "chunked")
    )
    exact = oracle("reference", case)
    assert (mine.per_token_logps - torchs.per_token_logps).abs().max() <= 1e-3
    for name in trained:
        if getattr(exact, name) is not None:
            off = error(getattr(torchs, name), getattr(exact, name))
            assert 1e-3 < off < 0.1, name  # it is float8
            # Exponentials near a boundary of float8 may fall either way.
            assert error(getattr(mine, name), getattr(torchs, name)) <= 0.75 * off, name


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradient_points_the_same_way(dtype):
    case = make_case(32, **(LARGE | {"batch": 4, "spread": 2.0})).cast(dtype)
    got, want = run("reference", case, precision="fp8"), oracle("reference", case)
    assert (got.per_token_logps <= 0).all()
    assert min(cosine(got.hidden, want.hidden), cosine(got.weight, want.weight)) >= 0.998


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_any_finite_magnitude(size):
    case = make_case(33, **LARGE).cast(torch.bfloat16)
    case = replace(case, hidden=case.hidden * size, weight=case.weight / size)
    got = run("reference", case, precision="fp8")
    assert all(torch.isfinite(x).all() for x in (got.loss, got.hidden, got.weight, got.per_token_logps))
    assert got.per_token_logps.min() < -0.1


def test_rows_of_zeros():
    case = make_case(34, **(LARGE | {"mask_kind": "full"})).cast(torch.bfloat16)
    hidden, weight = case.hidden.clone(), case.weight.clone()
    hidden[0, 0], weight[3], weight[:, 5] = 0, 0, 0
    case = replace(case, hidden=hidden, weight=weight)
    got, want = run("reference", case, precision="fp8"), oracle("reference", case)
    assert (got.per_token_logps - want.per_token_logps).abs().max() < 0.2
    assert float(got.per_token_logps[0, 0]) == pytest.approx(-math.log(75), abs=1e-5)
    assert (got.hidden[..., 5] == 0).all()


def test_nan_is_not_passed_over():
    case = make_case(35, **(LARGE | {"mask_kind": "full"})).cast(torch.bfloat16)
    weight = case.weight.clone()
    weight[3, 2] = torch.nan
    with pytest.raises(ValueError, match="log-probs is nan"):
        run("reference", replace(case, weight=weight), precision="fp8")


def test_the_head_is_quantised_again_only_when_it_changes(monkeypatch):
    from losses.backends import triton_float8
    from tests.triton.common import place

    case = place(make_case(36, **LARGE).cast(torch.bfloat16))
    calls = []
    original = triton_float8._quantize
    monkeypatch.setattr(triton_float8, "_quantize", lambda weight: calls.append(1) or original(weight))
    import losses

    keywords = {"completion_mask": case.mask, "backend": "triton", "precision": "fp8"}
    first = losses.per_token_logps(case.hidden, case.weight, case.ids, **keywords)
    again = losses.per_token_logps(case.hidden, case.weight.detach(), case.ids, **keywords)
    assert len(calls) == 1 and torch.equal(first, again)
    case.weight.mul_(2)
    other = losses.per_token_logps(case.hidden, case.weight, case.ids, **keywords)
    assert len(calls) == 2 and not torch.equal(first, other)
    losses.per_token_logps(case.hidden, case.weight.clone().requires_grad_(), case.ids, **keywords)
    assert len(calls) == 3
    held = len(triton_float8._frozen)
    del case
    triton_float8._forget()
    assert len(triton_float8._frozen) < held
