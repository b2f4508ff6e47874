"""Reward functions over a batch: plain, async, slow, silent, wrong."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ablate import config as configs
from ablate.rewards import checked
from ablate.trl_options import loss_params

BATCH = {"prompts": ["a"] * 3, "completions": ["x", "yy", "zzz"], "completion_ids": [[1]] * 3}


def lengths(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(c)) for c in completions]


async def lengths_later(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return lengths(completions)


class Judge:
    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None, *lengths(completions)[1:]]


def call(function: Any, **kwargs: Any) -> Any:
    logged: list[tuple[str, float]] = []
    result = function(**BATCH, log_metric=lambda name, value: logged.append((name, value)), **kwargs)
    return (asyncio.run(result) if asyncio.iscoroutine(result) else result), logged


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.parametrize("function", [lengths, lengths_later])
def test_the_whole_batch_at_once(function: Any, timeout: float | None) -> None:
    rewards, logged = call(checked(function, "f", timeout))
    assert rewards == [1.0, 2.0, 3.0]
    assert logged == ([] if timeout is None else [("rewards/f/timed_out", 0.0)])


def test_an_object_may_be_async_and_give_none() -> None:
    wrapped = checked(Judge(), "judge")
    assert asyncio.iscoroutinefunction(wrapped)
    assert call(wrapped)[0] == [None, 2.0, 3.0]


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_slow_function_gives_none(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def plain(**kwargs: Any) -> list[float]:
        time.sleep(2)
        return [0.0] * 3

    async def later(**kwargs: Any) -> list[float]:
        await asyncio.sleep(60)
        return [0.0] * 3

    started = time.perf_counter()
    rewards, logged = call(checked(plain if kind == "plain" else later, "slow", 0.05))
    assert time.perf_counter() - started < 1.5
    assert rewards == [None] * 3
    assert logged == [("rewards/slow/timed_out", 1.0)]
    assert "'slow' took longer than rewards.timeout=0.05 s at step 1" in caplog.text


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_errors_pass_through(timeout: float | None) -> None:
    def broken(**kwargs: Any) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer"):
        call(checked(broken, "broken", timeout))


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.parametrize("function", [lengths, lengths_later])
def test_wrong_numbers_are_named(function: Any, timeout: float | None) -> None:
    if function is lengths:

        def short(**kwargs: Any) -> list[float]:
            return lengths(**kwargs)[:2]
    else:

        async def short(**kwargs: Any) -> list[float]:
            return (await lengths_later(**kwargs))[:2]

    with pytest.raises(ValueError, match="'short' gave 2 rewards for 3"):
        call(checked(short, "short", timeout))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, "None"),
        (1.0, "1.0"),
        ("abc", "'abc'"),
        ({0: 1.0, 1: 2.0, 2: 3.0}, "{0: 1.0"),
        (["1.0", 0.0, 0.0], "'1.0' for completion 0"),
        ([0.0, [1.0], 0.0], r"\[1.0\] for completion 1"),
        ([0.0, 0.0, 1j], "1j for completion 2"),
        ([0.0, float("nan"), 0.0], "nan for completion 1"),
        ([0.0, 0.0, float("-inf")], "-inf for completion 2"),
        ([1e39, 0.0, 0.0], r"1e\+39 for completion 0"),
        ([10**400, 0, 0], "1000.* for completion 0"),
        (torch.zeros(3, 2), "for completion 0"),
    ],
)
def test_what_is_no_reward_is_named(given: Any, shown: str) -> None:
    state = SimpleNamespace(global_step=6)
    with pytest.raises(ValueError, match=f"'odd' gave .*{shown}.* at step 7") as caught:
        checked(lambda **kwargs: given, "odd")(**BATCH, trainer_state=state)
    assert len(str(caught.value)) < 250


def test_numbers_of_other_libraries_become_floats() -> None:
    for given in (torch.arange(3), np.arange(3), (i for i in range(3)), torch.arange(3.0, requires_grad=True)):
        rewards = checked(lambda given=given, **kwargs: given, "f")(**BATCH)
        assert rewards == [0.0, 1.0, 2.0]
        assert all(type(reward) is float for reward in rewards)
    assert checked(lambda **kwargs: [True, None, False], "f")(**BATCH) == [1.0, None, 0.0]


def test_a_beta_that_is_no_number_is_named() -> None:
    args = SimpleNamespace(
        beta=float("nan"), epsilon=0.2, epsilon_high=None, vllm_importance_sampling_mode="sequence_mask",
        vllm_importance_sampling_clip_max=3.0, max_completion_length=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="beta=nan is outside"):
        loss_params(args, "reference", None)


def test_the_limit_is_checked() -> None:
    for timeout in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0"):
            checked(lengths, "f", timeout)
    with pytest.raises(configs.ConfigError, match=r"rewards\.timeout=-1"):
        configs.load(["rewards.timeout=-1"], check=False)
    assert configs.load(["rewards.timeout=2.5"], check=False).rewards.timeout == 2.5
