"""Memory of an engine beside a trainer: what it may take, and giving the KV cache back between rollouts."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

GIB = 1 << 30
MAX_SEQUENCES = 256
SLACK = int(1.5 * GIB)  # CUDA context, graphs, activations of the engine
SAMPLER_BYTES = 18  # per sequence and vocabulary entry, in vLLM's first sampler
BYTES_IN_4BIT = 0.65  # a parameter, with its share of the scales and of the layers that stay as they are
BLOCK = 128  # tokens; no backend takes larger KV blocks by default


@dataclass(frozen=True)
class Need:
    """What a rollout asks of an engine.

    sequences: completions of one rollout. prompt, completion: the longest, in tokens. reserve: bytes that the trainer
    will still take beside the engine while the engine generates.
    """

    sequences: int
    prompt: int
    completion: int
    reserve: int = 0

    @property
    def length(self) -> int:
        return self.prompt + self.completion


def memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of a device; of the host for the CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)
    import psutil

    host = psutil.virtual_memory()
    return int(host.available), int(host.total)


def used(device: torch.device) -> int:
    """Bytes in use on a CUDA device by all that runs there, as the driver counts them."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def kv_bytes_per_token(config: Any, dtype: torch.dtype, kv_cache_dtype: str = "auto") -> int:
    """Bytes that one token takes in the KV cache of a dense transformer."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = 1 if str(kv_cache_dtype).startswith("fp8") else dtype.itemsize
    return 2 * text.num_hidden_layers * heads * size * width


def parameters_of(config: Any) -> int:
    """Number of parameters of a transformers config's model, counted without allocating them."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


def plan(
    config: Any,
    need: Need,
    dtype: torch.dtype,
    device: torch.device,
    given: Mapping[str, Any],
    *,
    free: int,
    total: int,
    parameters: int,
) -> dict[str, Any]:
    """Engine arguments from the memory that is free now and the longest completion.

    given: engine arguments that the user has set; they are kept, and what follows from them is computed with them.
    free, total: bytes of the device. parameters: of the model. Raises ValueError, with the way out, where not even one
    completion fits.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 20
    if given.get("kv_cache_memory_bytes", 1) is None:
        raise ValueError(
            "vllm.kv_cache_memory_bytes=null: give bytes, or leave it out: then it is what a rollout needs"
        )
    if need.completion >= limit:
        raise ValueError(f"train.max_completion_length={need.completion}: the model takes {limit} tokens in all")
    length = int(given.get("max_model_len") or min(limit, need.length))
    sequences = int(given.get("max_num_seqs") or min(max(1, need.sequences), MAX_SEQUENCES))
    # On a CPU vLLM cannot split a prompt that has a generator of its own, so there no prompt is split.
    split = device.type == "cuda"
    batched = int(
        given.get("max_num_batched_tokens") or max(4096 if split else 1024, sequences, 0 if split else length)
    )
    per_token = kv_bytes_per_token(config, dtype, given.get("kv_cache_dtype", "auto"))
    weights = parameters * (BYTES_IN_4BIT if given.get("quantization") == "bitsandbytes" else dtype.itemsize)
    sampler = SAMPLER_BYTES * sequences * config.get_text_config().vocab_size
    if device.type == "cuda":
        room = int(0.9 * (free - weights - need.reserve - sampler - SLACK))
    else:
        room = int(0.25 * (free - weights))
    wanted = sequences * (math.ceil(length / BLOCK) + 1) * BLOCK * per_token
    least = (math.ceil(length / BLOCK) + 2) * BLOCK * per_token
    kv = int(given.get("kv_cache_memory_bytes") or max(least, min(wanted, room)))
    if kv > free - weights and "kv_cache_memory_bytes" not in given:
        raise ValueError(
            f"rollout=vllm: one completion of {length} tokens needs {kv / GIB:.2f} GiB of KV cache beside "
            f"{weights / GIB:.2f} GiB of weights, and {free / GIB:.2f} GiB are free: shorten "
            "train.max_completion_length, say vllm.kv_cache_dtype=fp8, or rollout=transformers"
        )
    options: dict[str, Any] = {
        "max_model_len": length,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": batched,
        "kv_cache_memory_bytes": kv,
        "enable_chunked_prefill": split,
        "enable_prefix_caching": True,
        "enforce_eager": device.type != "cuda",
    }
    if device.type == "cuda":
        # Start-up refuses where less than this share of the card is free, though the KV cache has its own size. What is
        # needed and no more: engines that start side by side take memory from each other in the meantime.
        share = min(weights + kv + sampler + SLACK, 0.95 * free) / total
        options["gpu_memory_utilization"] = round(max(0.01, min(0.95, share)), 3)
        options["enable_sleep_mode"] = True
    if device.type == "cuda" and not given.get("enforce_eager"):
        # A graph for each decode size and nothing compiled: most of a rollout is decode, and start-up is much shorter.
        options["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": graph_sizes(sequences),
            "cudagraph_specialize_lora": False,
        }
    return {**options, **given}


def graph_sizes(sequences: int) -> list[int]:
    """Batch sizes to capture: a running batch is padded to the next, so they are close where batches end up small."""
    sizes = {1, 2, 4, *range(8, min(sequences, 64) + 1, 8), *range(64, sequences + 1, 16), sequences}
    return sorted(size for size in sizes if size <= sequences)


def rows_per_call(options: Mapping[str, Any], kv_tokens: int, longest: int) -> int:
    """Completions of `longest` tokens, prompt included, that the KV cache holds at once, so that none is put back."""
    blocks = math.ceil(longest / BLOCK) * BLOCK
    return max(1, min(int(options["max_num_seqs"]), kv_tokens // blocks))


_KEPT: dict[int, Any] = {}  # pools of ended engines by id: torch must not free blocks that were freed by hand


def pool_bytes() -> int:
    """Bytes that an earlier engine of this process still holds in vLLM's sleep-mode allocator; it serves only one."""
    allocator = _allocator()
    return 0 if allocator is None else int(allocator.get_current_usage())


def free_pool() -> None:
    """Frees what ended engines have left unused in that allocator, as vLLM itself does after loading."""
    allocator = _allocator()
    if allocator is None:
        return
    module = sys.modules[_CUMEM]
    gc.collect()
    torch.cuda.synchronize()
    for pool in allocator.allocator_and_pools.values():
        if id(pool) not in _KEPT:
            _KEPT[id(pool)] = pool
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))  # beyond the interpreter's end
    for pool in _KEPT.values():
        for block in pool[0].snapshot():
            if block["allocated_size"] == 0 and block["address"] in allocator.pointer_to_data:
                module.unmap_and_release(allocator._python_free_callback(block["address"]))


_CUMEM = "vllm.device_allocator.cumem"


def _allocator() -> Any:
    """vLLM's sleep-mode allocator, None where no engine of this process has used it."""
    module = sys.modules.get(_CUMEM)
    return None if module is None else module.CuMemAllocator.instance


class KVCache:
    """Gives the KV cache's memory back to the device and takes it again; the weights stay where they are.

    Only with vLLM's sleep mode, on CUDA; elsewhere both calls do nothing and return 0.
    """

    def __init__(self, llm: Any, worker: Any, device: torch.device) -> None:
        self.llm, self.worker, self.device = llm, worker, device
        self.able = device.type == "cuda" and bool(llm.llm_engine.vllm_config.model_config.enable_sleep_mode)
        self.asleep: str | None = None  # None, "kv_cache" or "all"
        self._by_hand = False  # what is asleep was released past vLLM's own bookkeeping

    def reset(self) -> None:
        """Forgets every cached prefix."""
        if self.llm.reset_prefix_cache() is False:
            self.llm.llm_engine.step()  # flushes requests that have just finished
            if self.llm.reset_prefix_cache() is False:
                raise RuntimeError("vLLM's prefix cache could not be emptied: requests are still running")

    def release(self, weights: str = "keep") -> int:
        """Frees the cache, and returns the bytes that became free.

        weights: "keep" on the device; "host": moved to host memory until they are woken; "drop": not kept at all.
        """
        if not self.able or self.asleep:
            return 0
        before = used(self.device)
        self.reset()
        torch.cuda.synchronize(self.device)
        if weights != "keep":
            self.llm.sleep(level=1 if weights == "host" else 2)
            self.asleep, self._by_hand = "all", False
        else:
            self._release_kv()
            self.asleep = "kv_cache"
        return before - used(self.device)

    def _release_kv(self) -> None:
        self._by_hand = not hasattr(self.llm, "release_kv_cache_memory")  # vLLM 0.24 has no call for the cache alone
        if not self._by_hand:
            self.llm.llm_engine.step()
            self.llm.sleep(level=0)
            self.llm.release_kv_cache_memory()
            return
        from vllm.device_allocator.cumem import CuMemAllocator, unmap_and_release

        for block in CuMemAllocator.get_instance().pointer_to_data.values():
            if block.tag == "kv_cache":
                unmap_and_release(block.handle)
                if hasattr(block, "is_asleep"):  # later versions map only what is marked
                    block.is_asleep = True

    def wake_weights(self) -> bool:
        """Maps released weights again, from the host or, where they were dropped, empty; whether there were any."""
        if self.asleep != "all":
            return False
        self._make_room()
        self.llm.wake_up(tags=["weights"])
        self.asleep = "kv_cache"
        return True

    def wake(self) -> None:
        """Maps a released cache again, empty."""
        if self.asleep is None:
            return
        if self.asleep == "all":
            raise RuntimeError("the engine's weights are still released: wake_weights() comes first")
        self._make_room()
        (self.worker if self._by_hand else self.llm).wake_up(tags=["kv_cache"])
        self.asleep = None

    def _make_room(self) -> None:
        """Hands blocks that the trainer's allocator only keeps for later back to the driver, where they are needed."""
        need = self.llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes or 0
        if torch.cuda.mem_get_info(self.device)[0] < need + SLACK:
            torch.cuda.empty_cache()
