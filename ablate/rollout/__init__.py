"""Rollout engines: what draws completions for a trainer. One file per engine; none knows the trainer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Protocol

# Entries of Rollout.stats, in seconds, that an engine beside the trainer takes apart from drawing: the policy brought
# into it, its released memory mapped again, and given back. They are part of the time that `generate` takes.
SYNC = ("rollout/refresh_seconds", "rollout/wake_seconds", "rollout/release_seconds")


@dataclass
class Rollout:
    """Completions of one generation, in the order of the prompts.

    completion_ids: token ids, the end token included where it was drawn. logps: the sampler's log-prob of each token
    under the temperature-only distribution, or None where the engine gives none. log_kept: log of the probability mass
    that min_p, top_p and top_k left at each token (an empty row where it is not known), None without truncation.
    finished: whether each completion came to an end of its own (an end token, a stop token or string) and was not cut,
    at its length or by repetition detection; None where the engine does not say. stats: figures of the engine, by
    metric name.
    """

    completion_ids: list[list[int]]
    logps: list[list[float]] | None = None
    log_kept: list[list[float]] | None = None
    finished: list[bool] | None = None
    stats: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """Draws completions from the trainer's current policy."""

    name: str

    def generate(
        self, model: Any, prompt_ids: list[list[int]], *, seed: int, step: int, num_generations: int
    ) -> Rollout:
        """One completion per entry of prompt_ids, each prompt repeated num_generations times in a row; the same seed,
        weights and prompts give the same completions."""
        ...

    def greedy(self, model: Any, prompt_ids: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        """The most likely completion of each prompt, for evaluation."""
        ...

    def close(self) -> None: ...


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from what identifies a draw (run seed, step, prompt, sample): equal parts, equal seed."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
