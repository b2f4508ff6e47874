"""What a step is said to have taken."""

from __future__ import annotations

import time

import pytest
import torch

from ablate.measure import Meter


class Scripted(Meter):
    """A meter of a device whose memory the test sets."""

    now = high = 0

    def use(self, size: int) -> None:
        self.now, self.high = size, max(self.high, size)

    def _peak(self) -> int:
        return self.high

    def _reset_peak(self) -> None:
        self.high = self.now


@pytest.mark.parametrize(("before", "after", "peak"), [(70, 20, 70), (20, 70, 70), (30, 30, 30)])
def test_an_evaluation_is_no_part_of_the_step(before: int, after: int, peak: int) -> None:
    meter = Scripted(torch.device("cpu"))
    meter.use(before)
    meter.use(10)
    with meter.pause():
        meter.use(900)
        time.sleep(0.2)
        meter.use(10)
    meter.use(after)
    step = meter.flush(tokens=0)
    assert step["peak_memory_bytes"] == peak
    assert step["step_time"] < 0.2
    meter.use(5)
    assert meter.flush(tokens=0)["peak_memory_bytes"] == after
