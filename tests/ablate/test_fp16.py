"""float16 with GradScaler, on a CPU: gradients unscaled in the logs, skipped steps counted, float32 where needed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig

from ablate.models.tiny import tiny_tokenizer
from ablate.trainer import AblationTrainer
from tests.ablate.test_cell import numbers, run
from tests.ablate.training import PROMPTS, Scripted, digits, history, make, weights

CELL = ("train.dtype=float16", "train.steps=4", "train.exact_kl_every=2", "learning_rate=5e-3")
LORA = ("train.lora=true", "peft.r=4")


def train(folder: Path, out: Path, **options: Any) -> Any:
    trainer = make(AblationTrainer, folder, out, loss_variant="reference", engine=Scripted(), **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("max_grad_norm", [0.2, 0.0])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradient_norms_are_those_without_scaling(
    folder: Path, tmp_path: Path, lora: bool, max_grad_norm: float
) -> None:
    config = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": max_grad_norm}
    single = train(folder, tmp_path / "32", lora=lora, config=config)
    half = train(folder, tmp_path / "16", lora=lora, config={**config, "fp16": True})
    assert half.accelerator.scaler.get_scale() == 2**16
    assert history(half, "skipped_steps") == [0.0] * 3 and not history(single, "skipped_steps")
    for key in ("grad_norm", "loss", "weight_distance"):
        assert history(half, key) == pytest.approx(history(single, key), rel=0.02, abs=2e-4), key
    assert history(half, "loss") != history(single, "loss")  # autocast is on


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_a_skipped_step_is_counted_and_moves_nothing(folder: Path, tmp_path: Path, optim: str) -> None:
    class Overflow(TrainerCallback):
        """Plants an infinity in the second step's gradients, before they are unscaled."""

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            parameter = next(p for p in model.parameters() if p.requires_grad)
            if state.global_step == 1:
                parameter.register_hook(lambda g: g * math.inf if trainer.state.global_step == 1 else g)

    config = {"fp16": True, "max_steps": 4, "optim": optim, "learning_rate": 1e-2}
    trainer = make(
        AblationTrainer, folder, tmp_path, lora=True, loss_variant="reference", engine=Scripted(), config=config,
        callbacks=[Overflow()],
    )  # fmt: skip
    trainer.train()
    assert history(trainer, "skipped_steps") == [0.0, 1.0, 0.0, 0.0]
    first, second, third, _ = history(trainer, "weight_distance")
    assert first == second < third
    assert [math.isfinite(norm) for norm in history(trainer, "grad_norm")] == [True, False, True, True]
    assert trainer.accelerator.scaler.get_scale() == 2**15

    trainer = make(
        AblationTrainer, folder, tmp_path, lora=True, loss_variant="reference", engine=Scripted(),
        config={**config, "logging_steps": 2}, callbacks=[Overflow()],
    )  # fmt: skip
    trainer.train()
    assert history(trainer, "skipped_steps") == [1.0, 0.0]


def test_half_precision_weights_of_the_model_are_not_trained(folder: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"float16.*float32.*peft_config"):
        AblationTrainer(
            model=model, reward_funcs=[digits], args=GRPOConfig(str(tmp_path), use_cpu=True, fp16=True, bf16=False),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}), processing_class=tiny_tokenizer("heldout"),
        )  # fmt: skip


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16])
def test_what_an_adapter_trains_is_float32(
    folder: Path, tmp_path: Path, given: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-precision base with a trained copy of the head, and adapters in bfloat16, as TRL leaves them on 4 bits."""
    load = LlamaForCausalLM.from_pretrained

    def adapted(path: Any) -> Any:
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        model = get_peft_model(load(path, dtype=torch.float16), lora)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(given)
        return model

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", adapted)
    trainer = make(
        AblationTrainer, folder, tmp_path, loss_variant="reference", engine=Scripted(),
        config={"fp16": True, "learning_rate": 1e-2},
    )  # fmt: skip
    trained = {name: p.dtype for name, p in trainer.model.named_parameters() if p.requires_grad}
    frozen = {p.dtype for n, p in trainer.model.named_parameters() if not p.requires_grad and ".ref." not in n}
    assert any("lm_head" in name for name in trained) and set(trained.values()) == {torch.float32}
    assert frozen == {torch.float16}
    before = weights(trainer)
    trainer.train()
    assert history(trainer, "skipped_steps") == [0.0] * 3
    assert all(not torch.equal(before[name], weights(trainer)[name]) for name in trained)


@pytest.mark.parametrize("options", [LORA, ()], ids=["lora", "full"])
def test_a_cell_in_float16_resumes_with_its_scale(tmp_path: Path, options: tuple[str, ...]) -> None:
    class Killed(BaseException):
        pass

    def stop(done: int, total: int, row: dict[str, Any]) -> None:
        if done == 3:
            raise Killed

    whole, _ = run(tmp_path / "a", *CELL, *options)
    rows = whole.metrics()
    # The model is made on this machine; for some of them GradScaler's first scale is too large, and is halved once.
    skipped = [row["skipped_steps"] for row in rows]
    assert skipped in ([0.0] * 4, [1.0, 0.0, 0.0, 0.0])
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows if not row["skipped_steps"])
    assert rows[1]["kl_exact/reverse"] == 0 < rows[3]["kl_exact/reverse"]
    with pytest.raises(Killed):
        run(tmp_path / "b", *CELL, *options, on_step=stop)
    resumed, _ = run(tmp_path / "b", *CELL, *options)
    assert numbers(resumed) == numbers(whole)
