"""What a training step took: time by part, memory, distance of the weights from their start."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch
from torch import Tensor

from losses import Metric


class Meter:
    """Times parts of a step by the host clock, the device's queue drained at both ends, and reads peak memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()
        self._peak_before = 0  # of the step's part before a pause
        self._reset_peak()

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        self._drain()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._drain()
            self.seconds[name] += time.perf_counter() - start

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves what runs inside, an evaluation, out of the step's time and its peak of memory."""
        self._peak_before = max(self._peak_before, self._peak())
        start = time.perf_counter()
        try:
            yield
        finally:
            self._last += time.perf_counter() - start
            self._reset_peak()

    def flush(self, tokens: int) -> dict[str, float]:
        """The figures since the last flush: `time/<part>` (s), step_time (s), tokens_per_second, peak_memory_bytes.

        `step` covers a micro-batch's forward and backward with its share of the rollout; the rest of step_time is the
        optimizer and logging.
        """
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        parts = dict(self.seconds)
        self.seconds.clear()
        inner = sum(parts.get(name, 0.0) for name in ("rollout", "reward", "logps"))
        out = {f"time/{name}": parts.get(name, 0.0) for name in ("rollout", "reward", "logps")}
        out["time/loss"] = parts.get("step", 0.0) - inner
        out["time/optimizer"] = max(0.0, elapsed - parts.get("step", 0.0))
        out["step_time"] = elapsed
        out["tokens_per_second"] = tokens / elapsed if elapsed > 0 else 0.0
        out["peak_memory_bytes"] = float(max(self._peak_before, self._peak()))
        if self.device.type == "cuda":  # what the step took from the card and its allocator still holds
            free, total = torch.cuda.mem_get_info(self.device)
            out["memory/step_bytes"] = float(total - free)
        self._peak_before = 0
        self._reset_peak()
        return out

    def _drain(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        with suppress(OSError, StopIteration):
            with open("/proc/self/status") as status:
                line = next(row for row in status if row.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        return psutil.Process().memory_info().rss

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError), open("/proc/self/clear_refs", "w") as refs:
                refs.write("5")


class Pool:
    """Metrics by name, added up over micro-batches, and over ranks when they are read."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}

    def add(self, metrics: dict[str, Metric]) -> None:
        for name, metric in metrics.items():
            self.metrics[name] = self.metrics[name] + metric if name in self.metrics else metric

    def flush(self, accelerator: Any) -> dict[str, float]:
        """The means since the last flush: one sum over ranks and one wait for the device, however many there are."""
        metrics, self.metrics = self.metrics, {}
        if not metrics:
            return {}
        sums = torch.stack([torch.stack([m.sum.float(), m.count]) for m in metrics.values()], dim=1)
        total = Metric(*accelerator.reduce(sums, reduction="sum"))
        return dict(zip(metrics, total.mean.tolist(), strict=True))


ON_DEVICE = 256 << 20  # bytes of trained parameters up to which their start stays where they are


def snapshot(model: Any) -> dict[str, Tensor]:
    """Copies of the trained parameters: beside them where they are few, an adapter's say, on the host where not."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if sum(p.numel() * p.element_size() for p in trained.values()) <= ON_DEVICE:
        return {name: p.clone() for name, p in trained.items()}
    return {name: p.to("cpu", copy=True) for name, p in trained.items()}


def distance(model: Any, start: dict[str, Tensor]) -> float:
    """L2 distance of the trained parameters from `start`."""
    pairs = [(p.detach(), start[name]) for name, p in model.named_parameters() if name in start]
    if not pairs:
        return 0.0
    if all(p.device == s.device for p, s in pairs):  # few: all at once, in as many kernels as it takes to launch one
        moved = torch._foreach_sub([p.float() for p, _ in pairs], [s.float() for _, s in pairs])
        norms = list(torch._foreach_norm(moved))
    else:
        norms = [torch.linalg.vector_norm(p.float() - s.to(p.device).float()) for p, s in pairs]
    return torch.linalg.vector_norm(torch.stack([n.double() for n in norms])).item()
