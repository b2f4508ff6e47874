"""The figures that experiments/results/rollout/measure.py takes from a trainer's log."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def parts(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(root / "experiments" / "results" / "rollout")
    yield importlib.import_module("parts")
    for name in ("parts", "workload"):
        sys.modules.pop(name)


def test_a_median_is_over_the_rows_that_have_the_figure(parts: Any) -> None:
    rows: list[dict[str, float]] = [
        {"loss": 1.0, "time/loss": 3.0},
        {"loss": 1.0, "time/loss": 1.0, "gpu/busy": 0.5},
        {"loss": 1.0, "time/loss": 2.0, "gpu/busy": 0.7, "memory/step_bytes": 8.0},
        {"loss": 1.0, "time/loss": 9.0},  # too short for a sample
    ]
    assert parts.medians(rows) == {"time/loss": 2.5, "gpu/busy": 0.6, "memory/step_bytes": 8.0}
    assert parts.medians(rows[:1]) == {"time/loss": 3.0}
