"""What an engine may take beside a trainer, computed without vLLM or a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from ablate.rollout import vllm_memory as memory

GIB = memory.GIB
CUDA = torch.device("cuda:0")
LLAMA_8B = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=8192,
)  # fmt: skip
PARAMETERS = 8_030_261_248


def plan(free: float, sequences: int = 64, length: int = 1024, reserve: int = 0, **given: Any) -> dict[str, Any]:
    need = memory.Need(sequences, prompt=length // 4, completion=length - length // 4, reserve=reserve)
    return memory.plan(
        LLAMA_8B, need, torch.bfloat16, CUDA, given,
        free=int(free * GIB), total=140 * GIB, parameters=PARAMETERS,
    )  # fmt: skip


def test_bytes_per_token() -> None:
    assert memory.kv_bytes_per_token(LLAMA_8B, torch.bfloat16) == 2 * 32 * 8 * 128 * 2
    assert memory.kv_bytes_per_token(LLAMA_8B, torch.bfloat16, "fp8") == 2 * 32 * 8 * 128
    assert memory.parameters_of(LLAMA_8B) == PARAMETERS


def test_kv_cache_is_what_the_rollout_needs_and_no_more_than_there_is() -> None:
    roomy, tight = plan(138), plan(24)
    per_token = memory.kv_bytes_per_token(LLAMA_8B, torch.bfloat16)
    assert 64 * 1024 * per_token <= roomy["kv_cache_memory_bytes"] <= 64 * 1280 * per_token
    assert tight["kv_cache_memory_bytes"] < 24 * GIB - 2 * PARAMETERS
    assert memory.rows_per_call(tight, tight["kv_cache_memory_bytes"] // per_token, 1024) < 64
    assert memory.rows_per_call(roomy, roomy["kv_cache_memory_bytes"] // per_token, 1024) == 64
    share = roomy["gpu_memory_utilization"]  # room for this engine, and for another that starts beside it
    assert (roomy["kv_cache_memory_bytes"] + 2 * PARAMETERS) / (140 * GIB) < share < 0.5
    assert tight["gpu_memory_utilization"] < 24 / 140
    assert plan(24, reserve=3 * GIB)["kv_cache_memory_bytes"] < tight["kv_cache_memory_bytes"]


def test_what_the_user_sets_stays() -> None:
    given = {"max_num_seqs": 8, "max_model_len": 2048, "kv_cache_memory_bytes": GIB, "enable_prefix_caching": False}
    options = plan(138, **given)
    assert {k: options[k] for k in given} == given
    assert "compilation_config" not in plan(138, enforce_eager=True)
    assert plan(138, max_num_seqs=8)["kv_cache_memory_bytes"] < plan(138)["kv_cache_memory_bytes"]
    full, half = (plan(138, kv_cache_dtype=kind)["kv_cache_memory_bytes"] for kind in ("auto", "fp8"))
    assert half * 2 == full


def test_what_cannot_fit_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_memory_bytes=null: .*leave it out"):
        plan(24, kv_cache_memory_bytes=None)
    with pytest.raises(ValueError, match=r"KV cache.*free.*kv_cache_dtype=fp8"):
        plan(15.0, length=8192)
    with pytest.raises(ValueError, match="max_completion_length=9000"):
        plan(138, length=12000)


def test_graph_sizes() -> None:
    assert memory.graph_sizes(1) == [1]
    assert memory.graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert memory.graph_sizes(256)[-1] == 256 and len(memory.graph_sizes(256)) < 30


class Engine:
    """The engine's side of the KV cache: what is asked of it, in order."""

    def __init__(self, sleep_mode: bool) -> None:
        self.calls: list[Any] = []
        model = SimpleNamespace(enable_sleep_mode=sleep_mode)
        config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(kv_cache_memory_bytes=GIB))
        self.llm_engine = SimpleNamespace(vllm_config=config, step=lambda: self.calls.append("step"))

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags}")

    def release_kv_cache_memory(self) -> None:
        self.calls.append("release")


def test_without_sleep_mode_nothing_is_released() -> None:
    engine = Engine(sleep_mode=False)
    cache = memory.KVCache(engine, engine, torch.device("cpu"))
    assert cache.release() == 0 and cache.asleep is None
    cache.wake()
    assert engine.calls == []


@pytest.mark.parametrize(("weights", "level"), [("keep", 0), ("host", 1), ("drop", 2)])
def test_release_and_wake(weights: str, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never released twice, never woken twice, weights before the cache, and always by tag."""
    monkeypatch.setattr(memory, "used", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *a: (100 * GIB, 140 * GIB))
    engine = Engine(sleep_mode=True)
    cache = memory.KVCache(engine, engine, CUDA)
    cache.release(weights)
    cache.release(weights)
    assert engine.calls.count(f"sleep {level}") == 1 and engine.calls[0] == "reset"
    assert ("release" in engine.calls) == (weights == "keep")
    if weights != "keep":
        with pytest.raises(RuntimeError, match="weights are still released"):
            cache.wake()
    assert cache.wake_weights() == (weights != "keep")
    cache.wake()
    cache.wake()
    wakes = [call for call in engine.calls if call.startswith("wake")]
    assert wakes == (["wake ['kv_cache']"] if weights == "keep" else ["wake ['weights']", "wake ['kv_cache']"])
    assert cache.asleep is None


class Allocator:
    """vLLM's sleep-mode allocator with blocks by address, some of them unused, in the pools of its engines."""

    instance: Any = None

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, Any] = {}
        self.allocator_and_pools: dict[str, Any] = {}
        self.released: list[int] = []

    def pool(self, tag: str, sizes: dict[int, int]) -> None:
        """A pool of a new engine, with the bytes in use at each address."""
        blocks = [{"address": address, "allocated_size": size} for address, size in sizes.items()]
        self.allocator_and_pools[tag] = (SimpleNamespace(snapshot=lambda: blocks, blocks=blocks), "allocator")
        for address in sizes:
            self.pointer_to_data[address] = SimpleNamespace(tag=tag, handle=address, is_asleep=False)

    def get_current_usage(self) -> int:
        return len(self.pointer_to_data)

    def _python_free_callback(self, address: int) -> int:
        return self.pointer_to_data.pop(address).handle


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(Allocator, "instance", made)
    module = SimpleNamespace(CuMemAllocator=Allocator, unmap_and_release=made.released.append)
    monkeypatch.setattr(Allocator, "get_instance", staticmethod(lambda: made), raising=False)
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    monkeypatch.setattr(memory, "_KEPT", {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    return made


def test_what_an_ended_engine_leaves_is_freed_once_and_later_too(allocator: Allocator) -> None:
    """A failed cell's exception holds some of it until the cell is written down, when another engine has begun."""
    allocator.pool("weights", {1: 0, 2: 64})
    memory.free_pool()
    assert allocator.released == [1] and memory.pool_bytes() == 1
    old = allocator.allocator_and_pools["weights"][0]
    allocator.pool("weights", {3: 64})
    old.blocks[1]["allocated_size"] = 0
    memory.free_pool()
    memory.free_pool()
    assert allocator.released == [1, 2] and memory.pool_bytes() == 1


def test_without_a_call_of_vllms_the_cache_alone_is_released_by_hand(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.24 has none. Blocks that have a mark of being asleep get it: only such are mapped again."""
    monkeypatch.setattr(memory, "used", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *a: (100 * GIB, 140 * GIB))
    monkeypatch.delattr(Engine, "release_kv_cache_memory")
    allocator.pool("weights", {1: 64})
    allocator.pool("kv_cache", {2: 64, 3: 64})
    engine = Engine(sleep_mode=True)
    cache = memory.KVCache(engine, engine, CUDA)
    cache.release()
    assert allocator.released == [2, 3] and engine.calls == ["reset"]
    assert [allocator.pointer_to_data[address].is_asleep for address in (1, 2, 3)] == [False, True, True]
    cache.wake()
    assert engine.calls == ["reset", "wake ['kv_cache']"]


def test_start_leaves_tritons_hooks_as_they_were() -> None:
    """vLLM's monitor of compilations would fail on the losses' kernels, which take functions as constants."""
    knobs = pytest.importorskip("triton.knobs")
    from losses.backends.triton_hooks import keeping_hooks

    hook, printing = knobs.runtime.jit_post_compile_hook, knobs.autotuning.print
    with pytest.raises(KeyError), keeping_hooks():
        knobs.runtime.jit_post_compile_hook = lambda **kwargs: None
        knobs.autotuning.print = not printing
        raise KeyError
    assert knobs.runtime.jit_post_compile_hook is hook and knobs.autotuning.print == printing
