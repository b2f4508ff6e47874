"""Which rollout engine a cell uses, built from its config; with vLLM the engine comes before the trainer's model."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate import keys, resolve, status
from ablate.errors import ConfigError
from ablate.rollout import Engine

if TYPE_CHECKING:
    from ablate.config import Config
    from ablate.rollout.vllm_live import Live, Spec

LONGEST_LOOKED_AT = 512  # prompts, the longest by characters, that are tokenised to find the longest
FULL_STATE_BYTES = 12  # a trained parameter with its two moments, in float32


def start(config: Config, loaded: Any, args: Any, prompts: list[Any]) -> tuple[Any, Live | None]:
    """(model for the trainer, vLLM engine or None) of a cell.

    loaded: the cell's `models.LoadedModel`. args: its GRPOConfig. prompts: the dataset's. With LoRA on an unquantised
    base the model's weights are the engine's; elsewhere the model is built from its folder. Raises ConfigError, and
    EngineError where vLLM does not start.
    """
    if resolve.rollout(config.rollout, config.device).name != "vllm":
        return loaded.build(), None
    check_dtype(config)
    from ablate.rollout import vllm_live
    from ablate.rollout.vllm_share import CannotShare

    live = vllm_live.acquire(vllm_spec(config, loaded, args, prompts))
    try:
        model, why, live.shared = live.shared_model(), "one copy, in the engine", True
        told = f"base weights, {_size(model)}, held once for engine and trainer"
    except CannotShare as refusal:
        model, why, live.shared = loaded.build(), str(refusal), False
        told = f"the trainer has base weights of its own, {_size(model)}: {why}"
    if live.notes.get("base_weights_why") != why:
        status.note(f"vLLM: {told}")
    live.notes["base_weights_why"] = why
    return model, live


def _size(model: Any) -> str:
    return f"{sum(p.numel() * p.element_size() for p in model.parameters()) / (1 << 20):,.1f} MiB"


def vllm_spec(config: Config, loaded: Any, args: Any, prompts: list[Any]) -> Spec:
    """What a cell needs of a vLLM engine."""
    import torch
    from transformers import AutoConfig

    from ablate.rollout import vllm_memory, vllm_sync
    from ablate.rollout.vllm_live import Spec

    rank = _rank(config)
    folder = Path(loaded.path)
    dtype = getattr(torch, config.train.dtype)
    checkpoint = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    stored = (getattr(checkpoint, "quantization_config", None) or {}).get("quant_method")
    quantization = check_quantization(config, stored)
    parameters = vllm_memory.parameters_of(checkpoint)
    shared = rank and config.vllm.get("share_weights") is not False and not quantization
    own_bytes = vllm_memory.BYTES_IN_4BIT if config.train.load_in_4bit else dtype.itemsize if rank else FULL_STATE_BYTES
    reserve = 0 if shared else int(parameters * own_bytes)
    if rank:
        vllm_sync.max_rank(rank)
    return Spec(
        folder=folder,
        weights=loaded.sha256,
        dtype=dtype,
        device=torch.device(args.device if str(args.device) != "cuda" else "cuda:0"),
        rank=rank,
        need=vllm_memory.Need(
            sequences=args.per_device_train_batch_size * args.steps_per_generation,
            # Held-out prompts may be longer than any of training.
            prompt=longest_prompt(prompts, loaded.tokenizer) * 3 // 2 + 16,
            completion=args.max_completion_length,
            reserve=reserve,
        ),
        options=dict(config.vllm),
    )


def longest_prompt(prompts: list[Any], tokenizer: Any) -> int:
    """Tokens of the longest prompt, texts or conversations, chat template included."""

    def size(prompt: Any) -> int:
        return len(prompt) if isinstance(prompt, str) else sum(len(str(message["content"])) for message in prompt)

    longest = 1
    for prompt in sorted(prompts, key=size, reverse=True)[:LONGEST_LOOKED_AT]:
        if isinstance(prompt, str):
            ids = tokenizer(prompt)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
        longest = max(longest, len(ids))
    return longest


def _rank(config: Config) -> int:
    if not config.train.lora:
        return 0
    patterns = config.peft.get("rank_pattern") or {}
    return max([int(config.peft.get("r", 16)), *map(int, patterns.values())])


def check_dtype(config: Config) -> None:
    """Raise ConfigError where vLLM would have to apply an adapter in float32 on CUDA: its kernels there take 16 bit."""
    if not config.train.lora or config.train.dtype != "float32" or resolve.device(config.device).name == "cpu":
        return
    if resolve.rollout(config.rollout, config.device).name == "vllm":
        raise ConfigError(
            f"train.dtype=float32: with rollout={config.rollout} vLLM draws here, which applies adapters (train.lora) "
            "on CUDA in 16 bit only; say train.dtype=bfloat16 or float16, or rollout=transformers"
        )


def check_quantization(config: Config, stored: str | None = None) -> str | None:
    """How the engine's weights are quantised: `vllm.quantization`, or as the model's folder says (`stored`).

    Raises ConfigError, with what is missing, where such an engine cannot run here.
    """
    asked = config.vllm.get("quantization")
    key = f"vllm.quantization={asked}" if asked else f"model={config.model} ({stored})"
    quantization = asked or stored
    if quantization and not config.train.lora:
        raise ConfigError(
            f"{key}: weights that are all trained cannot go into a quantised engine; say train.lora=true, or "
            "rollout=transformers"
        )
    if quantization != "bitsandbytes":
        return quantization
    if config.train.dtype == "float32":
        raise ConfigError(f"{key}: a bitsandbytes engine computes in 16 bit; say train.dtype=bfloat16 or float16")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"{key}: bitsandbytes is not installed: pip install bitsandbytes")
    installed = _vllm_version()
    if installed >= (0, 28) and importlib.util.find_spec("vllm_bnb_plugin") is None:
        raise ConfigError(
            f"{key}: bitsandbytes was built into vLLM up to 0.27; {'.'.join(map(str, installed))} takes it from a "
            "plugin, which is not installed: pip install vllm-bnb-plugin"
        )
    return quantization


def _vllm_version() -> tuple[int, int]:
    """(major, minor) of the installed vLLM, whose distribution has other names for other devices."""
    names = metadata.packages_distributions().get("vllm") or ["vllm"]
    major, minor = metadata.version(names[0]).split(".")[:2]
    return int(major), int(minor)


def get(config: Config, trainer: Any, live: Live | None = None) -> Engine:
    """The engine that `rollout=` asks for, for a trainer. Raises ConfigError where it cannot be had.

    live: what `start` gave for this cell.
    """
    args = trainer.args
    sampling = {name: getattr(args, name) for name in keys.SAMPLING}
    sampling |= config.sampling
    if resolve.rollout(config.rollout, trainer.model.device.type).name == "vllm":
        from ablate.rollout.vllm import VllmEngine

        if live is None:
            raise ConfigError("rollout=vllm: the engine starts before the trainer; give what engines.start returned")
        return VllmEngine(
            live,
            eos_token_ids=trainer.eos_token_ids,
            max_completion_length=args.max_completion_length,
            options=sampling,
            shared=live.shared,
        )
    from ablate.rollout.transformers import TransformersEngine

    return TransformersEngine(
        trainer.processing_class,
        eos_token_ids=trainer.eos_token_ids,
        max_completion_length=args.max_completion_length,
        sampling=sampling,
        batch_size=args.per_device_train_batch_size,
    )
