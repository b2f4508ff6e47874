"""The vLLM engine of this process: started once, kept from cell to cell, replaced only where a cell does not fit it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ablate import status
from ablate.errors import ConfigError
from ablate.rollout import vllm_memory as memory
from ablate.rollout import vllm_sampling as sampling
from ablate.rollout import vllm_share as share
from ablate.rollout import vllm_sync as sync

logger = logging.getLogger(__name__)
OWN_OPTIONS = ("share_weights",)  # of vllm.*, true or false: read here, not by vLLM
REFUSED = {
    "model": "it follows from model=",
    "tokenizer": "it follows from model=",
    "dtype": "it follows from train.dtype",
    "seed": "sampling.seed seeds the draws",
    "logprobs_mode": "the importance ratio needs raw log-probs",
    "enable_lora": "it follows from train.lora",
    "max_loras": "it follows from train.lora",
    "max_lora_rank": "it follows from peft.r",
    "tensor_parallel_size": "an engine and its trainer share one device",
    "pipeline_parallel_size": "an engine and its trainer share one device",
}


def vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """`vllm.*` without what is read here. Raises ConfigError for what cannot be set, or not to that."""
    for name, value in options.items():
        if name in REFUSED:
            raise ConfigError(f"vllm.{name} cannot be set: {REFUSED[name]}")
        if name in OWN_OPTIONS and not isinstance(value, bool):
            raise ConfigError(f"vllm.{name}={value!r}: it takes true or false")
    return {name: value for name, value in options.items() if name not in OWN_OPTIONS}


class EngineError(RuntimeError):
    """vLLM could not start, ran out of memory or stopped in the middle; the message is its own."""


def words(error: Exception) -> str:
    """Type and message of an exception; in place of no message, as of a bare assert, the line that raised it."""
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error) or f'{raised.filename}:{raised.lineno}: {raised.line}'}"


@dataclass(frozen=True)
class Spec:
    """What a cell needs of an engine.

    folder: of the model. weights: hash of its weights. dtype: of engine and base. rank: of the largest adapter, 0 for
    full fine-tuning. need: lengths and completions. options: `vllm.*`, own ones included.
    """

    folder: Path
    weights: str
    dtype: torch.dtype
    device: torch.device
    rank: int
    need: memory.Need
    options: Mapping[str, Any] = field(default_factory=dict)

    def key(self) -> tuple[Any, ...]:
        options = tuple(sorted((k, repr(v)) for k, v in self.options.items()))
        return (self.folder, self.weights, self.dtype, self.device, self.rank > 0, options)


class Live:
    """A running engine. `plan` holds its arguments, `notes` what was decided at its start, in words and bytes.

    shared: whether the trainer of the cell at hand stands on its weights.
    """

    def __init__(self, spec: Spec) -> None:
        from transformers import AutoConfig

        given = vllm_options(spec.options)
        self.spec, self.device, self.broken, self.shared = spec, spec.device, False, False
        memory.free_pool()  # of an engine that a failed cell has held until now
        if memory.pool_bytes():
            status.note(
                "vLLM: an earlier engine of this process holds memory still; this one stays resident between rollouts"
            )
            given = {"enable_sleep_mode": False, **given}
        config = AutoConfig.from_pretrained(spec.folder, local_files_only=True, trust_remote_code=False)
        free, total = memory.memory(self.device)
        self.plan = memory.plan(
            config, spec.need, spec.dtype, self.device, given,
            free=free, total=total, parameters=memory.parameters_of(config),
        )  # fmt: skip
        started = time.perf_counter()
        self.llm = _start(spec, self.plan)
        self.worker = self.llm.llm_engine.model_executor.driver_worker.worker
        self.kv = memory.KVCache(self.llm, self.worker, self.device)
        self.adapter = sync.AdapterSync(self.worker) if spec.rank else None
        self.cells = 0
        self.version = 0
        self._base: int | None = None
        self.notes: dict[str, Any] = {
            "start_seconds": round(time.perf_counter() - started, 1),
            "options": {k: v for k, v in self.plan.items()},
            "kv_tokens": self.kv_tokens,
        }
        shown = ", ".join(f"{k}={v}" for k, v in self.plan.items())
        status.note(f"vLLM: started in {self.notes['start_seconds']} s with {shown} (each is overridden by vllm.NAME=)")

    @property
    def model(self) -> Any:
        return self.worker.model_runner.model

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        cache = self.llm.llm_engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    def fits(self, spec: Spec) -> bool:
        """Whether a cell can use this engine as it runs."""
        return (
            not self.broken
            and self.spec.key() == spec.key()
            and (spec.rank == 0 or sync.max_rank(self.spec.rank) >= spec.rank)
            and self.plan["max_model_len"] >= min(spec.need.length, self._longest())
        )

    def _longest(self) -> int:
        return int(self.llm.llm_engine.model_config.hf_config.get_text_config().max_position_embeddings)

    def shared_model(self) -> Any:
        """A transformers model on the engine's weights. Raises CannotShare with the reason."""
        if self.spec.options.get("share_weights") is False:
            raise share.CannotShare("vllm.share_weights=false")
        if not self.spec.rank:
            raise share.CannotShare("full fine-tuning trains its own copy")
        if self.plan.get("quantization") or self.llm.llm_engine.model_config.quantization:
            raise share.CannotShare("the engine's weights are quantised")
        model = share.build(self.spec.folder, self.model, self.spec.dtype)
        bits = sync.fingerprint(self.model)
        if self._base is not None and bits != self._base:
            raise EngineError("the engine's base weights have changed since the last cell; nothing may write to them")
        self._base = bits
        return model

    def push(self, policy: Any) -> None:
        """Brings the trainer's policy into the engine's weights; `wake` must follow before anything is generated."""
        self.version += 1
        self.kv.wake_weights()
        if self.adapter is not None:
            self.adapter.push(policy)
        else:
            sync.push_weights(self.model, policy)

    def wake(self) -> None:
        """Maps the KV cache where it was released; nothing in it is of an earlier policy."""
        if self.kv.asleep:
            self.kv.wake()
        elif self.adapter is None:
            self.kv.reset()

    def generate(self, prompt_ids: list[list[int]], params: Any) -> list[Any]:
        """vLLM's outputs in the order of the prompts. The adapter's name is new after each push, since vLLM keys its
        prefix cache by name and not by weights."""
        request = None
        if self.adapter is not None:
            from vllm.lora.request import LoRARequest

            request = LoRARequest(f"policy-{self.version}", sync.ADAPTER_ID, "memory")
        prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
        with _no_collection():
            return self.llm.generate(prompts, params, lora_request=request, use_tqdm=False)

    def set_temperature(self, temperature: float) -> None:
        sampling.set_scale(self.model, temperature)

    def shutdown(self) -> None:
        """Ends the engine and frees what it held."""
        self.broken = True
        with contextlib.suppress(Exception):
            self.kv.wake_weights()  # blocks that are not mapped cannot be freed
            self.kv.wake()
        with contextlib.suppress(Exception):
            self.llm.llm_engine.engine_core.shutdown()
        for name in ("llm", "worker", "kv", "adapter"):
            if hasattr(self, name):
                delattr(self, name)
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        with contextlib.suppress(Exception):
            cleanup_dist_env_and_memory()
        _collect(self.device)


_live: Live | None = None


def acquire(spec: Spec) -> Live:
    """The process's engine, started, or replaced where it does not fit. Raises EngineError, ValueError."""
    global _live
    if _live is not None and not _live.fits(spec):
        release()
    if _live is None:
        _live = Live(spec)
    _live.cells += 1
    return _live


def release() -> None:
    """Ends the process's engine, if there is one."""
    global _live
    live, _live = _live, None
    if live is not None:
        live.shutdown()


def discard(live: Live, error: BaseException | None = None) -> None:
    """Ends an engine that has failed, by an error where there is one; the next `acquire` starts another."""
    global _live
    if _live is live:
        _live = None
    _let_go(error)
    if not live.broken:
        live.shutdown()


def _let_go(error: BaseException | None) -> None:
    """Drops what the frames of an error and of its causes hold of an engine, which could not be freed otherwise."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _collect(device: torch.device) -> None:
    gc.unfreeze()  # vLLM freezes what there is when it has started, and none of that would ever be collected
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(Exception):
            memory.free_pool()
        torch.cuda.empty_cache()


def environment(device: torch.device) -> None:
    """What vLLM reads from the environment: one process, its first model runner, samplers that draw from torch."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # adapters are put into, and samplers read from, the first runner
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if device.type == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer's threads stay where they are


def _start(spec: Spec, plan: Mapping[str, Any]) -> Any:
    environment(spec.device)
    from vllm import LLM

    from losses.backends.triton_hooks import keeping_hooks

    arguments: dict[str, Any] = {
        "model": str(spec.folder),
        "dtype": str(spec.dtype).removeprefix("torch."),
        "seed": 0,
        "logprobs_mode": "raw_logprobs",
        "generation_config": "vllm",
        "trust_remote_code": False,
        "disable_log_stats": True,
        **plan,
    }
    if spec.rank:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": sync.max_rank(spec.rank)}
    try:
        with _keeping_generators(spec.device), keeping_hooks(), _plain_layouts(spec.device):
            return LLM(**arguments)
    except Exception as error:
        _let_go(error)
        _collect(spec.device)
        raise EngineError(f"vLLM did not start: {words(error)}") from error


@contextlib.contextmanager
def _keeping_generators(device: torch.device) -> Iterator[None]:
    """vLLM seeds every generator of the process when it starts; the trainer's draws must not depend on that."""
    import numpy as np

    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """vLLM makes objects at every token, and a collection would walk all that trainer and libraries have made."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _plain_layouts(device: torch.device) -> Iterator[None]:
    """On a CPU vLLM packs its weights for oneDNN and drops the originals, which could be neither synced nor shared."""
    if device.type != "cpu":
        yield
        return
    from vllm import _custom_ops as ops

    before = getattr(ops, "_supports_onednn", None)
    ops._supports_onednn = False
    try:
        yield
    finally:
        ops._supports_onednn = before
