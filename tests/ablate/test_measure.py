"""What a step is said to have taken."""

from __future__ import annotations

import time

import pytest
import torch

from ablate import measure, schema
from ablate.measure import Busy, Meter


class Scripted(Meter):
    """A meter of a device whose memory the test sets."""

    now = high = 0

    def use(self, size: int) -> None:
        self.now, self.high = size, max(self.high, size)

    def _peak(self) -> int:
        return self.high

    def _reset_peak(self) -> None:
        self.high = self.now


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


@pytest.mark.parametrize(("before", "after", "peak"), [(70, 20, 70), (20, 70, 70), (30, 30, 30)])
def test_an_evaluation_is_no_part_of_the_step(before: int, after: int, peak: int, clock: Clock) -> None:
    meter = Scripted(torch.device("cpu"))
    meter.use(before)
    meter.use(10)
    with meter.time("loss"):
        clock.sleep(1)
        with meter.pause():
            meter.use(900)
            with meter.time("rollout"), meter.pause():  # an evaluation of several datasets pauses again for each
                clock.sleep(200)
            meter.count(torch.ones(50))
            meter.use(10)
    meter.use(after)
    step = meter.flush()
    assert step["peak_memory_bytes"] == peak
    assert (step["step_time"], step["time/loss"], step["time/rollout"], step["time/optimizer"]) == (1, 1, 0, 0)
    assert step["tokens_per_second"] == 0
    meter.use(5)
    assert meter.flush()["peak_memory_bytes"] == after


def test_the_peak_of_a_rollout_is_apart_from_the_steps(clock: Clock) -> None:
    meter = Scripted(torch.device("cpu"))
    meter.use(10)
    with meter.time("rollout"):
        meter.use(500)
        meter.use(20)
    with meter.time("loss"):
        meter.use(300)
    step = meter.flush()
    assert (step["memory/rollout_peak_bytes"], step["memory/step_peak_bytes"]) == (500, 300)
    assert step["peak_memory_bytes"] == 500
    assert "memory/rollout_peak_bytes" not in meter.flush(), "a step without a rollout"


def test_parts_within_parts_add_up_to_the_step(clock: Clock) -> None:
    meter = Scripted(torch.device("cpu"))
    synced = meter.timed("sync", lambda: clock.sleep(3))
    for _ in range(2):
        with meter.time("loss"):
            with meter.time("rollout"):
                clock.sleep(10)
                synced()
                meter.move(4, "rollout", "sync")
                with meter.time("reward"):
                    clock.sleep(2)
            clock.sleep(20)
        clock.sleep(5)
        meter.count(torch.ones(2, 30))
        meter.steps += 1
    step = meter.flush()
    parts = {name.removeprefix("time/"): value for name, value in step.items() if name.startswith("time/")}
    spent = {"rollout": 6, "sync": 7, "reward": 2, "loss": 20, "optimizer": 5}
    assert parts == dict.fromkeys(schema.PARTS, 0) | spent
    assert (step["step_time"], step["tokens_per_second"]) == (40, 120 / 80)
    assert meter.flush()["step_time"] == 0


def test_time_counts_where_a_part_raises(clock: Clock) -> None:
    meter = Scripted(torch.device("cpu"))
    with pytest.raises(KeyError), meter.time("loss"), meter.time("reward"):
        clock.sleep(1)
        raise KeyError
    with meter.time("rollout"):
        clock.sleep(2)
    step = meter.flush()
    assert (step["time/reward"], step["time/loss"], step["time/rollout"]) == (1, 0, 2)


def until(condition, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_gpu_busy_is_the_mean_of_samples_outside_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    values = {"now": 30}

    def utilization(index: int) -> int:
        seen.append(index)
        return values["now"]

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(Busy, "interval", 0.001)
    busy = Busy(torch.device("cuda", 1))
    assert busy.flush() is None
    with busy.sampled():
        until(lambda: len(seen) > 3)
        assert busy.flush() == pytest.approx(0.3)
        busy.paused = True
        values["now"] = 90
        count = len(seen)
        until(lambda: len(seen) > count + 3)
        busy.flush()  # what a sample under way at the pause left
        count = len(seen)
        until(lambda: len(seen) > count + 3)
        assert busy.flush() is None
    count = len(seen)
    time.sleep(0.05)
    assert len(seen) == count and set(seen) == {1}
    with busy.sampled():  # once more, as a second call of train does
        until(lambda: len(seen) > count + 3)


def test_gpu_busy_is_missing_where_nvml_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def utilization(index: int) -> int:
        asked.append(index)
        raise ModuleNotFoundError("nvidia-ml-py")

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(Busy, "interval", 0.001)
    busy = Busy(torch.device("cuda", 0))
    with busy.sampled():
        until(lambda: asked)
        time.sleep(0.05)
    assert asked == [0] and busy.flush() is None
    cpu = Meter(torch.device("cpu"))
    with cpu.busy.sampled():
        time.sleep(0.01)
        assert "gpu/busy" not in cpu.flush()
    assert asked == [0]
