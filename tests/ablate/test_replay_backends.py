"""Gradients of stored rollouts through several loss backends: equal where they are, and refused where one is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import losses
from ablate import replay, replay_backends
from ablate.errors import ConfigError
from losses.backends import chunked
from tests.ablate.replaying import by_name, copied, run, train


def compare(folder: Path, *words: str) -> dict[str, Any]:
    return replay_backends.compare(replay.parse([f"run={folder}", *words]))


def test_every_variant_is_the_replays_own(full: Path) -> None:
    """Two computations of a gradient norm: from dot products of parts, and from the trainer's own call."""
    result = compare(full, "variants=family", "backends=chunked,reference")
    expected = by_name(run(full, "variants=family"))
    assert result["within"] and result["limit"] == 1e-4
    assert [row["name"] for row in result["variants"]] == losses.names() == list(expected)
    for row in result["variants"]:
        want = expected[row["name"]]["grad_norm"]
        for norm in row["grad_norm"].values():
            assert norm == pytest.approx(want, rel=1e-4, abs=1e-6), row["name"]
        (pair,) = row["pairs"]
        assert pair["backends"] == ["chunked", "reference"]
        assert pair["relative"] < 1e-5 and pair["log_probs"] < 1e-5
        assert row["loss"]["chunked"] == pytest.approx(row["loss"]["reference"], abs=1e-6)


def test_off_policy_with_an_adapter_and_micro_batches(lora: Path) -> None:
    words = ("step=3", "policy=5", "variants=reference,gspo,exact_forward_kl,kl_in_reward_token")
    result = compare(lora, *words, "backends=chunked,reference", "micro_batch_size=3")
    expected = by_name(run(lora, *words))
    assert result["within"] and result["policy"]["off_policy"]
    for row in result["variants"]:
        assert row["grad_norm"]["chunked"] == pytest.approx(expected[row["name"]]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tmp_path: Path, dtype: str) -> None:
    words = ("train.steps=2", "train.adapter_every=1", "train.rollouts_every=1", "train.lora=true")
    folder = train(tmp_path, f"train.dtype={dtype}", *words)
    result = compare(folder, "variants=reference,exact_reverse_kl", "backends=chunked,reference")
    assert result["within"] and result["limit"] == replay_backends.LIMIT[dtype]
    assert all(row["grad_norm"]["chunked"] > 0 for row in result["variants"])


def test_files_and_exit_code(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(full, tmp_path)
    words = [f"run={folder}", "variants=reference,gspo", "backends=chunked,reference"]
    console = Console(record=True, width=200)
    assert replay.main(words, console) == 0
    written = folder / "replay" / "step-000005"
    result = json.loads((written / "backends.json").read_text())
    assert result["within"] and result["step"] == 5 and result["provenance"]["command"]
    page = (written / "backends.md").read_text()
    assert "chunked - reference" in page and "| gspo" in page and "| gspo" not in console.export_text()

    right = chunked._u
    monkeypatch.setattr(chunked, "_u", lambda *a: right(*a).mul_(1.001))
    # With a trained head the gradients come from the log-probs' backward, which asks the same function.
    assert replay.main(words, Console(record=True, width=200)) == 1
    wrong = json.loads((written / "backends.json").read_text())
    assert not wrong["within"]
    assert all(2e-4 < row["pairs"][0]["relative"] < 2e-3 for row in wrong["variants"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["backends=chunked"], "two or more"),
        (["backends=chunked,chunked"], "two or more"),
        (["backends=chunkd,reference"], "chunked"),
        pytest.param(
            ["backends=triton,chunked"],
            "CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_refusals(words: list[str], said: str, full: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        compare(full, *words)
