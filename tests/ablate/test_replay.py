"""Replays of short runs: held against gradients taken directly from full logits, and against what training logged."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import losses
from ablate import models
from ablate import replay_gradients as gradients
from ablate.models.tiny import tiny_tokenizer
from ablate.rundir import CellDir
from tests.ablate.replaying import PAD, Direct, agree, by_name, cell_of, cosine, run, train

FAMILY = losses.names()


@pytest.fixture(scope="module")
def last(full: Path) -> dict[str, Any]:
    return run(full, "variants=family")


@pytest.fixture(scope="module")
def first(full: Path) -> dict[str, Any]:
    return run(full, "variants=family", "step=1")


@pytest.fixture(scope="module")
def tiny() -> Any:
    return models.load("tiny")


def test_every_variant_against_direct_gradients(full: Path, last: dict[str, Any], tiny: Any) -> None:
    policy = AutoModelForCausalLM.from_pretrained(cell_of(full) / "rollouts" / "policy-000005")
    agree(last, Direct(full, 5, policy, tiny.build), FAMILY, 0.04)


def test_another_beta_off_policy_and_clipped(full: Path, tiny: Any) -> None:
    words = ("step=1", "policy=final", "beta=0.5", "epsilon=0.2", "variants=family")
    result = run(full, *words)
    assert result["policy"] == {"step": 5, "source": "rollouts/policy-000005", "off_policy": True}
    policy = AutoModelForCausalLM.from_pretrained(cell_of(full) / "rollouts" / "policy-000005")
    start = tiny.build()
    agree(result, Direct(full, 1, policy, lambda: start, drawn=start), FAMILY, 0.5, epsilon=0.2)
    found = by_name(result)
    assert found["reference"]["clip_fraction"] > 0
    assert found["reference"]["params"]["epsilon_high"] == 0.2
    assert result["training"] is None


def test_lora_off_policy_against_direct_gradients(lora: Path, tiny: Any) -> None:
    from peft import PeftModel

    names = ["reference", "no_detach", "gspo", "k3_is", "exact_reverse_kl", "exact_forward_kl", "kl_in_reward"]
    result = run(lora, f"variants={','.join(names)}", "step=3", "policy=5")
    folder = cell_of(lora) / "rollouts"
    policy = PeftModel.from_pretrained(tiny.build(), folder / "policy-000005", is_trainable=True)
    drawn = PeftModel.from_pretrained(tiny.build(), folder / "policy-000003")
    agree(result, Direct(lora, 3, policy, tiny.build, drawn=drawn), names, 0.04, epsilon=0.1)
    assert {layer["name"].rpartition(" ")[2] for layer in result["layers"]} == {"lora_A", "lora_B"}


@pytest.mark.parametrize("step", [1, 3, 5])
def test_the_gradient_is_the_trainers(full: Path, step: int) -> None:
    training = run(full, "variants=reference", f"step={step}")["training"]
    row = CellDir(cell_of(full)).metrics()[step - 1]
    assert training["grad_norm"] == row["grad_norm"] > 0
    assert training["replayed"] == pytest.approx(row["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_the_gradient_is_the_trainers_with_lora_clipping_and_accumulation(lora: Path, step: int) -> None:
    result = run(lora, "variants=reference", f"step={step}")
    row = CellDir(cell_of(lora)).metrics()[step - 1]
    assert result["training"]["replayed"] == pytest.approx(row["grad_norm"], rel=1e-4)
    assert [c["what"] for c in result["checks"]] == ["reference log-probs", "old log-probs"]


def test_at_the_start_the_kl_terms_of_reference_vanish(first: dict[str, Any]) -> None:
    found = by_name(first)
    for name in ("reference", "no_detach", "full_reverse_kl", "k2", "exact_reverse_kl"):
        assert found[name]["kl_norm"] == pytest.approx(0, abs=1e-7), name
    assert found["reference"]["kl_norm"] == found["reference"]["kl_share"] == 0
    assert cosine(first, "reference", "full_reverse_kl") == 1
    assert found["k1"]["kl_norm"] > 0
    assert found["no_detach"]["grad_norm"] == 0
    assert found["no_detach"]["surrogate_share"] is found["no_detach"]["kl_share"] is None
    assert {cosine(first, "no_detach", name) for name in FAMILY} == {None}


def test_matrices_and_shares(last: dict[str, Any]) -> None:
    for what, norm in (("cosine", "grad_norm"), ("cosine_kl", "kl_norm")):
        for i, (row, v) in enumerate(zip(last[what], last["variants"], strict=True)):
            assert row[i] == (1 if v[norm] > 0 else None)
            assert row == [other[i] for other in last[what]]
            assert all(c is None or -1 <= c <= 1 for c in row)
    found = by_name(last)
    assert found["no_detach"]["surrogate_norm"] == found["no_detach"]["surrogate_share"] == 0
    assert found["no_detach"]["kl_share"] == 1
    assert cosine(last, "reference", "no_detach", "cosine_kl") == 1  # one KL term
    for v in last["variants"]:
        assert v["surrogate_share"] + v["kl_share"] == pytest.approx(1)
        ends = v["surrogate_norm"] ** 2 + v["kl_norm"] ** 2
        across = 2 * v["surrogate_norm"] * v["kl_norm"] * (v["cosine_surrogate_kl"] or 0)
        assert v["grad_norm"] ** 2 == pytest.approx(ends + across, rel=1e-9)


def test_layer_groups_hold_every_parameter(last: dict[str, Any]) -> None:
    sizes = {layer["name"]: layer["parameters"] for layer in last["layers"]}
    assert sum(sizes.values()) == last["parameters"] == 84_160
    assert set(sizes) == {
        "embeddings", "head", "norms", "block 0 attention", "block 0 MLP", "block 1 attention", "block 1 MLP",
    }  # fmt: skip
    for v in last["variants"]:
        assert sum(x**2 for x in v["norm_by_group"].values()) == pytest.approx(v["grad_norm"] ** 2, rel=1e-9)


def test_token_weights(first: dict[str, Any], full: Path) -> None:
    """On-policy the surrogate's d loss / d n is -A times the token's weight, 1 / (length x completions)."""
    rows = pd.read_parquet(cell_of(full) / "rollouts" / "step-000001.parquet")
    weight = by_name(first)["reference"]["token_weight"]
    total, count = rows["completion_ids"].map(len).sum(), len(rows)
    for name, chosen in (("positive", rows["advantage"] > 0), ("negative", rows["advantage"] < 0)):
        tokens = rows[chosen]["completion_ids"].map(len)
        expected = rows[chosen]["advantage"].abs().sum() / count * total / tokens.sum()
        assert weight["by_sign"][name]["tokens"] == tokens.sum()
        assert weight["by_sign"][name]["mean"] == pytest.approx(expected, rel=1e-5)
    assert sum(sign["share"] for sign in weight["by_sign"].values()) == pytest.approx(1)
    assert first["position_bins"] == [(i, i + 1) for i in range(rows["completion_ids"].map(len).max())]
    assert len(weight["by_position"]) == len(first["position_bins"])


def test_little_memory_and_small_micro_batches_change_nothing(
    full: Path, last: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = []
    original = gradients._gradients
    monkeypatch.setattr(gradients, "_gradients", lambda *a: blocks.append(len(a[3])) or original(*a))
    monkeypatch.setattr(gradients.psutil, "virtual_memory", lambda: type("M", (), {"available": 4_000_000})())
    result = run(full, "variants=family", "micro_batch_size=3")
    assert len(blocks) > 3 and sum(blocks) == 21  # parameters of the tiny model
    for a, b in zip(result["variants"], last["variants"], strict=True):
        for key in ("grad_norm", "surrogate_norm", "kl_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-6), (a["name"], key)


def test_equal_derivatives_share_a_backward_pass(last: dict[str, Any]) -> None:
    assert last["backward_passes"] < len(last["variants"]) + 6


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(tmp_path: Path, dtype: str) -> None:
    folder = train(tmp_path, f"train.dtype={dtype}", "train.steps=2", "train.adapter_every=1", "train.rollouts_every=1")
    result = run(folder, "variants=reference,exact_reverse_kl")
    assert result["step"] == 2
    assert result["training"]["relative_difference"] < 0.05
    assert all(math.isfinite(v["grad_norm"]) for v in result["variants"])


ONE_STEP = ("train.steps=1", "train.rollouts_every=1", "train.adapter_every=1", "variants=k1")


def test_a_head_tied_to_the_embeddings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=15, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True, pad_token_id=PAD, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer("heldout").save_pretrained(tmp_path / "model")
    result = run(train(tmp_path / "run", f"model={tmp_path / 'model'}", *ONE_STEP), "variants=k1,exact_reverse_kl")
    assert result["training"]["grad_norm"] > 0 and result["training"]["relative_difference"] < 1e-5
    assert [layer["name"] for layer in result["layers"] if layer["kind"] == "embeddings"] == ["embeddings and head"]


def test_lora_with_a_trained_head(tmp_path: Path) -> None:
    folder = train(tmp_path, "train.lora=true", "peft.modules_to_save=[lm_head]", *ONE_STEP)
    result = run(folder, "variants=k1,exact_reverse_kl")
    assert result["training"]["grad_norm"] > 0 and result["training"]["relative_difference"] < 1e-5
    assert {"name": "head", "kind": "head", "parameters": 15 * 64} in result["layers"]
    assert by_name(result)["k1"]["norm_by_group"]["head"] > 0


def test_the_reference_backend(tmp_path: Path) -> None:
    result = run(train(tmp_path, "loss.backend=reference", *ONE_STEP), "variants=k1,exact_forward_kl,gspo")
    assert result["training"]["relative_difference"] < 1e-5


@pytest.mark.parametrize(
    ("name", "group", "kind"),
    [
        ("model.embed_tokens.weight", "embeddings", "embeddings"),
        ("model.layers.11.self_attn.q_proj.weight", "block 11 attention", "attention"),
        ("model.layers.11.self_attn.q_norm.weight", "norms", "norms"),
        ("model.layers.0.post_attention_layernorm.weight", "norms", "norms"),
        ("transformer.h.3.mlp.c_fc.bias", "block 3 MLP", "MLP"),
        ("transformer.h.3.ln_1.bias", "norms", "norms"),
        ("transformer.wpe.weight", "embeddings", "embeddings"),
        ("model.norm.weight", "norms", "norms"),
        ("lm_head.bias", "head", "head"),
        (
            "base_model.model.model.layers.2.mlp.up_proj.lora_A.default.weight",
            "block 2 MLP lora_A",
            "MLP",
        ),
        ("visual.projector.weight", "other", "other"),
    ],
)
def test_layer_group(name: str, group: str, kind: str) -> None:
    assert gradients.layer_group(name) == group
    assert gradients.kind_of(group) == kind


def test_tied_head_is_one_group() -> None:
    group = gradients.layer_group("model.embed_tokens.weight", head=True, tied=True)
    assert group == "embeddings and head" and gradients.kind_of(group) == "embeddings"
