"""Reward functions, checked: a wrong value is an error that names the function, the step and the completion."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

from torch import nn


def checked(function: Any, name: str) -> Any:
    """`function` as TRL calls it, refusing anything but one finite number or None per completion; models pass."""
    if isinstance(function, nn.Module):
        return function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        @functools.wraps(function)
        async def run_async(**kwargs: Any) -> list[float | None]:
            return _values(await function(**kwargs), name, kwargs)

        return run_async

    @functools.wraps(function)
    def run(**kwargs: Any) -> list[float | None]:
        return _values(function(**kwargs), name, kwargs)

    return run


def _values(rewards: Any, name: str, kwargs: dict[str, Any]) -> list[float | None]:
    step = getattr(kwargs.get("trainer_state"), "global_step", 0) + 1
    expected = len(kwargs["completions"])
    rewards = list(rewards)
    if len(rewards) != expected:
        raise ValueError(
            f"reward function {name!r} gave {len(rewards)} rewards for {expected} completions at step {step}"
        )
    for index, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            where = f"for completion {index} at step {step}"
            raise ValueError(f"reward function {name!r} gave {reward} {where}; give None for 'no reward'")

    return rewards
