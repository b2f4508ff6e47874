"""An engine of the tiny model, adapters to draw with, and the log-probs that transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from ablate.rollout import vllm_live
from ablate.rollout import vllm_memory as memory
from ablate.rollout.vllm import Spec, VllmEngine

PROMPT = [4, 5, 13, 6, 7, 14]  # 12+34=
EOS = 1


def live_engine(folder: Path, rank: int, **options: Any) -> vllm_live.Live:
    need = memory.Need(sequences=64, prompt=8, completion=24)
    return vllm_live.acquire(Spec(folder, "tiny", torch.float32, torch.device("cpu"), rank, need, options))


def engine(live: vllm_live.Live, length: int = 4, **options: Any) -> VllmEngine:
    return VllmEngine(live, eos_token_ids=[EOS], max_completion_length=length, options=options)


def adapted(model: Any, scale: float = 0.0, **options: Any) -> Any:
    values = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(**values))
    move(model, scale)
    return model


def move(model: Any, scale: float) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.add_(torch.randn_like(p) * scale)


def own_logps(model: Any, prompt: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)


def compare(model: Any, rollout: Any, temperature: float = 1.0) -> tuple[float, torch.Tensor]:
    """(largest difference of a token's log-prob, sequence ratios trainer / sampler)."""
    worst, ratios = 0.0, []
    for ids, logps in zip(rollout.completion_ids, rollout.logps, strict=True):
        difference = own_logps(model, PROMPT, ids, temperature) - torch.tensor(logps, dtype=torch.float64)
        worst = max(worst, difference.abs().max().item())
        ratios.append(difference.sum().exp())
    return worst, torch.stack(ratios)


def draw(e: VllmEngine, model: Any, rows: int = 32, seed: int = 0, step: int = 0) -> Any:
    return e.generate(model, [PROMPT] * rows, seed=seed, step=step, num_generations=8)
