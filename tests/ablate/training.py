"""Small trainers on scripted completions, ours and stock TRL's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

from ablate.models.tiny import tiny_tokenizer
from ablate.rollout import Rollout, derive_seed

PROMPTS = ["01+02=", "11+07=", "23+19=", "40+09=", "33+12=", "05+05=", "49+49=", "10+31="]


class Scripted:
    """An engine whose completions depend on step and row alone, so that two trainers see the same ones."""

    name = "scripted"

    def __init__(self, empty: bool = False, length: int = 4) -> None:
        self.empty, self.length = empty, length

    def generate(
        self, model: Any, prompt_ids: list[list[int]], *, seed: int, step: int, num_generations: int
    ) -> Rollout:
        g = torch.Generator().manual_seed(1000 + step)
        rows = []
        for row in range(len(prompt_ids)):
            n = int(torch.randint(1, self.length + 1, (1,), generator=g))
            ids = torch.randint(3, 13, (n,), generator=g).tolist()
            rows.append([] if self.empty and row % 3 == 0 else [*ids[: n - 1], 1] if row % 2 else ids)
        return Rollout(rows)

    def greedy(self, model: Any, prompt_ids: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        return [[1] for _ in prompt_ids]

    def close(self) -> None: ...


class StockScripted(GRPOTrainer):
    """Stock TRL with the same completions and the same shuffle of each batch; nothing else is changed."""

    def _prepare_inputs(self, generation_batch):
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            set_seed(derive_seed(self.args.seed, "step", self.state.global_step, 0) % 2**32)
        return super()._prepare_inputs(generation_batch)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        rows = Scripted().generate(None, prompt_ids, seed=0, step=self.state.global_step, num_generations=4)
        return rows.completion_ids, None


def digits(prompts, completions, **kwargs):
    return [float(sum(c.isdigit() for c in text)) / 3 for text in completions]


def even(prompts, completions, **kwargs):
    return [None if not text else float(text[-1] in "02468") - 0.3 for text in completions]


def letters(prompts, completions, **kwargs):
    """Differs between completions, which GSM8K's own rewards on so few tokens do not."""
    return [float(len(set(str(c)))) for c in completions]


def make(kind: type, folder: Path, out: Path, *, lora: bool = False, reward_funcs=None, config=None, **kwargs: Any):
    values = {
        "output_dir": str(out), "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "seed": 3,
        "per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 4, "max_steps": 3,
        "beta": 0.1, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no",
        "use_bias_correction_kl": False, "gradient_checkpointing": False, **(config or {}),
    }  # fmt: skip
    peft_config = None
    if lora:
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return kind(
        model=LlamaForCausalLM.from_pretrained(folder),
        reward_funcs=reward_funcs or [digits, even],
        args=GRPOConfig(**values),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tiny_tokenizer("heldout"),
        peft_config=peft_config,
        **kwargs,
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def history(trainer: Any, key: str) -> list[float]:
    return [row[key] for row in trainer.state.log_history if key in row]
