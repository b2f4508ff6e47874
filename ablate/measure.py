"""What a training step took: time by part, memory, distance of the weights from their start."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch
from torch import Tensor

from ablate import schema
from losses import Metric


class Meter:
    """Times parts of a step by the host clock, the device's queue drained at both ends, and reads peak memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps = 0
        self.busy = Busy(device)
        self._tokens: float | Tensor = 0.0
        self._inner: list[float] = []  # for each part now being timed, seconds of the parts within it
        self._paused = False
        self._last = time.perf_counter()
        self._peaks = {"rollout": 0, "step": 0}  # bytes since the last flush: of rollouts, and of the rest of the step
        self._reset_peak()

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Adds what runs inside to a part; a part within another is taken out of that one."""
        self._drain()
        apart = name == "rollout" and not self._paused
        if apart:
            self._take_peak("step")
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            self._drain()
            if apart:
                self._take_peak("rollout")
            took = time.perf_counter() - start
            self.seconds[name] += took - self._inner.pop()
            if self._inner:
                self._inner[-1] += took

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its calls timed as a part."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.time(name):
                return function(*args, **kwargs)

        return call

    def move(self, seconds: float, source: str, target: str) -> None:
        """Takes seconds that were measured otherwise out of one part into another."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def count(self, mask: Tensor) -> None:
        """Adds the tokens of a micro-batch, without waiting for the device."""
        self._tokens = self._tokens + mask.sum()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves what runs inside, an evaluation, out of the step's times, tokens and peak of memory."""
        if self._paused:
            yield
            return
        self._take_peak("step")
        kept = self.seconds, self._tokens, self._inner
        self.seconds, self._inner = defaultdict(float), []
        self._paused = self.busy.paused = True
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self._last += took
            self.seconds, self._tokens, self._inner = kept
            if self._inner:
                self._inner[-1] += took
            self._paused = self.busy.paused = False
            self._reset_peak()

    def flush(self) -> dict[str, float]:
        """The figures since the last flush, times as means over its steps.

        `time/<part>` (s), which add up to step_time (s); tokens_per_second, of this process; peak_memory_bytes, and of
        it memory/rollout_peak_bytes and memory/step_peak_bytes, the latter without rollouts; on CUDA memory/step_bytes,
        and gpu/busy where NVML gave a sample.
        """
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        steps, self.steps = max(1, self.steps), 0
        tokens, self._tokens = float(self._tokens), 0.0
        self.seconds["optimizer"] = elapsed - sum(self.seconds.values())
        out = {f"time/{name}": self.seconds[name] / steps for name in schema.PARTS}
        out["step_time"] = elapsed / steps
        self.seconds.clear()
        out["tokens_per_second"] = tokens / elapsed if elapsed > 0 else 0.0
        self._take_peak("step")
        out["peak_memory_bytes"] = float(max(self._peaks.values()))
        out |= {f"memory/{part}_peak_bytes": float(peak) for part, peak in self._peaks.items() if peak}
        self._peaks = dict.fromkeys(self._peaks, 0)
        if self.device.type == "cuda":  # what the step took from the card and its allocator still holds
            free, total = torch.cuda.mem_get_info(self.device)
            out["memory/step_bytes"] = float(total - free)
        if (busy := self.busy.flush()) is not None:
            out[schema.GPU_BUSY] = busy
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

    def _take_peak(self, part: str) -> None:
        self._peaks[part] = max(self._peaks[part], self._peak())
        self._reset_peak()

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError), open("/proc/self/clear_refs", "w") as refs:
                refs.write("5")


class Busy:
    """Share of the time in which a CUDA device ran kernels, of any process: NVML's utilisation, sampled by a thread.

    NVML averages over its own period, 1/6 to 1 s, so neighbouring short steps share what it says. Without CUDA or
    nvidia-ml-py, or where NVML gives none (MIG), there is no figure.
    """

    interval = 0.2  # seconds

    def __init__(self, device: torch.device) -> None:
        self.device, self.paused = device, False
        self._samples: list[float] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Samples for as long as the block runs."""
        if self.device.type == "cuda" and self._thread is None:
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, args=(index,), name="gpu-busy", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            if self._thread is not None:
                self._thread.join(timeout=5)
            self._thread = None

    def flush(self) -> float | None:
        """Mean of the samples since the last flush, 0 to 1; None without any."""
        samples, self._samples = self._samples, []
        return sum(samples) / len(samples) if samples else None

    def _run(self, index: int) -> None:
        while not self._stop.wait(self.interval):
            try:
                share = torch.cuda.utilization(index) / 100
            except Exception:  # pynvml's errors have no class that is there without it
                return
            if not self.paused:
                self._samples.append(share)


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
