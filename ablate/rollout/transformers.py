"""Rollouts by `model.generate`, in the trainer's own process and precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ablate.rollout import Rollout


class TransformersEngine:
    """Draws with transformers' generation loop.

    Args:
        tokenizer: gives the padding token.
        eos_token_ids: tokens that end a completion.
        max_completion_length: in tokens.
        sampling: GenerationConfig fields by name (temperature, top_p, ...).
        batch_size: prompts per call of `generate`; None: all at once.
    """

    name = "transformers"

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: list[int],
        max_completion_length: int,
        sampling: dict[str, Any] | None = None,
        batch_size: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.max_completion_length = max_completion_length
        self.sampling = {"do_sample": True, "top_k": 0, **(sampling or {})}
        self.batch_size = batch_size

    def generate(
        self, model: Any, prompt_ids: list[list[int]], *, seed: int, step: int, num_generations: int
    ) -> Rollout:
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            rows = self._run(model, prompt_ids, {"max_new_tokens": self.max_completion_length, **self.sampling})
        return Rollout([ids for ids, _ in rows], finished=[ended for _, ended in rows])

    def greedy(self, model: Any, prompt_ids: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        return [ids for ids, _ in self._run(model, prompt_ids, {"max_new_tokens": max_new_tokens, "do_sample": False})]

    def close(self) -> None:
        """Nothing to free: the model is the trainer's."""

    def _run(self, model: Any, prompt_ids: list[list[int]], options: dict[str, Any]) -> list[tuple[list[int], bool]]:
        """(completion, whether it came to an end of its own) for each prompt."""
        from transformers import GenerationConfig, StoppingCriteriaList

        options = dict(options)
        strings = options.pop("stop_strings", None)
        config = GenerationConfig(
            pad_token_id=self.tokenizer.pad_token_id,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.eos_token_ids,
            disable_compile=True,
            **options,
        )
        done: list[tuple[list[int], bool]] = []
        size = self.batch_size or len(prompt_ids) or 1
        for start in range(0, len(prompt_ids), size):
            ids, mask = self._left_pad(prompt_ids[start : start + size], model.device)
            width = ids.shape[1]
            stops = _StopStrings(self.tokenizer, strings, width) if strings else None
            with torch.no_grad():
                out = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    generation_config=config,
                    stopping_criteria=StoppingCriteriaList([stops] if stops else []),
                )
            ends = stops.ends if stops else {}
            done.extend(self._cut(row, ends.get(index)) for index, row in enumerate(out[:, width:].tolist()))
        return done

    def _left_pad(self, prompt_ids: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
        width = max(map(len, prompt_ids))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompt_ids], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompt_ids], device=device)
        return ids, mask

    def _cut(self, row: list[int], stop: int | None) -> tuple[list[int], bool]:
        """The row up to and with its first end token, or its first `stop` tokens, and whether either ended it: what
        comes after is padding."""
        for position, token in enumerate(row[:stop]):
            if token in self.eos_token_ids:
                return row[: position + 1], True
        return row[:stop], stop is not None


class _StopStrings:
    """A stopping criterion: a row ends with the token whose text completes a stop string.

    width: tokens of the padded prompt. ends: tokens of each completion that has come to a stop string, by row.
    (StopStringCriteria of transformers does not take every tokenizer.)
    """

    def __init__(self, tokenizer: Any, strings: str | list[str], width: int) -> None:
        self.tokenizer, self.width = tokenizer, width
        self.strings = [strings] if isinstance(strings, str) else list(strings)
        self.ends: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        for index, row in enumerate(input_ids[:, self.width :].tolist()):
            if index not in self.ends:
                text = self.tokenizer.decode(row, skip_special_tokens=True)
                if any(string in text for string in self.strings):
                    self.ends[index] = len(row)
        return torch.tensor([index in self.ends for index in range(len(input_ids))], device=input_ids.device)
