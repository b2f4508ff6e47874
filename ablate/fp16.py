"""float16: what TRL and accelerate leave to their caller, so that GradScaler works, and what it skips."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback


def prepare(trainer: Any) -> None:
    """Makes a trainer with fp16=True ready, before its optimizer is made.

    GradScaler refuses float16 gradients and has no kernel for bfloat16 ones. On a CPU accelerate leaves autocast and
    scaling out without a word; here they are the same as on a GPU.

    Raises ValueError where the weights of the model itself are trained in half precision.
    """
    accelerator, model = trainer.accelerator, trainer.accelerator.unwrap_model(trainer.model)
    half = [p for p in model.parameters() if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)]
    if half:
        raise ValueError(
            f"fp16=True with trained weights in {half[0].dtype}: GradScaler wants float32 weights. Load the "
            "model in float32 (dtype=torch.float32), autocast does the rest, or train an adapter (peft_config)"
        )
    if accelerator.device.type == "cpu" and accelerator.scaler is None:
        accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")


class SkippedSteps(TrainerCallback):
    """Counts optimizer steps that GradScaler left out because a gradient was not finite.

    By its scale, which falls with each of them: accelerate's `optimizer_step_was_skipped` does not see what a fused
    optimizer skips in its own kernel.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler, self.count, self._scale = scaler, 0, 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._scale = self.scaler.get_scale()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += self.scaler.get_scale() < self._scale

    def flush(self) -> float:
        """Steps left out since the last flush."""
        count, self.count = self.count, 0
        return float(count)
