"""Which rollout engine a cell uses, built from its config."""

from __future__ import annotations

from typing import Any

from ablate import resolve
from ablate.config import Config
from ablate.rollout import Engine

# GRPOConfig fields that say how completions are drawn, under GenerationConfig's names
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def get(config: Config, trainer: Any) -> Engine:
    """The engine that `rollout=` asks for, for a trainer. Raises ConfigError where it cannot be had."""
    from ablate.rollout.transformers import TransformersEngine

    resolve.rollout(config.rollout, trainer.model.device.type)
    args = trainer.args
    sampling = {name: getattr(args, name) for name in SAMPLING_FIELDS}
    return TransformersEngine(
        trainer.processing_class,
        eos_token_ids=trainer.eos_token_ids,
        max_completion_length=args.max_completion_length,
        sampling={**sampling, **config.sampling},
        batch_size=args.per_device_train_batch_size,
    )
