"""The engine against transformers on the tiny model: log-probs, adapters, weights, sampling options, failures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ablate import mismatch
from ablate.rollout import derive_seed, vllm_live, vllm_share, vllm_sync
from ablate.rollout import vllm_memory as memory
from ablate.rollout import vllm_sampling as sampling
from ablate.rollout.vllm import EngineError, Spec, VllmEngine

PROMPT = [4, 5, 13, 6, 7, 14]  # 12+34=
EOS = 1


def live_engine(folder: Path, rank: int, **options: Any) -> vllm_live.Live:
    need = memory.Need(sequences=64, prompt=8, completion=24)
    return vllm_live.acquire(Spec(folder, "tiny", torch.float32, torch.device("cpu"), rank, need, options))


def engine(live: vllm_live.Live, length: int = 4, run_seed: int = 0, **options: Any) -> VllmEngine:
    return VllmEngine(live, eos_token_ids=[EOS], max_completion_length=length, run_seed=run_seed, options=options)


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


@pytest.fixture
def lora(tiny: Path) -> tuple[vllm_live.Live, Any]:
    """The engine, and a model with an adapter on views of its weights."""
    live = live_engine(tiny, rank=8)
    return live, adapted(live.shared_model(), 0.1)


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


def test_min_p_does_not_bias_the_ratio(lora: Any) -> None:
    """At min_p = 0.05 the mean sequence ratio is 1; with the truncated distribution it would be the kept mass."""
    live, model = lora
    rollout = draw(engine(live, length=24, min_p=0.05), model, rows=64)
    worst, ratios = compare(model, rollout)
    assert worst < 1e-3
    assert ratios.mean().item() == pytest.approx(1, abs=0.02)
    rows = [torch.tensor(row).double() for row in rollout.logps]
    width = max(map(len, rows))
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones(len(row)) for row in rows], batch_first=True)
    old = pad([own_logps(model, PROMPT, ids) for ids in rollout.completion_ids], batch_first=True)
    figures = mismatch.figures(old, pad(rows, batch_first=True), mask, rollout.log_kept)
    assert width == mask.shape[1]
    assert figures["sampling/sequence_ratio/mean"] == pytest.approx(1, abs=0.02)
    assert figures["sampling/sampling_logp_difference/max"] < 1e-3
    assert figures["sampling/truncated/sequence_ratio/q50"] < 0.99 > figures["sampling/kept_mass/mean"]


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}])
def test_kept_mass_is_what_truncation_kept(lora: Any, options: dict[str, Any]) -> None:
    live, model = lora
    rollout = draw(engine(live, length=1, **options), model)
    with torch.no_grad():
        p = model(torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1).sort(descending=True).values
    if "top_k" in options:
        kept = p[:2].sum()
    elif "top_p" in options:
        kept = p[: int((p.cumsum(0) < 0.6).sum()) + 1].sum()
    else:
        kept = p[p >= 0.3 * p[0]].sum()
    assert all(math.exp(row[0]) == pytest.approx(kept.item(), abs=1e-4) for row in rollout.log_kept)


def test_every_option_reaches_the_engine(tiny: Path, lora: Any) -> None:
    """Row 12: each option changes what is drawn in the way that it says."""
    live, model = lora
    allowed = draw(engine(live, allowed_token_ids=[5, 6]), model).completion_ids
    assert {t for ids in allowed for t in ids} <= {5, 6}
    biased = draw(engine(live, logit_bias={"9": 50}), model).completion_ids
    assert {t for ids in biased for t in ids} == {9}
    stopped = draw(engine(live, logit_bias={9: 50}, stop_token_ids=[9]), model).completion_ids
    assert stopped == [[9]] * 32
    text = draw(engine(live, logit_bias={9: 50}, stop=["66"]), model).completion_ids
    assert text == [[9, 9]] * 32
    bad = draw(engine(live, bad_words=["6"], logit_bias={9: 50, 8: 49}), model).completion_ids
    assert {t for ids in bad for t in ids} == {8}
    minimum = draw(engine(live, min_tokens=4), model).completion_ids
    assert all(len(ids) == 4 and EOS not in ids[:3] for ids in minimum)
    regex = draw(engine(live, length=3, structured_outputs={"regex": "7[89]"}), model).completion_ids
    assert {tuple(ids[:2]) for ids in regex} <= {(10, 11), (10, 12)}
    penalised = draw(engine(live, length=2, logit_bias={9: 50}, presence_penalty=2.0, repetition_penalty=1e9), model)
    assert all(ids[0] == 9 for ids in penalised.completion_ids)
    assert any(ids[1:] != [9] for ids in penalised.completion_ids)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"min_pp": 0.1}, "min_p"), ({"max_tokens": 3}, "max_completion_length"), ({"n": 2}, "num_generations"),
     ({"temperature": 0.0}, "temperature"), ({"top_p": 1.5}, "top_p"), ({"skip_clone": True}, "internal")],
)  # fmt: skip
def test_options_are_refused_by_name(options: dict[str, Any], match: str) -> None:
    with pytest.raises(sampling.SamplingError, match=match):
        sampling.checked(options)


def test_no_field_of_sampling_params_is_forgotten() -> None:
    from vllm import SamplingParams

    public = {n for n in SamplingParams.__struct_fields__ if not n.startswith("_")}
    assert set(sampling.names()) == public - set(sampling.OWNED)


def test_seeds(lora: Any) -> None:
    live, model = lora
    e = engine(live, seed=3)
    first = draw(e, model, rows=16, step=2)
    assert draw(e, model, rows=16, step=2).completion_ids == first.completion_ids
    assert draw(e, model, rows=8, step=2).completion_ids == first.completion_ids[:8], "depends on what is beside it"
    assert draw(e, model, rows=16, step=3).completion_ids != first.completion_ids
    assert draw(engine(live, seed=3, run_seed=1), model, rows=16, step=2).completion_ids != first.completion_ids
    seeds = {sampling.request_seed(3, 0, 2, row, 8) for row in range(64)}
    assert len(seeds) == 64
    plain = engine(live)
    assert draw(plain, model, seed=1).completion_ids == draw(plain, model, seed=1).completion_ids
    assert draw(plain, model, seed=1).completion_ids != draw(plain, model, seed=2).completion_ids


def test_seeds_with_more_prompt_tokens_than_a_step_takes(tiny: Path) -> None:
    need = memory.Need(sequences=64, prompt=80, completion=8)
    live = vllm_live.acquire(Spec(tiny, "tiny", torch.float32, torch.device("cpu"), 8, need, {}))
    model = adapted(live.shared_model(), 0.1)
    e = engine(live, length=2, seed=1)
    prompts = [PROMPT * 12] * 40
    assert sum(map(len, prompts)) > live.plan["max_num_batched_tokens"]
    first = e.generate(model, prompts, seed=0, step=0, num_generations=8)
    again = e.generate(model, prompts, seed=0, step=0, num_generations=8)
    assert first.completion_ids == again.completion_ids
    assert len({tuple(ids) for ids in first.completion_ids}) > 1


def test_drawing_leaves_the_process_generator_alone(lora: Any) -> None:
    live, model = lora
    torch.manual_seed(derive_seed("x") % 2**32)
    state = torch.get_rng_state()
    draw(engine(live), model)
    assert torch.equal(state, torch.get_rng_state())


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


def test_an_engine_that_does_not_start_says_why(tiny: Path) -> None:
    vllm_live.release()
    with pytest.raises(EngineError, match="did not start"):
        live_engine(tiny, rank=8, kv_cache_memory_bytes=1)
    with pytest.raises(ValueError, match=r"vllm\.max_lora_rank cannot be set: it follows from peft\.r"):
        live_engine(tiny, rank=8, max_lora_rank=16)
