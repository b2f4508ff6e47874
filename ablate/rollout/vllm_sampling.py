"""`sampling.*` as vLLM's SamplingParams: every option by its name, none dropped, and the log-probs that come back.

Which log-probs. vLLM reports either the distribution it draws from after truncation (`processed`) or the model's before
anything is done to it (`raw`). Neither is the temperature-only distribution that the trainer scores with, so the
temperature goes into the engine's logits scale, tokens are drawn at temperature 1, and raw log-probs are read: they are
those of the temperature-only distribution under any min_p, top_p and top_k. The importance ratio is built from them.
With the truncated distribution it would be the probability mass that truncation kept, a product over the completion
that is never above 1 and falls to e^-10 within a few dozen tokens, and would scale the gradient by it. That mass is
measured instead (`Recorder`). Penalties, logit_bias, bad_words, allowed_token_ids, min_tokens and structured outputs
change the distribution too and are not in the raw log-probs either.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ablate.rollout import derive_seed

# Set by the engine from other keys, so that setting them here would contradict those.
OWNED = {
    "n": "train.num_generations says how many completions a prompt gets",
    "max_tokens": "train.max_completion_length is the limit",
    "logprobs": "the log-prob of every drawn token is read off the sampler",
    "logprob_token_ids": "the log-prob of every drawn token is read off the sampler",
    "flat_logprobs": "the log-prob of every drawn token is read off the sampler",
    "prompt_logprobs": "prompts are not scored by the engine",
    "prompt_logprob_token_ids": "prompts are not scored by the engine",
    "prompt_logprob_start": "prompts are not scored by the engine",
    "routed_experts_prompt_start": "routing is not read",
    "detokenize": "text is made by the trainer's tokenizer",
    "include_stop_str_in_output": "text is made by the trainer's tokenizer, of all tokens drawn",
    "spaces_between_special_tokens": "text is made by the trainer's tokenizer",
    "output_kind": "completions are read when they are finished",
    "stream_interval": "completions are read when they are finished",
    "trace_decode_token_ids": "completions are drawn from the policy",
    "skip_clone": "it is internal to vLLM",
    "output_text_buffer_length": "it is internal to vLLM",
}
TRUNCATING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
# Options that change the distribution in ways that neither the log-probs nor the kept mass hold, and their 'off'.
UNSCORED: dict[str, Any] = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "logit_bias": {},
    "bad_words": [], "allowed_token_ids": [], "structured_outputs": None, "thinking_token_budget": None,
}  # fmt: skip

ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: multiples of it lie far apart


class SamplingError(ValueError):
    """A sampling option that vLLM does not have, or does not take with this value."""


def names() -> list[str]:
    """Options of the installed vLLM that `sampling.*` may set."""
    from vllm import SamplingParams

    return [n for n in SamplingParams.__struct_fields__ if not n.startswith("_") and n not in OWNED]


def checked(options: Mapping[str, Any], max_tokens: int = 1) -> dict[str, Any]:
    """The options as SamplingParams takes them; those that are None, GRPOConfig's way of saying 'off', left out.

    Raises SamplingError naming an option that is unknown (with the nearest names), set elsewhere, or out of range.
    """
    known = names()
    out: dict[str, Any] = {}
    for name, value in options.items():
        if name in OWNED:
            raise SamplingError(f"sampling.{name} cannot be set: {OWNED[name]}")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "see vllm.SamplingParams"
            raise SamplingError(f"sampling.{name}: the installed vLLM has no such option; {hint}")
        if value is not None:
            out[name] = _converted(name, value)
    temperature = out.get("temperature", 1.0)
    if not (isinstance(temperature, int | float) and temperature > 0 and math.isfinite(temperature)):
        raise SamplingError(f"sampling.temperature={temperature}: training needs a temperature above 0")
    params(out, max_tokens, [])  # whatever vLLM itself refuses
    return out


def _converted(name: str, value: Any) -> Any:
    from vllm import sampling_params as module

    if name == "structured_outputs" and isinstance(value, Mapping):
        value = {**value, "json": dict(value["json"])} if isinstance(value.get("json"), Mapping) else dict(value)
        return module.StructuredOutputsParams(**value)
    if name == "repetition_detection" and isinstance(value, Mapping):
        return module.RepetitionDetectionParams(**value)
    if name == "logit_bias":
        return {int(token): float(bias) for token, bias in dict(value).items()}
    return list(value) if isinstance(value, tuple) else value


def params(options: Mapping[str, Any], max_tokens: int, eos_token_ids: Sequence[int], seed: int | None = None) -> Any:
    """SamplingParams of one request; temperature is left out, since the engine's logits carry it.

    seed: of this request; None: the process's generator. Raises SamplingError with vLLM's reason.
    """
    from vllm import SamplingParams

    values = {k: v for k, v in options.items() if k not in ("temperature", "seed")}
    if not values.get("ignore_eos"):
        values["stop_token_ids"] = sorted({*values.get("stop_token_ids", []), *eos_token_ids})
    try:
        return SamplingParams(
            **values,
            temperature=1.0,
            seed=seed,
            max_tokens=max_tokens,
            detokenize=bool(values.get("stop")),  # stop strings are looked for in text
        )
    except Exception as error:  # vLLM's own kinds are not all ValueErrors
        raise SamplingError(f"sampling: vLLM refuses these options: {error}") from error


def greedy_params(max_tokens: int, eos_token_ids: Sequence[int], past_end: bool = False) -> Any:
    """SamplingParams of the most likely completion; `past_end`: end tokens do not end it."""
    from vllm import SamplingParams

    if past_end:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=list(eos_token_ids), detokenize=False)


def request_seed(option: int, seed: int, step: int, row: int, num_generations: int) -> int:
    """Seed of one completion, from (sampling.seed, seed of the call, step, prompt, sample); 63 bits.

    The seed of the call is the trainer's, derived from run seed, step and process. Within a group no two are equal, nor
    are their lower halves, which is what torch's generator for the CPU reads: an odd factor maps samples one to one.
    """
    prompt, sample = divmod(row, num_generations)
    return (derive_seed(option, seed, step, prompt) + sample * ODD) % (1 << 63)


def truncates(options: Mapping[str, Any]) -> bool:
    """Whether the options cut the distribution's tail off."""
    return any(name in options and options[name] not in (off, -1) for name, off in TRUNCATING.items())


def unscored(options: Mapping[str, Any]) -> list[str]:
    """Names of the options in use that change the distribution and are in no log-prob that comes back."""
    return [name for name, off in UNSCORED.items() if (options.get(name) or off) != off]


def set_scale(model: Any, temperature: float) -> None:
    """Puts 1 / temperature into the model's logits scale, on top of the scale that the architecture has."""
    processor = model.logits_processor
    processor = getattr(processor, "base_layer", processor)
    if not hasattr(processor, "_own_scale"):
        processor._own_scale = processor.scale
    processor.scale = processor._own_scale / temperature


class Recorder:
    """Reads the log-prob of every drawn token off the sampler, on the device, for as long as `with` lasts.

    vLLM's own log-probs are copied to the host and unpacked request by request at every token, which costs more than a
    small model's forward; here one tensor a step stays on the device until the end. kept: also records the log of the
    mass that truncation kept, raw minus processed log-prob.
    """

    def __init__(self, runner: Any, kept: bool = False) -> None:
        self.runner, self.sampler, self.kept = runner, runner.sampler, kept
        self._steps: list[tuple[list[str], Any, Tensor, Tensor | None]] = []
        self._mass: Tensor | None = None
        self._rows: dict[str, list[tuple[float, float]]] = {}

    def __enter__(self) -> Recorder:
        forward, sample = self.sampler.forward, self.sampler.sample

        def recorded(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            raw = logits.log_softmax(-1, dtype=torch.float32)  # the sampler works in place
            self._mass = None
            out = forward(logits, *args, **kwargs)
            tokens = out.sampled_token_ids.long().view(-1, 1)
            discarded = self.runner.discard_request_mask.np[: len(tokens)].copy()  # parts of long prompts
            names = list(self.runner.input_batch.req_ids[: len(tokens)])
            self._steps.append((names, discarded, raw.gather(1, tokens).squeeze(1), self._mass))
            return out

        self.sampler.forward = recorded
        if self.kept:
            self.sampler.sample = lambda *args, **kwargs: self._sample(sample, *args, **kwargs)
        return self

    def __exit__(self, *exc: object) -> None:
        del self.sampler.forward
        if self.kept:
            del self.sampler.sample
        if exc[0] is None:
            self._collect()

    def _sample(self, sample: Any, logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        raw = logits.log_softmax(-1, dtype=torch.float32)
        inner = self.sampler.topk_topp_sampler
        before = inner.logprobs_mode, inner.forward
        inner.logprobs_mode, inner.forward = "processed_logprobs", inner.forward_native
        try:
            drawn, processed = sample(logits, *args, **kwargs)
        finally:
            inner.logprobs_mode, inner.forward = before
        if processed is not None:
            index = drawn.long().view(-1, 1)
            self._mass = (raw.gather(1, index) - processed.gather(1, index)).squeeze(1)
        return drawn, None

    def _collect(self) -> None:
        if not self._steps:
            return
        logps = torch.cat([step[2] for step in self._steps]).tolist()
        masses = torch.cat([torch.zeros_like(s[2]) if s[3] is None else s[3] for s in self._steps]).tolist()
        at = 0
        for names, discarded, _, _ in self._steps:
            for name, dropped in zip(names, discarded, strict=True):
                if not dropped:  # vLLM may append a part of its own to a request's name
                    self._rows.setdefault(name.split("-")[0], []).append((logps[at], masses[at]))
                at += 1
        self._steps.clear()

    def of(self, request: str, length: int) -> tuple[list[float], list[float]]:
        """(log-probs, log of the kept mass) of a request's `length` tokens; NaN for a token that was not seen.

        A step that was scheduled before the end token was known comes after them and is left out.
        """
        rows = self._rows.get(request, [])[:length]
        rows = rows + [(math.nan, math.nan)] * (length - len(rows))
        return [row[0] for row in rows], [row[1] for row in rows]
