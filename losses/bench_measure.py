"""Time and memory of a step."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from losses import bench_cuda

CLEAR_REFS = Path("/proc/self/clear_refs")


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], device: str, steps: int = 1) -> tuple[float, float]:
    """Wall seconds of `work`, and the processor seconds of all its threads; of one of `steps` back to back."""
    _synchronize(device)
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        work()
    _synchronize(device)
    return (time.perf_counter() - wall) / steps, (time.process_time() - processor) / steps


def rounds(
    work: Callable[[], Any], base: Callable[[], Any] | None, device: str, reps: int, warm_up: int, steps: int = 1
) -> dict[str, Any]:
    """{"wall", "cpu"} of `work` and {"base_wall", "base_cpu"} of `base`, which runs before it in every round.

    Seconds with one figure a round. base None: `work` itself.
    """
    out: dict[str, Any] = {name: [] for name in ("wall", "cpu", "base_wall", "base_cpu")}
    gc.collect()
    gc.freeze()  # what packages have made stays: a collection need not walk it every time
    for i in range(warm_up + reps):
        for prefix, step in (("base_", base), ("", work)):
            if step is None:
                continue
            gc.collect()
            if device == "cuda":
                bench_cuda.cool_down()
            wall, processor = seconds(step, device, steps)
            if i >= warm_up:
                out[f"{prefix}wall"].append(wall)
                out[f"{prefix}cpu"].append(processor)
    gc.unfreeze()
    if base is None:
        out["base_wall"], out["base_cpu"] = out["wall"], out["cpu"]
    return out


def summary(values: list[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values), "min": min(values), "max": max(values), "rounds": values,
    }  # fmt: skip


def over(values: list[float], base: list[float]) -> float:
    """Median of the ratios within a round, so that a machine that slows down for a while favours no row."""
    return statistics.median(a / b for a, b in zip(values, base, strict=True))


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def peak_extra(work: Callable[[], Any], device: str) -> int | None:
    """Bytes in use at most during `work`, above those before it; None where the system does not tell."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        before = _status("VmRSS")
        CLEAR_REFS.write_text("5")  # resets the high-water mark (man 5 proc)
    except OSError:
        return None
    work()
    return _status("VmHWM") - before
