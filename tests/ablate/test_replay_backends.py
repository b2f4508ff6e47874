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
from ablate.models.tiny import TinySettings, tiny_model, tiny_tokenizer
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
        for norms in row["grad_norm"].values():
            assert norms["model"] == pytest.approx(want, rel=1e-4, abs=1e-6), row["name"]
        (pair,) = row["pairs"]
        assert pair["backends"] == ["chunked", "reference"]
        assert list(pair["relative"]) == ["model", "hidden", "lm_head_weight"] == list(row["grad_norm"]["chunked"])
        assert max(pair["relative"].values()) < 1e-5 and pair["log_probs"] < 1e-5
        assert row["loss"]["chunked"] == pytest.approx(row["loss"]["reference"], abs=1e-6)


def test_off_policy_with_an_adapter_and_micro_batches(lora: Path) -> None:
    words = ("step=3", "policy=5", "variants=reference,gspo,exact_forward_kl,kl_in_reward_token")
    result = compare(lora, *words, "backends=chunked,reference", "micro_batch_size=3")
    expected = by_name(run(lora, *words))
    assert result["within"] and result["policy"]["off_policy"]
    for row in result["variants"]:
        assert row["grad_norm"]["chunked"]["model"] == pytest.approx(expected[row["name"]]["grad_norm"], rel=1e-4)


DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture(scope="module", params=DTYPES)
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A dtype, and an experiment on a random Llama of 30 layers, each of which rounds what the backward passes down."""
    root = tmp_path_factory.mktemp("deep")
    tiny_model(TinySettings(layers=30, initializer_range=0.4)).save_pretrained(root / "model")
    tiny_tokenizer("heldout").save_pretrained(root / "model")
    words = ("train.steps=2", "train.adapter_every=1", "train.rollouts_every=1", "train.lora=true")
    return request.param, train(root / "runs", f"model={root / 'model'}", f"train.dtype={request.param}", *words)


WORDS = ("variants=reference,exact_reverse_kl,gspo", "backends=chunked,reference")


def largest(result: dict[str, Any], name: str) -> float:
    return max(pair["relative"][name] for row in result["variants"] for pair in row["pairs"])


def test_right_backends_pass_with_a_deep_model(deep: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, folder = deep
    result = compare(folder, *WORDS)
    limit = replay_backends.LIMIT[dtype]
    assert result["within"] and result["limit"] == limit
    assert largest(result, "hidden") < limit / 3
    if dtype != "float32":
        assert result["held"] == ["hidden"]
        assert largest(result, "model") > limit  # of the model's own making
        return
    # float32: the whole model's gradient is held to the limit too.
    between = (largest(result, "hidden") * largest(result, "model")) ** 0.5
    assert largest(result, "hidden") < between < largest(result, "model")
    monkeypatch.setitem(replay_backends.LIMIT, dtype, between)
    assert not compare(folder, *WORDS)["within"]


def test_two_percent_of_d_hidden_fail_with_a_deep_model(
    deep: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = chunked._u
    monkeypatch.setattr(chunked, "_u", lambda *a: right(*a).mul_(1.02))
    result = compare(deep[1], *WORDS)
    assert not result["within"] and not any(row["within"] for row in result["variants"])
    assert 0.018 < largest(result, "hidden") < 0.022


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_percent_of_a_trained_heads_gradient_fail(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(tmp_path, f"train.dtype={dtype}", "train.steps=1", "train.rollouts_every=1", "train.adapter_every=1")
    assert compare(folder, *WORDS)["within"]
    right = chunked._add_weight_grad
    monkeypatch.setattr(chunked, "_add_weight_grad", lambda out, head, ops, c, g: right(out, head, ops, c, g * 1.02))
    result = compare(folder, *WORDS)
    assert not any(row["within"] for row in result["variants"])
    assert largest(result, "hidden") < replay_backends.LIMIT[dtype] and largest(result, "lm_head_weight") > 0.018


@pytest.mark.parametrize("lora", ["true", "false"])
def test_small_float16_gradients_do_not_underflow(tmp_path: Path, lora: str) -> None:
    """As of a loss that is divided by many tokens: trained weights are in float32, the products are not."""
    words = ("train.steps=1", "train.rollouts_every=1", "train.adapter_every=1", f"train.lora={lora}")
    folder = train(tmp_path, "train.dtype=float16", *words)
    result = compare(folder, "variants=dr_grpo", "max_completion_length=1000000", "backends=chunked,reference")
    assert result["within"] and 0 < result["variants"][0]["grad_norm"]["chunked"]["model"] < 1e-4


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
    console = Console(record=True, width=200)
    assert replay.main(words, console) == 1
    assert "NOT within the limit: reference, gspo." in console.export_text()
    wrong = json.loads((written / "backends.json").read_text())
    assert not wrong["within"]
    for row in wrong["variants"]:
        relative = row["pairs"][0]["relative"]
        assert (
            not row["within"] and 2e-4 < relative["model"] < 2e-3 and relative["hidden"] == pytest.approx(1e-3, rel=0.1)
        )


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


def test_a_gradient_near_zero_is_compared_with_the_largest_one() -> None:
    def row(norm: float, difference: float) -> dict[str, Any]:
        pair = {"backends": ["chunked", "reference"], "relative": {"hidden": difference}}
        return {"grad_norm": {name: {"hidden": norm} for name in pair["backends"]}, "pairs": [pair]}

    rows = [row(2.0, 1e-6), row(1e-12, 1e-9), row(0.0, 0.0)]
    replay_backends._divide(rows)
    found = [one["pairs"][0]["relative"]["hidden"] for one in rows]
    assert found == pytest.approx([5e-7, 1e-9 / (2.0 * 1e-3), 0.0])
    nothing = [row(0.0, 0.0)]
    replay_backends._divide(nothing)
    assert nothing[0]["pairs"][0]["relative"] == {"hidden": 0.0}
