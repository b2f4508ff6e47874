"""What AblationTrainer measures against its reference, and where it has none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from trl.trainer import grpo_trainer

from ablate import config as configs
from ablate.errors import ConfigError
from ablate.generation import loss_mask
from ablate.models.tiny import TinySettings, tiny_model
from ablate.rollout import Rollout
from ablate.scoring import ScoringTrainer
from ablate.trainer import AblationTrainer
from tests.ablate.training import Scripted, history, make, weights

DIRECTIONS = ("kl_exact/reverse", "kl_exact/forward")
ACCUMULATED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "mask_truncated_completions": True}


class Watched(AblationTrainer):
    """Keeps the divergences of every step as plain softmax over full logits gives them, in float64."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sums: dict[int, Tensor] = {}

    @torch.no_grad()
    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        with torch.random.fork_rng():
            own = self._log_softmax(self.model, inputs)
            with self._reference() as reference:
                ref = self._log_softmax(reference, inputs)
        mask = loss_mask(inputs).double()
        kls = [((a.exp() * (a - b)).sum(-1) * mask).sum() for a, b in ((own, ref), (ref, own))]
        step = self.state.global_step + 1
        self.sums[step] = self.sums.get(step, torch.zeros(3)) + torch.stack([*kls, mask.sum()])
        with torch.enable_grad():
            return super()._compute_loss(model, inputs)

    def _log_softmax(self, model: Any, inputs: Any) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logits = model(input_ids=ids, attention_mask=attention).logits.double() / self.temperature
        return logits.log_softmax(-1)[:, -inputs["completion_ids"].shape[1] - 1 : -1]


@pytest.mark.parametrize(
    ("lora", "variant", "config"),
    [
        (False, "reference", ACCUMULATED),
        (True, "reference", {"beta": 0.0, "learning_rate": 0.05}),
        (False, "exact_forward_kl", {"temperature": 0.7}),
    ],
    ids=["accumulation", "lora, beta 0", "exact variant, temperature"],
)
def test_exact_kl_is_that_of_full_logits(
    folder: Path, tmp_path: Path, lora: bool, variant: str, config: dict[str, Any]
) -> None:
    trainer = make(
        Watched, folder, tmp_path, lora=lora, loss_variant=variant, engine=Scripted(), exact_kl_every=2,
        config={"max_steps": 4, "learning_rate": 1e-2, **config},
    )  # fmt: skip
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [all(name in row for name in DIRECTIONS) for row in rows] == [False, True, False, True]
    assert not any("kl_exact" in name for row in rows[::2] for name in row)
    for step in (2, 4):
        *sums, count = trainer.sums[step].tolist()
        for name, total in zip(DIRECTIONS, sums, strict=True):
            assert total > 0
            assert rows[step - 1][name] == pytest.approx(total / count, rel=1e-3), (step, name)
    assert [row["time/exact_kl"] > 0 for row in rows] == [False, True, False, True]
    reverse, forward = (history(trainer, name)[-1] for name in DIRECTIONS)
    assert reverse != pytest.approx(forward, rel=1e-2)


@pytest.mark.parametrize(
    ("lora", "variant", "config"),
    [
        (False, "reference", ACCUMULATED),
        (True, "reference", {}),
        (True, "k3_is", {"beta": 0.0, "num_iterations": 2}),
        (False, "exact_reverse_kl", {}),
    ],
    ids=["accumulation", "lora", "lora, beta 0", "exact variant"],
)
def test_exact_kl_changes_no_number(
    folder: Path, tmp_path: Path, lora: bool, variant: str, config: dict[str, Any]
) -> None:
    """Bit for bit, with dropout, TRL's own sampling and thus every draw of the global generator in play."""
    dropping = tmp_path / "model"
    LlamaForCausalLM.from_pretrained(folder, attention_dropout=0.2).save_pretrained(dropping)
    runs: list[Any] = []
    for every in (0, 1):
        trainer = make(
            AblationTrainer, dropping, tmp_path / str(every), lora=lora, loss_variant=variant, exact_kl_every=every,
            config={"learning_rate": 1e-2, **config},
        )  # fmt: skip
        trainer.train()
        runs.append(trainer)
    assert [len(history(run, "kl_exact/reverse")) for run in runs] == [0, 3]
    for key in ("loss", "grad_norm", "reward", "entropy", "weight_distance", "completions/mean_length"):
        assert history(runs[0], key) == history(runs[1], key), key
    assert all(torch.equal(a, b) for a, b in zip(*(weights(run).values() for run in runs), strict=True))


def test_without_a_reference_the_exact_kl_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"exact_kl_every=5: .*no reference.*peft_config"):
        make(AblationTrainer, folder, tmp_path, loss_variant="reference", exact_kl_every=5, config={"beta": 0.0})
    with pytest.raises(ValueError, match="exact_kl_every=-1"):
        make(AblationTrainer, folder, tmp_path, loss_variant="reference", exact_kl_every=-1)
    for overrides in (["beta=0"], ["grid.beta=0,0.04"]):
        with pytest.raises(ConfigError, match=r"train.exact_kl_every=10: .*set train.exact_kl_every=0"):
            configs.load(overrides)
        configs.load([*overrides, "exact_kl_every=0"])
        configs.load([*overrides, "train.lora=true"])


def test_a_model_that_was_never_saved_has_no_reference(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL loads the reference from where the model came from; without it says so, beta=0 and LoRA work."""

    def built(path: Any) -> LlamaForCausalLM:
        model = tiny_model(TinySettings())
        assert not model.config._name_or_path
        return model

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", built)
    with pytest.raises(ValueError, match=r"beta=0.1: .*save_pretrained"):
        make(AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Scripted())
    for lora, config in ((False, {"beta": 0.0}), (True, {})):
        trainer = make(
            AblationTrainer, folder, tmp_path, lora=lora, loss_variant="reference", engine=Scripted(), config=config
        )
        trainer.train()
        assert len(history(trainer, "loss")) == 3


class InProcess:
    """What TRL makes of its vLLM: scripted completions and log-probs."""

    every = 1  # steps between generations

    def __init__(self, **kwargs: Any) -> None:
        self.synced, self.drawn = 0, 0

    def sync_weights(self) -> None:
        time.sleep(0.05)
        self.synced += 1

    def generate(self, prompts: Any, **kwargs: Any) -> Any:
        rollout = Sampled().generate(None, prompts, seed=0, step=self.drawn * self.every, num_generations=4)
        self.drawn += 1
        return None, rollout.completion_ids, [[[x] for x in row] for row in rollout.logps or []], None


class Sampled(Scripted):
    """Scripted completions with log-probs."""

    def generate(self, *args: Any, **kwargs: Any) -> Rollout:
        rows = super().generate(*args, **kwargs).completion_ids
        return Rollout(rows, [[-1.5 - 0.1 * i for i in range(len(row))] for row in rows])


@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_nothing_is_scored_twice_under_trls_own_vllm(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_per_generation: int
) -> None:
    """Passes of policy and reference, and all figures, are those of an engine that draws the same."""
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", InProcess)
    monkeypatch.setattr(InProcess, "every", steps_per_generation)
    passes: list[tuple[str, str]] = []
    with_head = ScoringTrainer._with_head

    def counted(self: Any, model: Any, *args: Any) -> Any:
        passes.append((self.run, "reference" if model is self.ref_model else "policy"))
        return with_head(self, model, *args)

    monkeypatch.setattr(ScoringTrainer, "_with_head", counted)
    runs: list[Any] = []
    for name, engine in (("engine", Sampled()), ("vllm", None)):
        config = {"steps_per_generation": steps_per_generation, "per_device_train_batch_size": 16, "max_steps": 3}
        config |= {"vllm_importance_sampling_mode": "sequence_truncate", "use_vllm": engine is None}
        trainer = make(
            AblationTrainer, folder, tmp_path / name, loss_variant="reference", engine=engine,
            config={**config, "num_generations": 4, "learning_rate": 1e-2},
        )  # fmt: skip
        trainer.run = name
        trainer.train()
        assert trainer.vllm_importance_sampling_correction
        runs.append(trainer)
    count = {key: passes.count(key) for key in set(passes)}
    assert count["vllm", "reference"] == count["engine", "reference"] > 0
    assert count["vllm", "policy"] == count["engine", "policy"] > 0
    rows = [[row for row in run.state.log_history if "loss" in row] for run in runs]
    clock = ("time/", "step_time", "tokens_per_second", "peak_memory", "memory/")
    for ours, trls in zip(*rows, strict=True):
        assert {k: v for k, v in trls.items() if not k.startswith(clock)} == {
            k: v for k, v in ours.items() if not k.startswith(clock)
        }
        assert trls["sampling/importance_sampling_ratio/mean"] != 1
    drawn = runs[1].vllm_generation.drawn
    assert runs[1].vllm_generation.synced == drawn == -(-3 // steps_per_generation)
    assert sum(row["time/sync"] for row in rows[1]) == pytest.approx(0.05 * drawn, rel=0.3)
