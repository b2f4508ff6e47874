"""`sampling.*` as vLLM's SamplingParams: every option by its name, none dropped, and the log-probs that come back.

Which log-probs. vLLM can report the distribution it draws from after truncation (`processed`) or the model's before
anything is done to it (`raw`). Neither is the temperature-only distribution that the trainer scores with, so the
temperature goes into the engine's logits scale, tokens are drawn at temperature 1, and raw log-probs are read: they are
those of the temperature-only distribution under any min_p, top_p and top_k. The importance ratio is built from them.
With the truncated distribution it would be the probability mass that truncation kept, a product over the completion
that is never above 1 and falls to e^-10 within a few dozen tokens, and would scale the gradient by it. That mass is
measured instead (`KeptMass`). Penalties, logit_bias, bad_words, allowed_token_ids, min_tokens and structured outputs
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
    "logprobs": "the log-prob of every drawn token is always read",
    "prompt_logprobs": "prompts are not scored by the engine",
    "logprob_token_ids": "the log-prob of every drawn token is always read",
    "detokenize": "text is made by the trainer's tokenizer",
    "output_kind": "completions are read when they are finished",
    "flat_logprobs": "the engine sets it",
    "skip_clone": "it is internal to vLLM",
    "output_text_buffer_length": "it is internal to vLLM",
}
TRUNCATING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


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
    if "flat_logprobs" in SamplingParams.__struct_fields__:
        values["flat_logprobs"] = True
    try:
        return SamplingParams(
            **values,
            temperature=1.0,
            seed=seed,
            max_tokens=max_tokens,
            logprobs=0,
            detokenize=bool(values.get("stop")),  # stop strings are looked for in text
        )
    except Exception as error:  # vLLM's own kinds are not all ValueErrors
        raise SamplingError(f"sampling: vLLM refuses these options: {error}") from error


def greedy_params(max_tokens: int, eos_token_ids: Sequence[int], logprobs: bool = False) -> Any:
    """SamplingParams of the most likely completion; with `logprobs` it runs past end tokens and is scored."""
    from vllm import SamplingParams

    if logprobs:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=0, ignore_eos=True, detokenize=False)
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=list(eos_token_ids), detokenize=False)


def request_seed(option: int, run_seed: int, step: int, row: int, num_generations: int) -> int:
    """Seed of one completion, from (sampling.seed, run seed, step, prompt, sample): within a group all differ."""
    return derive_seed(option, run_seed, step, row // num_generations, row % num_generations)


def truncates(options: Mapping[str, Any]) -> bool:
    """Whether the options cut the distribution's tail off."""
    return any(name in options and options[name] not in (off, -1) for name, off in TRUNCATING.items())


def logps_of(output: Any) -> list[float]:
    """Log-probs of a completion's tokens, from vLLM's flat or nested form."""
    found = output.logprobs
    if hasattr(found, "start_indices"):
        return [found.logprobs[start] for start in found.start_indices]
    return [entry[token].logprob for entry, token in zip(found, output.token_ids, strict=True)]


def set_scale(model: Any, temperature: float) -> None:
    """Puts 1 / temperature into the model's logits scale, on top of the scale that the architecture has."""
    processor = model.logits_processor
    processor = getattr(processor, "base_layer", processor)
    if not hasattr(processor, "_own_scale"):
        processor._own_scale = processor.scale
    processor.scale = processor._own_scale / temperature


class KeptMass:
    """Records log(mass kept by truncation) of every drawn token: raw minus processed log-prob.

    Installed on the sampler of the model runner for as long as `with` lasts.
    """

    def __init__(self, runner: Any) -> None:
        self.runner, self.sampler = runner, runner.sampler
        self.rows: dict[str, list[Tensor]] = {}

    def __enter__(self) -> KeptMass:
        original = self.sampler.sample

        def sample(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            raw = logits.log_softmax(-1, dtype=torch.float32)  # sample() works in place
            inner = self.sampler.topk_topp_sampler
            mode, forward = inner.logprobs_mode, inner.forward
            inner.logprobs_mode, inner.forward = "processed_logprobs", inner.forward_native
            try:
                drawn, processed = original(logits, *args, **kwargs)
            finally:
                inner.logprobs_mode, inner.forward = mode, forward
            if processed is not None:
                index = drawn.long().view(-1, 1)
                mass = (raw.gather(1, index) - processed.gather(1, index)).squeeze(1)
                for name, value in zip(self.runner.input_batch.req_ids, mass, strict=False):
                    request = name.split("-")[0]  # vLLM may append digits of its own
                    self.rows.setdefault(request, []).append(value)
            return drawn, None

        self.sampler.sample = sample
        return self

    def __exit__(self, *exc: object) -> None:
        del self.sampler.sample

    def of(self, request: str, length: int) -> list[float]:
        """Log kept mass of a request's `length` tokens; [] where vLLM also drew tokens that it threw away."""
        values = self.rows.get(request, [])
        return torch.stack(values).tolist() if len(values) == length > 0 else []
