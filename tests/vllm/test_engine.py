"""The engine against transformers on the tiny model: log-probs, adapters, weights, memory, failures."""

from __future__ import annotations

import gc
import traceback
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from ablate.rollout import vllm_live, vllm_share, vllm_sync
from ablate.rollout import vllm_memory as memory
from ablate.rollout.vllm import EngineError, Spec
from tests.vllm.engines import EOS, PROMPT, adapted, compare, draw, engine, live_engine, move, own_logps


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_log_probs_are_the_trainers(lora: Any, temperature: float) -> None:
    live, model = lora
    rollout = draw(engine(live, length=12, temperature=temperature), model)
    worst, _ = compare(model, rollout, temperature)
    assert worst < 1e-3
    assert any(ids[-1] == EOS for ids in rollout.completion_ids)


def test_the_next_rollout_uses_the_new_adapter(lora: Any) -> None:
    """Row 14: after the adapter has changed, ids and log-probs are the new policy's, cached prefixes included."""
    live, model = lora
    e = engine(live, length=8)
    first = draw(e, model)
    move(model, 0.3)
    stale, _ = compare(model, first)
    second = draw(e, model)
    fresh, _ = compare(model, second)
    assert stale > 0.05 > 1e-3 > fresh
    assert first.completion_ids != second.completion_ids
    assert live.adapter is not None and live.adapter.direct


def test_a_stale_adapter_is_an_error(lora: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    live, model = lora
    draw(engine(live), model)
    move(model, 0.5)
    monkeypatch.setattr(live, "push", lambda policy: None)
    with pytest.raises(EngineError, match="disagree on the policy"):
        draw(engine(live), model)
    assert live.broken


def test_cached_prefix_of_another_adapter_is_not_reused(tiny: Path) -> None:
    """A prompt of several KV blocks, so that it is cached; the adapter's name is new with each push."""
    need = memory.Need(sequences=4, prompt=80, completion=8)
    live = vllm_live.acquire(Spec(tiny, "tiny", torch.float32, torch.device("cpu"), 8, need, {"block_size": 32}))
    model = adapted(live.shared_model(), 0.1)
    prompt = PROMPT * 12
    e = engine(live, length=4)
    for _ in range(2):
        rollout = e.generate(model, [prompt] * 4, seed=0, step=0, num_generations=4)
        for ids, logps in zip(rollout.completion_ids, rollout.logps or [], strict=True):
            torch.testing.assert_close(own_logps(model, prompt, ids), torch.tensor(logps).double(), atol=1e-3, rtol=0)
        move(model, 0.3)


def test_ranks_scalings_and_fewer_modules(tiny: Path) -> None:
    """rank_pattern, alpha_pattern and rsLoRA, which vLLM alone would ignore or scale twice."""
    live = live_engine(tiny, rank=8)
    options = {"rank_pattern": {"q_proj": 2, "down_proj": 8}, "alpha_pattern": {"v_proj": 32}, "use_rslora": True}
    for targets in (["q_proj", "v_proj", "down_proj"], ["gate_proj"]):
        model = adapted(live.shared_model(), 0.2, target_modules=targets, **options)
        before = {n: p.clone() for n, p in model.named_parameters()}
        worst, _ = compare(model, draw(engine(live), model))
        assert worst < 1e-3
        assert all(torch.equal(before[n], p) for n, p in model.named_parameters()), "the trainer's tensors changed"


@pytest.mark.parametrize(
    ("options", "match"),
    [({"use_dora": True}, "use_dora"), ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
     ({"modules_to_save": ["lm_head"]}, "modules_to_save")],
)  # fmt: skip
def test_adapters_that_vllm_does_not_apply_are_refused(tiny: Path, options: dict[str, Any], match: str) -> None:
    model = adapted(AutoModelForCausalLM.from_pretrained(tiny), **options)
    with pytest.raises(ValueError, match=match):
        vllm_sync.adapter_of(model)


def test_shared_weights_are_one_copy(lora: Any) -> None:
    live, model = lora
    engine_data = {p.data_ptr() for p in live.model.parameters()}
    base = model.get_base_model()
    assert base.model.layers[0].mlp.down_proj.base_layer.weight.data_ptr() in engine_data
    assert base.model.layers[1].self_attn.q_proj.base_layer.weight.data_ptr() in engine_data
    assert base.get_input_embeddings().weight.data_ptr() in engine_data
    plain = AutoModelForCausalLM.from_pretrained(live.spec.folder)
    with model.disable_adapter(), torch.no_grad():
        x = torch.tensor([PROMPT])
        assert torch.equal(model(x).logits, plain(x).logits)


def test_base_that_was_written_to_is_an_error(lora: Any) -> None:
    live, model = lora
    weight = model.get_base_model().model.norm.weight
    with torch.no_grad():
        weight.add_(1e-3)
    try:
        with pytest.raises(EngineError, match="base weights have changed"):
            live.shared_model()
    finally:
        live_engine_restart()


def live_engine_restart() -> None:
    vllm_live.release()


def test_sharing_is_refused_with_the_reason(tiny: Path) -> None:
    live = live_engine(tiny, rank=8)
    with pytest.raises(vllm_share.CannotShare, match="float64"):
        vllm_share.build(tiny, live.model, torch.float64)


def test_greedy_is_transformers_greedy(lora: Any) -> None:
    live, model = lora
    rows = engine(live).greedy(model, [PROMPT, PROMPT[:3]], 6)
    for prompt, ids in zip([PROMPT, PROMPT[:3]], rows, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids


def test_more_rows_than_fit_are_drawn_in_parts(lora: Any) -> None:
    live, model = lora
    assert memory.rows_per_call({"max_num_seqs": 256}, kv_tokens=4096, longest=200) == 16
    assert memory.rows_per_call({"max_num_seqs": 8}, kv_tokens=10**6, longest=200) == 8
    rollout = draw(engine(live), model, rows=150)
    assert len(rollout.completion_ids) == len(rollout.logps) == 150
    assert compare(model, rollout)[0] < 1e-3


def test_full_weights_are_synced_in_place(tiny: Path) -> None:
    live = live_engine(tiny, rank=0)
    addresses = [p.data_ptr() for p in live.model.parameters()]
    model = AutoModelForCausalLM.from_pretrained(tiny)
    e = engine(live, length=8)
    for _ in range(2):
        worst, _ = compare(model, draw(e, model))
        assert worst < 1e-3
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 0.1 * torch.randn_like(p))
    assert addresses == [p.data_ptr() for p in live.model.parameters()]


def test_one_engine_serves_cells_that_fit(tiny: Path) -> None:
    live = live_engine(tiny, rank=8)
    assert live_engine(tiny, rank=2) is live
    assert live_engine(tiny, rank=0) is not live


def test_an_engine_that_runs_out_of_memory_is_replaced(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = live_engine(tiny, rank=8)
    model = adapted(live.shared_model())

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 7 GiB")

    monkeypatch.setattr(type(live.model), "compute_logits", fail)
    with pytest.raises(EngineError, match="vLLM stopped: OutOfMemoryError: tried to allocate 7 GiB"):
        draw(engine(live), model)
    monkeypatch.undo()
    fresh = live_engine(tiny, rank=8)
    assert fresh is not live
    model = adapted(fresh.shared_model(), 0.1)
    assert compare(model, draw(engine(fresh), model))[0] < 1e-3


def weights_of(live: vllm_live.Live) -> weakref.ref[torch.Tensor]:
    return weakref.ref(next(live.model.parameters()))


def test_another_engine_is_started_where_options_differ_and_the_old_one_is_freed(tiny: Path) -> None:
    first = live_engine(tiny, rank=8, max_num_seqs=4)
    held = weights_of(first)
    model = adapted(first.shared_model())
    draw(engine(first), model)
    del model
    second = live_engine(tiny, rank=8, max_num_seqs=8)
    assert second is not first and first.broken and second.plan["max_num_seqs"] == 8
    assert held() is None, "the ended engine's weights are still there"
    model = adapted(second.shared_model(), 0.1)
    assert compare(model, draw(engine(second), model))[0] < 1e-3


def test_a_failed_engine_is_freed_while_its_error_is_still_held(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner keeps the error until it has written it down: what its frames hold of the engine must not stay."""
    live = live_engine(tiny, rank=8)
    held, model = weights_of(live), adapted(AutoModelForCausalLM.from_pretrained(tiny))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 7 GiB")

    monkeypatch.setattr(live.worker.model_runner, "execute_model", fail)
    with pytest.raises(EngineError, match="7 GiB") as caught:
        draw(engine(live), model)
    monkeypatch.undo()
    gc.collect()
    assert held() is None
    assert "tried to allocate" in "".join(traceback.format_exception(caught.value))


def test_nothing_grows_from_step_to_step(lora: Any) -> None:
    """Memory of the process, the KV cache's blocks, and what vLLM keeps by the adapter's name."""
    live, model = lora
    e = engine(live, length=8, min_p=0.05)
    scheduler = live.llm.llm_engine.engine_core.engine_core.scheduler
    pool, sizes = scheduler.kv_cache_manager.block_pool, []
    for step in range(25):
        draw(e, model, rows=64, step=step, seed=step)
        move(model, 0.01)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is vLLM's own, always
        assert not scheduler.requests and len(live.llm.llm_engine.output_processor.request_states) == 0
        sizes.append(psutil.Process().memory_info().rss)
    assert max(sizes[15:]) - sizes[5] < 4 << 20
    assert len(live.adapter.manager.list_adapters()) == 1


def test_an_engine_that_does_not_start_says_why(tiny: Path) -> None:
    vllm_live.release()
    with pytest.raises(EngineError, match="did not start"):
        live_engine(tiny, rank=8, kv_cache_memory_bytes=1)
    with pytest.raises(ValueError, match=r"vllm\.max_lora_rank cannot be set: it follows from peft\.r"):
        live_engine(tiny, rank=8, max_lora_rank=16)
