"""Rows of a benchmark one after another, each with a time limit: peers compile, tune themselves, hang and fall over.

With a limit, or packages of its own, a row runs in a worker process that can be ended. Rows share a worker, and what it
has prepared, until one of them breaks it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

START_LIMIT = 300.0  # seconds that a worker may take to import torch and to make the problem
PR_SET_PDEATHSIG = 1  # of prctl


class Job(Protocol):
    """A row of a benchmark, or a row and what it computes. Picklable."""

    @property
    def name(self) -> str: ...


Measure = Callable[[Any], dict[str, Any]]


def one_by_one(
    prepare: Callable[[], Measure],
    jobs: Sequence[Any],
    limit: float | None = None,
    sites: Mapping[str, str] | None = None,
) -> Iterator[dict[str, Any]]:
    """What `prepare()(job)` gives for each job, in order; {"failed": why} where it raises, exceeds `limit` or ends its
    process.

    limit: seconds of a job, what it compiles included. sites: folders from which jobs of a name import first. Without
    either everything runs in this process. `prepare` and jobs must be picklable where a worker is needed.
    """
    sites = sites or {}
    if limit is None and not sites:
        measure = prepare()
        for job in jobs:
            yield attempt(measure, job)
        return
    for site, group in itertools.groupby(jobs, lambda job: sites.get(job.name)):
        left = list(group)
        while left:
            with _Worker(prepare, site) as worker:
                if not worker.usable:
                    left.pop(0)
                    yield worker.started
                while left and worker.usable:
                    yield worker.run(left.pop(0), limit)


def attempt(measure: Measure, job: Any) -> dict[str, Any]:
    try:
        return measure(job)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"failed": reason(error)}


def reason(error: BaseException) -> str:
    """One line of at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


class _Worker:
    """A process of its own, and of its own group, so that what it starts ends with it."""

    def __init__(self, prepare: Callable[[], Measure], site: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, prepare, site))
        self.process.start()
        theirs.close()
        self.started = self._answer(START_LIMIT)  # {"failed": why} where it could not prepare
        self.usable = "failed" not in self.started

    def run(self, job: Any, limit: float | None) -> dict[str, Any]:
        self.pipe.send(job)
        answer = self._answer(limit)
        self.usable = answer.pop("usable", False)
        return answer

    def _answer(self, limit: float | None) -> dict[str, Any]:
        try:
            if self.pipe.poll(limit):
                return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return {"failed": f"its process ended {how}"}
        return {"failed": f"took longer than {limit:g} s"}

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        if self.process.is_alive() and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # as long as it has no group of its own
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        self.process.join()


def _serve(pipe: Connection, prepare: Callable[[], Measure], site: str | None) -> None:
    """The worker: answers a job at a time. What a peer prints goes to standard error."""
    os.setsid()
    if sys.platform == "linux":  # a parent that is killed takes it along
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(2, 1)
    if site is not None:
        sys.path.insert(0, site)
    try:
        measure = prepare()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        pipe.send({"failed": reason(error)})
        return
    pipe.send({})
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(attempt(measure, job) | {"usable": _device_is_well()})


def _device_is_well() -> bool:
    """Whether CUDA still works: after an illegal access nothing in its process does."""
    import torch

    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True
