"""Rollouts by vLLM in the trainer's process, on the trainer's device: one engine for all cells that the process runs.

Before every rollout the policy goes into the engine (`vllm_sync`): a LoRA adapter from memory, or all weights in place.
On CUDA the KV cache is given back after it (`vllm_memory`), and with LoRA the base weights are one copy that trainer
and engine share (`vllm_share`); full fine-tuning puts the whole engine to sleep instead. `vllm_sampling` says which
log-probs come back. The first call of every cell checks that engine and trainer agree on the policy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ablate.rollout import Rollout, derive_seed
from ablate.rollout import vllm_live as live_engine
from ablate.rollout import vllm_memory as memory
from ablate.rollout import vllm_sampling as sampling
from ablate.rollout.vllm_live import EngineError, Live, Spec
from ablate.rollout.vllm_share import CannotShare

__all__ = ["CannotShare", "EngineError", "Spec", "VllmEngine"]

CHECK_TOKENS = 8


class VllmEngine:
    """Draws completions of one cell from the process's engine.

    Args:
        live: the engine. eos_token_ids: tokens that end a completion. max_completion_length: in tokens.
        options: `sampling.*`, checked by `vllm_sampling.checked`. shared: the trainer's base weights are views of the
        engine's.

    With `sampling.seed` every completion has its own generator, so that draws do not depend on what is drawn beside
    them; without, one generator is seeded for each call.
    """

    name = "vllm"

    def __init__(
        self,
        live: Live,
        *,
        eos_token_ids: Sequence[int],
        max_completion_length: int,
        options: dict[str, Any] | None = None,
        shared: bool = False,
    ) -> None:
        self.live, self.shared = live, shared
        self.eos_token_ids, self.max_completion_length = list(eos_token_ids), max_completion_length
        self.options = sampling.checked(options or {}, max_completion_length)
        self.checked_difference: float | None = None

    def generate(
        self, model: Any, prompt_ids: list[list[int]], *, seed: int, step: int, num_generations: int
    ) -> Rollout:
        """Completions and their log-probs under the temperature-only distribution. Raises EngineError."""
        with self._awake(model, prompt_ids) as stats:
            self.live.set_temperature(self.options.get("temperature", 1.0))
            with self._timed(stats, "rollout/generate_seconds"):
                rollout = self._draw(prompt_ids, seed, step, num_generations)
        rollout.stats |= stats
        if self.checked_difference is not None:
            rollout.stats["rollout/check_difference"] = self.checked_difference
        return rollout

    def greedy(self, model: Any, prompt_ids: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        with self._awake(model, prompt_ids):
            params = sampling.greedy_params(max_new_tokens, self.eos_token_ids)
            return [list(o.outputs[0].token_ids) for o in self.live.generate(prompt_ids, params)]

    def close(self) -> None:
        """Nothing to free: the engine stays for the next cell; `vllm_live.release()` ends it."""

    def describe(self) -> dict[str, Any]:
        """What the run's env.json says about the engine."""
        return {
            **self.live.notes,
            "base_weights": "shared with the trainer" if self.shared else "a copy of the engine's own",
            "between_rollouts": self._between(),
            "cells_served": self.live.cells,
            "log_probs": self._log_probs(),
        }

    def _log_probs(self) -> str:
        """Which distribution the sampler's log-probs are of, and what else shapes the draws."""
        others = sampling.unscored(self.options)
        return "temperature only" + (f"; draws also shaped by {', '.join(others)}" if others else "")

    def _between(self) -> str:
        if not self.live.kv.able:
            return "engine stays resident"
        return {
            "keep": "KV cache released",
            "host": "KV cache released, weights on the host",
            "drop": "KV cache and weights released",
        }[self._weights()]

    def _weights(self) -> str:
        """What becomes of the engine's weights while the trainer steps: shared ones stay, trained ones come anew."""
        if self.shared:
            return "keep"
        return "drop" if self.live.adapter is None else "host"

    def _draw(self, prompt_ids: list[list[int]], seed: int, step: int, num_generations: int) -> Rollout:
        longest = max(map(len, prompt_ids), default=0) + self.max_completion_length
        size = memory.rows_per_call(self.live.plan, self.live.kv_tokens, longest)
        truncates = sampling.truncates(self.options)
        rollout = Rollout([], [], finished=[])
        assert rollout.logps is not None and rollout.finished is not None
        kept: list[list[float]] = []
        for start in range(0, len(prompt_ids), size):
            part = prompt_ids[start : start + size]
            params = [self._params(seed, step, row, num_generations) for row in range(start, start + len(part))]
            recorder = sampling.Recorder(self.live.worker.model_runner, kept=truncates)
            with self._generator(derive_seed(seed, start)), recorder:
                outputs = self.live.generate(part, params)
            for output in outputs:
                ids = list(output.outputs[0].token_ids)
                logps, masses = recorder.of(output.request_id, len(ids))
                rollout.completion_ids.append(ids)
                rollout.logps.append(logps)
                rollout.finished.append(output.outputs[0].finish_reason == "stop")
                kept.append(masses)
        rollout.log_kept = kept if truncates else None
        return rollout

    def _params(self, seed: int, step: int, row: int, num_generations: int) -> Any:
        option = self.options.get("seed")
        own = None if option is None else sampling.request_seed(option, seed, step, row, num_generations)
        return sampling.params(self.options, self.max_completion_length, self.eos_token_ids, own)

    @contextlib.contextmanager
    def _generator(self, seed: int) -> Iterator[None]:
        device = self.live.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    @contextlib.contextmanager
    def _awake(self, model: Any, prompt_ids: list[list[int]]) -> Iterator[dict[str, float]]:
        """The engine with the policy in it; an error inside ends the engine, so that the next cell gets a new one."""
        live = self.live
        stats: dict[str, float] = {}
        if live.broken:
            raise EngineError("vLLM has stopped in this cell already")
        try:
            with self._timed(stats, "rollout/refresh_seconds"):
                live.push(model)
            with self._timed(stats, "rollout/wake_seconds"):
                live.wake()
            if self.checked_difference is None and prompt_ids:
                self.checked_difference = self.check(model, prompt_ids[0])
            yield stats
            if live.device.type == "cuda":
                stats["memory/rollout_bytes"] = float(memory.used(live.device))
            if live.kv.able:
                with self._timed(stats, "rollout/release_seconds"):
                    stats["memory/released_bytes"] = float(live.kv.release(self._weights()))
        except Exception as error:
            live_engine.discard(live, error)
            if isinstance(error, EngineError | sampling.SamplingError):
                raise
            raise EngineError(f"vLLM stopped: {live_engine.words(error)}") from error

    @contextlib.contextmanager
    def _timed(self, stats: dict[str, float], name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self.live.device.type == "cuda":
            torch.cuda.synchronize(self.live.device)
        stats[name] = time.perf_counter() - started

    def check(self, model: Any, prompt: list[int]) -> float:
        """Mean difference of the engine's and the trainer's log-probs over a greedy completion of a prompt.

        Raises EngineError where they do not agree to the precision of the engine: stale weights, a prefix cache of
        another policy, another model.
        """
        live = self.live
        room = live.plan["max_model_len"] - len(prompt)
        if room < 1:
            raise EngineError(f"a prompt of {len(prompt)} tokens leaves no room within max_model_len")
        live.set_temperature(1.0)
        params = sampling.greedy_params(min(CHECK_TOKENS, room), self.eos_token_ids, past_end=True)
        recorder = sampling.Recorder(live.worker.model_runner)
        with recorder:
            output = live.generate([prompt], params)[0]
        ids = list(output.outputs[0].token_ids)
        logps = torch.tensor(recorder.of(output.request_id, len(ids))[0])
        device = next(model.parameters()).device
        training = model.training
        model.eval()
        cast = live.spec.dtype != torch.float32
        with torch.no_grad(), torch.autocast(device.type, dtype=live.spec.dtype, enabled=cast):
            logits = model(input_ids=torch.tensor([[*prompt, *ids]], device=device)).logits[0, len(prompt) - 1 : -1]
        model.train(training)
        own = logits.float().log_softmax(-1).gather(1, torch.tensor(ids, device=device).unsqueeze(1)).squeeze(1)
        difference = (own - logps.to(device)).abs().mean().item()
        if not difference <= self.tolerance():
            raise EngineError(
                f"engine and trainer disagree on the policy: log-probs of a greedy completion differ by "
                f"{difference:.4f} on average, where {self.tolerance()} is what {live.spec.dtype} explains. Stale "
                "weights in the engine, or a model that vLLM computes differently: say rollout=transformers"
            )
        return difference

    def tolerance(self) -> float:
        """Nats per token that the engine's number formats explain."""
        if self.live.plan.get("quantization") or str(self.live.plan.get("kv_cache_dtype", "")).startswith("fp8"):
            return 0.5
        return 1e-3 if self.live.spec.dtype == torch.float32 else 0.15
