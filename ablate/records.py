"""Rollouts as rows of a table: all that a replay of them needs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from ablate.generation import Generation


def rollout_rows(generation: Generation) -> pa.Table:
    """One row per completion, columns `schema.ROLLOUT_COLUMNS`, padding removed; log-probs in float32."""
    prompt_ids, prompt_mask = generation.column("prompt_ids"), generation.column("prompt_mask")
    lengths = generation.lengths

    def per_token(name: str, kind: pa.DataType) -> pa.Array:
        rows: list[Any] = [None] * len(lengths)
        if generation.has(name):
            rows = [row[:n] for row, n in zip(generation.column(name).tolist(), lengths, strict=True)]
        return pa.array(rows, pa.list_(kind))

    rewards = [
        {name: None if value != value else value for name, value in zip(generation.reward_names, row, strict=True)}
        for row in generation.rewards.double().tolist()
    ]
    group = generation.group_ids.tolist()
    columns = {
        "step": pa.array([generation.step] * len(group), pa.int64()),
        "group": pa.array(group, pa.int64()),
        "sample": pa.array([i % generation.num_generations for i in range(len(group))], pa.int64()),
        "prompt_ids": pa.array(
            [row[m.bool()].tolist() for row, m in zip(prompt_ids, prompt_mask, strict=True)], pa.list_(pa.int64())
        ),
        "completion_ids": per_token("completion_ids", pa.int64()),
        "completion_mask": per_token("completion_mask", pa.int8()),
        "advantage": pa.array(generation.advantages.double().tolist(), pa.float64()),
        "rewards": pa.array(rewards),
        "old_per_token_logps": per_token("old_per_token_logps", pa.float32()),
        "ref_per_token_logps": per_token("ref_per_token_logps", pa.float32()),
        "sampling_per_token_logps": per_token("sampling_per_token_logps", pa.float32()),
        "sampling_seed": pa.array([generation.sampling_seed] * len(group), pa.int64()),
        "prompt": pa.array([_text(p) for p in generation.prompts], pa.string()),
        "completion": pa.array([_text(c) for c in generation.completions], pa.string()),
    }
    return pa.table(columns)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
