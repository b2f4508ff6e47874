"""Cells on this machine: in worker processes that stay alive from cell to cell, or, to debug, in this process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection as connections
from pathlib import Path

from ablate import launchers, rundir
from ablate.launchers import CELL_FUNCTION, Event, worker
from ablate.plan import Cell

SPAWN = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads and CUDA's state
LOG_LINES = 15  # of a dead worker's last words


class InProcess:
    """One cell after another in this process (jobs=0): breakpoints work, but a crash ends the sweep."""

    def __init__(self, function: str = CELL_FUNCTION) -> None:
        self.function = function

    def run(self, cells: Sequence[Cell], folder: Path, on_event: Callable[[Event], None]) -> None:
        for cell in cells:
            on_event(Event("start", cell.name))
            directory = rundir.CellDir(folder / cell.name)
            launchers.execute(cell, directory, lambda: launchers.cell_function(self.function), on_event)


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: connections.Connection
    cell: Cell | None = None
    card: Mapping[str, str] = field(default_factory=dict)


class LocalLauncher:
    """`workers` processes side by side, each taking the next cell when it has finished one.

    Args:
        threads: CPU threads of each worker, set before it starts; None leaves the environment as it is.
        retries: how often a cell is tried again when its worker died (killed by the system, a crash in native code).
        function: 'module:function' that runs a cell.
        cards: the CUDA devices to spread workers over, see `resolve.cards`; none leaves the environment as it is.
    """

    def __init__(
        self,
        workers: int,
        threads: int | None = None,
        retries: int = 1,
        function: str = CELL_FUNCTION,
        cards: Sequence[Mapping[str, str]] = (),
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: at least one")
        self.workers, self.threads, self.retries, self.function = workers, threads, retries, function
        self.cards = cards

    def run(self, cells: Sequence[Cell], folder: Path, on_event: Callable[[Event], None]) -> None:
        """Run all cells. On KeyboardInterrupt the workers are ended and it passes on; cells resume in a later run."""
        waiting = deque(cells)
        deaths: Counter[str] = Counter()
        pool: list[_Worker] = []
        try:
            while waiting or any(member.cell for member in pool):
                self._hand_out(pool, waiting, folder, on_event)
                for member in self._ready(pool):
                    alive = member.process.is_alive()  # asked before reading: then nothing it said is left unread
                    if self._receive(member, on_event) and alive:
                        continue
                    pool.remove(member)
                    _end([member])
                    member.pipe.close()
                    if member.cell is not None:
                        self._after_death(member, deaths, waiting, folder, on_event)
            for member in pool:
                with contextlib.suppress(OSError):
                    member.pipe.send(worker.END)
            for member in pool:
                member.process.join(timeout=10)
        finally:
            _end(pool)

    def _hand_out(
        self, pool: list[_Worker], waiting: deque[Cell], folder: Path, on_event: Callable[[Event], None]
    ) -> None:
        while waiting:
            idle = next((member for member in pool if member.cell is None and member.process.is_alive()), None)
            if idle is None and len(pool) >= self.workers:
                return
            if idle is None:
                idle = self._start(pool)
                pool.append(idle)
            idle.cell = waiting.popleft()
            on_event(Event("start", idle.cell.name))
            with contextlib.suppress(OSError):  # it has just died: `_ready` will say so
                worker.send_cell(idle.pipe, idle.cell, folder / idle.cell.name)

    def _start(self, pool: Sequence[_Worker]) -> _Worker:
        """A new worker, on the card that has the fewest."""
        card = min(self.cards, key=[member.card for member in pool].count, default={})
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=worker.main, args=(theirs, self.function), name="ablate-worker", daemon=False)
        with _environment({**worker_environment(self.threads), **card}), _interrupts_ignored():
            process.start()
        theirs.close()
        return _Worker(process, ours, card=card)

    def _ready(self, pool: list[_Worker]) -> list[_Worker]:
        handles = [handle for member in pool for handle in (member.pipe, member.process.sentinel)]
        ready = set(connections.wait(handles))
        return [member for member in pool if member.pipe in ready or member.process.sentinel in ready]

    def _receive(self, member: _Worker, on_event: Callable[[Event], None]) -> bool:
        """Pass on every event that is there; a cell that ended leaves its worker idle. False: the pipe is closed."""
        while True:
            try:
                if not member.pipe.poll():
                    return True
                event: Event = member.pipe.recv()
            except (EOFError, OSError):
                return False
            on_event(event)
            if event.kind in ("done", "failed"):
                member.cell = None

    def _after_death(
        self,
        member: _Worker,
        deaths: Counter[str],
        waiting: deque[Cell],
        folder: Path,
        on_event: Callable[[Event], None],
    ) -> None:
        cell = member.cell
        assert cell is not None
        deaths[cell.name] += 1
        how = death(member.process.exitcode)
        if deaths[cell.name] <= self.retries:
            waiting.appendleft(cell)
            on_event(Event("retry", cell.name, data={"text": f"its worker {how}; it runs again"}))
            return
        path = folder / cell.name
        error = RuntimeError(f"the worker {how}")
        report = rundir.failure(error) | {"type": "WorkerDied", "traceback": _last_words(path / rundir.LOG_FILE)}
        launchers.record_failure(rundir.CellDir(path), report)
        on_event(Event("failed", cell.name, data=report))


def death(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-exit_code).name
            likely = ": most likely out of memory" if name == "SIGKILL" else ""
            return f"was ended by {name}{likely}"
    return f"ended with exit code {exit_code}"


def _last_words(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LOG_LINES:])


def worker_environment(threads: int | None) -> dict[str, str]:
    """Variables that a worker needs from its start; those a user has set stay, unless `threads` was asked for."""
    wanted = {"TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "false")}
    if threads is not None:
        wanted |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return wanted


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started within."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Have processes started within ignore Ctrl-C from their first instruction on: a disposition is inherited."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(pool: Sequence[_Worker]) -> None:
    """End workers: those that are through or dying of themselves first, then by signal."""
    for member in pool:
        member.process.join(timeout=0.2)
        if member.process.is_alive():
            member.process.terminate()
    for member in pool:
        member.process.join(timeout=5)
        if member.process.is_alive():
            member.process.kill()
            member.process.join()
