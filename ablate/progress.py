"""What a sweep shows while it runs: a bar per running cell and one for the whole; lines where there is no terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining

from ablate.launchers import Event

HEARTBEAT = 30.0  # seconds between lines of a running cell where there is no terminal
SHOWN = (("reward", "reward"), ("kl", "kl"), ("loss", "loss"))


class Board:
    """Turns events into progress bars, and keeps what came of each cell."""

    def __init__(self, console: Console, cells: int, finished: int = 0) -> None:
        self.console, self.cells, self.finished = console, cells, finished
        self.done: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, dict[str, Any]] = {}
        self._tasks: dict[str, TaskID] = {}
        self._spoke: dict[str, float] = {}
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            Remaining(),
            TextColumn("{task.fields[latest]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._all = self._bars.add_task("all cells", total=cells, completed=finished, latest="")

    @contextlib.contextmanager
    def live(self) -> Iterator[Board]:
        """Show the bars while the block runs."""
        with self._bars:
            yield self

    def __call__(self, event: Event) -> None:
        """Take an event of a launcher."""
        getattr(self, f"_{event.kind}")(event)

    def _start(self, event: Event) -> None:
        self._close(event.cell)
        self._tasks[event.cell] = self._bars.add_task(event.cell, total=None, latest="starting")
        self._spoke[event.cell] = time.monotonic()

    def _step(self, event: Event) -> None:
        latest = str(event.data.get("status") or _latest(event.data))
        if event.cell in self._tasks:
            total = event.total or None
            self._bars.update(self._tasks[event.cell], completed=event.step, total=total, latest=escape(latest))
        if not self.console.is_terminal and time.monotonic() - self._spoke.get(event.cell, 0.0) > HEARTBEAT:
            self._spoke[event.cell] = time.monotonic()
            self._say(f"{event.cell}: {event.step} of {event.total}  {latest}")

    def _note(self, event: Event) -> None:
        self._say(f"{event.cell}: {event.data['text']}")

    def _retry(self, event: Event) -> None:
        self._close(event.cell)
        self._say(f"{event.cell}: {event.data['text']}")

    def _done(self, event: Event) -> None:
        self.done[event.cell] = event.data
        seconds = event.data.get("seconds")
        self._end(event.cell, "done" + (f" in {seconds:.1f} s" if isinstance(seconds, int | float) else ""))

    def _failed(self, event: Event) -> None:
        self.failed[event.cell] = event.data
        first = (event.data["message"].splitlines() or [""])[0]
        self._end(event.cell, f"FAILED: {event.data['type']}: {first}")

    def _end(self, cell: str, words: str) -> None:
        self._close(cell)
        self.finished += 1
        self._bars.update(self._all, completed=self.finished)
        self._say(f"[{self.finished}/{self.cells}] {cell}: {words}")

    def _close(self, cell: str) -> None:
        task = self._tasks.pop(cell, None)
        if task is not None:
            self._bars.remove_task(task)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _latest(metrics: dict[str, Any]) -> str:
    shown = [(label, metrics.get(key)) for key, label in SHOWN]
    return "  ".join(f"{label} {value:.3g}" for label, value in shown if isinstance(value, int | float))
