"""`sampling.*` in the engine: every option arrives or is refused, which log-probs come back, and seeds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ablate import mismatch
from ablate.rollout import derive_seed, vllm_live
from ablate.rollout import vllm_memory as memory
from ablate.rollout import vllm_sampling as sampling
from ablate.rollout.vllm import EngineError, Spec
from tests.vllm.engines import EOS, PROMPT, adapted, compare, draw, engine, own_logps


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


# For every field that sampling.* may set, a value other than its default.
VALUES: dict[str, Any] = {
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "temperature": 0.5, "top_p": 0.5,
    "top_k": 3, "min_p": 0.5, "seed": 7, "stop": ["66"], "stop_token_ids": [9], "ignore_eos": True, "min_tokens": 2,
    "skip_special_tokens": False, "structured_outputs": {"regex": "7[89]"}, "logit_bias": {9: 2.0},
    "allowed_token_ids": [5, 6], "extra_args": {"mine": 1}, "bad_words": ["6"], "skip_reading_prefix_cache": True,
    "repetition_detection": {"max_pattern_size": 2, "min_count": 3}, "watermarking": False,
    "thinking_token_budget": 4,
}  # fmt: skip
NEEDS_REASONING = "thinking_token_budget"  # vLLM takes it only with the engine's reasoning_config
ELSEWHERE = {"temperature": 1.0}  # the engine's logits carry it


def test_every_field_of_sampling_params_arrives_in_the_engine_or_is_refused(
    lora: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    live, model = lora
    core = live.llm.llm_engine.engine_core
    add, seen = core.add_request, []

    def spied(request: Any) -> None:
        seen.append(request.sampling_params)
        add(request)

    monkeypatch.setattr(core, "add_request", spied)
    fields = [n for n in SamplingParams.__struct_fields__ if not n.startswith("_")]
    for name in fields:
        if name in sampling.OWNED:
            with pytest.raises(sampling.SamplingError, match=f"{name} cannot be set"):
                sampling.checked({name: 1})
            continue
        if name == NEEDS_REASONING:
            continue
        assert VALUES[name] != getattr(SamplingParams(), name)
        e = engine(live, length=3, **{name: VALUES[name]})
        draw(e, model, rows=1)
        arrived = getattr(seen[-1], name)
        if name == "seed":
            assert arrived == sampling.request_seed(7, 0, 0, 0, 8)
        elif name == "stop_token_ids":
            assert set(arrived) == {9, EOS}
        elif isinstance(VALUES[name], dict) and not isinstance(arrived, dict):
            assert {key: getattr(arrived, key) for key in VALUES[name]} == VALUES[name]
        else:
            assert arrived == ELSEWHERE.get(name, VALUES[name])
    if NEEDS_REASONING in fields:
        with pytest.raises(EngineError, match=NEEDS_REASONING):
            draw(engine(live, **{NEEDS_REASONING: VALUES[NEEDS_REASONING]}), model, rows=1)


def test_completions_say_whether_they_came_to_an_end(lora: Any) -> None:
    live, model = lora
    whole, cut = draw(engine(live, length=12), model), draw(engine(live, length=1), model)
    assert whole.finished == [ids[-1] == EOS for ids in whole.completion_ids] and any(whole.finished)
    assert not any(cut.finished)
    for options in ({"stop_token_ids": [9]}, {"stop": "6"}):  # '6' is token 9
        stopped = draw(engine(live, logit_bias={9: 5.0}, **options), model)
        assert stopped.finished == [ids[-1] in (9, EOS) for ids in stopped.completion_ids]
        assert any(ids[-1] == 9 for ids in stopped.completion_ids)


def test_what_shapes_the_draws_beside_the_log_probs_is_told(lora: Any) -> None:
    plain = engine(lora[0], top_p=0.9, repetition_penalty=1.0).describe()["log_probs"]
    assert plain == "temperature only"
    told = engine(lora[0], presence_penalty=0.5, logit_bias={9: 1.0}).describe()["log_probs"]
    assert told == "temperature only; draws also shaped by presence_penalty, logit_bias"


def test_seeds(lora: Any) -> None:
    live, model = lora
    e = engine(live, seed=3)
    first = draw(e, model, rows=16, step=2)
    assert draw(e, model, rows=16, step=2).completion_ids == first.completion_ids
    assert draw(e, model, rows=8, step=2).completion_ids == first.completion_ids[:8], "depends on what is beside it"
    assert draw(e, model, rows=16, step=3).completion_ids != first.completion_ids
    assert draw(e, model, rows=16, step=2, seed=1).completion_ids != first.completion_ids, "another run or process"
    plain = engine(live)
    assert draw(plain, model, seed=1).completion_ids == draw(plain, model, seed=1).completion_ids
    assert draw(plain, model, seed=1).completion_ids != draw(plain, model, seed=2).completion_ids


def test_seeds_of_a_group_never_collide() -> None:
    """In their lower 32 bits either, all that torch's generator for the CPU reads."""
    for step in range(200):
        seeds = [sampling.request_seed(0, derive_seed(0, step), step, row, 1024) for row in range(1024)]
        assert len({seed % 2**32 for seed in seeds}) == 1024 and min(seeds) >= 0 and max(seeds) < 2**63
    everything = {sampling.request_seed(3, 1, step, row, 8) for step in range(100) for row in range(64)}
    assert len(everything) == 6400
    state = torch.Generator().manual_seed(5).get_state()
    assert torch.equal(state[8:], torch.Generator().manual_seed(5 + 2**32).get_state()[8:])


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
