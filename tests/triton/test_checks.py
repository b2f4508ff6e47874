"""One launch refuses what the operations refuse, with the same words, and asks nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from losses import checks
from losses.backends import triton_checks
from tests.strategies import make_case
from tests.triton.common import DEVICE, run

INF, NAN = float("inf"), float("nan")


def spoil(case, what, value):
    """`case` with one value of one input replaced at an unmasked token, the last there is."""
    row, column = (int(i) for i in case.mask.nonzero()[-1])
    x = getattr(case, what).clone()
    x[(row,) if x.dim() == 1 else (row, column)] = value
    return replace(case, **{what: x})


FAULTS = [("ids", 75), ("ids", -1), ("old", NAN), ("ref", INF), ("ref", -INF), ("advantages", NAN)]


@pytest.mark.parametrize(("what", "value"), FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_same_refusals(what, value, dtype):
    case = make_case(3, batch=2, length=700, width=4, vocab=75, mask_kind="holes").cast(torch.float32)
    case = replace(case, **{name: getattr(case, name).to(dtype) for name in ("old", "ref", "advantages")})
    broken, said = spoil(case, what, value), []
    for backend in ("triton", "chunked"):
        with pytest.raises(ValueError) as refused:
            run("reference", broken, backend)
        said.append(str(refused.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("what", ["ids", "old", "ref", "advantages"])
def test_padding_is_not_asked_about(what):
    case = make_case(4, batch=3, length=40, width=4, vocab=75, mask_kind="holes").cast(torch.float32)
    mask, x = case.mask.clone(), getattr(case, what).clone()
    mask[1] = False
    x[1] = 10**6 if what == "ids" else NAN
    run("reference", replace(case, mask=mask, **{what: x}))


def values(kind, x, mask, bound=0):
    def asked():
        raise AssertionError("the operations were asked as well")

    return checks.Question(asked, lambda: None, checks.Values(kind, x, mask, bound))


def test_one_launch_answers_all(monkeypatch):
    launches = []
    original = triton_checks._launch
    monkeypatch.setattr(triton_checks, "_launch", lambda *a: launches.append(1) or original(*a))
    mask = torch.ones(3, 50, dtype=torch.int64, device=DEVICE)
    mask[0, 7] = 0
    good, big = torch.randn(3, 50, device=DEVICE), torch.full((3, 50), 1e300, dtype=torch.float64, device=DEVICE)
    ids = torch.randint(0, 9, (3, 50), device=DEVICE)
    nan_in_padding, strided = good.clone(), torch.full((50, 3), 0.0, device=DEVICE).t()
    nan_in_padding[0, 7] = NAN
    strided[2, 49] = INF
    rows = torch.tensor([0.0, NAN, 1.0], device=DEVICE)
    other_mask = torch.zeros_like(mask)
    questions = [
        values("row", rows, mask), values("token", good, mask), values("ids", ids, mask, 9), values("mask", mask, mask),
        values("token", nan_in_padding, mask), values("token", strided, mask), values("token", big, mask),
        checks.Question(lambda: torch.tensor([False, True], device=DEVICE), lambda: None),
        checks.Question(lambda: good > 1e9, lambda: None, checks.Values("token", good, other_mask)),
    ]  # fmt: skip
    assert triton_checks.answers(questions) == [True, False, False, False, False, True, False, True, False]
    assert len(launches) == 1
    mask[1, 1] = 2
    assert triton_checks.answers([values("mask", mask, mask), values("ids", ids, mask, 8)]) == [
        True, bool((ids[mask != 0] >= 8).any()),
    ]  # fmt: skip


def test_nothing_to_ask():
    assert triton_checks.answers([]) == []
    empty = torch.ones(2, 0, dtype=torch.int64, device=DEVICE)
    question = checks.Question(lambda: empty != 1, lambda: None, checks.Values("mask", empty, empty))
    assert triton_checks.answers([question]) == [False]
