"""Rollouts by model.generate: where completions end, and which of them came to an end of their own."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from ablate import models
from ablate.rollout.transformers import TransformersEngine

PROMPT = [4, 5, 13, 6, 7, 14]  # 12+34=
EOS = 1


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    loaded = models.load("tiny")
    return AutoModelForCausalLM.from_pretrained(loaded.path), loaded.tokenizer


def draw(parts: tuple[Any, Any], length: int, **sampling: Any) -> list[tuple[tuple[int, ...], bool]]:
    engine = TransformersEngine(parts[1], [EOS], length, sampling, batch_size=16)
    rollout = engine.generate(parts[0], [PROMPT] * 64, seed=0, step=0, num_generations=8)
    assert rollout.finished is not None
    return list(zip(map(tuple, rollout.completion_ids), rollout.finished, strict=True))


def test_an_end_token_ends_a_completion_and_its_length_cuts_it(parts: Any) -> None:
    whole, cut = draw(parts, 8), draw(parts, 2)
    assert all(ids[-1] == EOS and EOS not in ids[:-1] and ended for ids, ended in whole)
    assert {ended for _, ended in cut} == {False} and {len(ids) for ids, _ in cut} == {2}


def test_stop_strings_end_a_completion(parts: Any) -> None:
    """'6' is token 9: a completion ends with the first of them, in the last place allowed too."""
    rows = draw(parts, 2, stop_strings=["6"])
    assert all(ended == (ids[-1] == 9) and 9 not in ids[:-1] for ids, ended in rows)
    assert {True, False} == {ended for _, ended in rows}
    assert draw(parts, 8, stop_strings="46") == [(ids[:2], True) if ids[:2] == (7, 9) else (ids, e)
                                                 for ids, e in draw(parts, 8)]  # fmt: skip
