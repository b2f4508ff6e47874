"""Reward functions, checked: a wrong value is an error that names the function, the step and the completion."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

LARGEST = 3.4028234663852886e38  # in float32, which TRL keeps rewards in

logger = logging.getLogger(__name__)


def checked(function: Any, name: str, timeout: float | None = None) -> Any:
    """`function` as TRL calls it, on a whole batch, refusing anything but one finite number or None per completion.

    Args:
        function: plain or async, or a model, which passes as it is.
        timeout: seconds for a batch. A function that takes longer gives None for each of its completions, which leaves
            them to the other functions; how often is logged as rewards/<name>/timed_out. An async function is
            cancelled; a plain one cannot be, and runs on in its thread unheeded.

    Raises ValueError for a timeout that is not above 0, and what the function raises.
    """
    if timeout is not None and not 0 < timeout < math.inf:
        raise ValueError(f"rewards.timeout={timeout}: give seconds above 0, or null for no limit")
    if isinstance(function, nn.Module):
        return function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        @functools.wraps(function)
        async def run_async(**kwargs: Any) -> list[float | None]:
            try:
                rewards = await asyncio.wait_for(function(**kwargs), timeout)
            except TimeoutError:
                if timeout is None:  # the function's own
                    raise
                return _timed_out(name, timeout, kwargs)
            return _in_time(_values(rewards, name, kwargs), name, timeout, kwargs)

        return run_async

    @functools.wraps(function)
    def run(**kwargs: Any) -> list[float | None]:
        if timeout is None:
            return _values(function(**kwargs), name, kwargs)
        thread = _Thread(lambda: function(**kwargs), name)
        thread.start()
        thread.join(timeout)
        if thread.is_alive():
            return _timed_out(name, timeout, kwargs)
        return _in_time(_values(thread.result(), name, kwargs), name, timeout, kwargs)

    return run


class _Thread(threading.Thread):
    """Runs a function and keeps what it returns or raises; it does not hold the process up at its end."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        super().__init__(name=f"reward {name}", daemon=True)
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def _timed_out(name: str, timeout: float, kwargs: dict[str, Any]) -> list[float | None]:
    logger.warning(
        "reward function %r took longer than rewards.timeout=%g s at step %d: None for its %d completions",
        name, timeout, _step(kwargs), len(kwargs["completions"]),
    )  # fmt: skip
    _log(name, 1.0, kwargs)
    return [None] * len(kwargs["completions"])


def _in_time(rewards: list[float | None], name: str, timeout: float | None, kwargs: dict[str, Any]) -> Any:
    if timeout is not None:
        _log(name, 0.0, kwargs)
    return rewards


def _log(name: str, value: float, kwargs: dict[str, Any]) -> None:
    if "log_metric" in kwargs:
        kwargs["log_metric"](f"rewards/{name}/timed_out", value)


def _step(kwargs: dict[str, Any]) -> int:
    return getattr(kwargs.get("trainer_state"), "global_step", 0) + 1


def _values(rewards: Any, name: str, kwargs: dict[str, Any]) -> list[float | None]:
    step = _step(kwargs)
    expected = len(kwargs["completions"])
    if isinstance(rewards, str | bytes | Mapping) or not isinstance(rewards, Iterable):
        raise ValueError(
            f"reward function {name!r} gave {_shown(rewards)} at step {step}; it must give a list with one number or "
            "None per completion"
        )
    rewards = list(rewards)
    if len(rewards) != expected:
        raise ValueError(
            f"reward function {name!r} gave {len(rewards)} rewards for {expected} completions at step {step}"
        )
    values: list[float | None] = []
    for index, reward in enumerate(rewards):
        try:
            number = reward.item() if hasattr(reward, "item") else reward
            value = None if number is None else math.nan if isinstance(number, str | bytes) else float(number)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # no number, several, or too large a one
            value = math.nan
        if value is not None and not abs(value) <= LARGEST:
            raise ValueError(
                f"reward function {name!r} gave {_shown(reward)} for completion {index} at step {step}; give a finite "
                "number (in float32), or None for 'no reward'"
            )
        values.append(value)
    return values


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str | bytes | list | Mapping) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
