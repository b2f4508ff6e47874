"""Where cells run. A launcher takes planned cells and reports what happens to each; `execute` runs one right here.

A new place to run (a cluster) is a new module with a class of the `Launcher` protocol; it calls `execute` where the
cell runs.
"""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from ablate import files, provenance, rundir, status
from ablate.plan import Cell

CELL_FUNCTION = "ablate.cell:run_cell"

OnStep = Callable[[int, int, dict[str, Any]], None]
RunCell = Callable[[Cell, rundir.CellDir, OnStep], dict[str, Any]]


@dataclass(frozen=True)
class Event:
    """Something that happened to a cell.

    start: a worker took it.
    step: `step` of `total` steps are done, `data` is the row of metrics; of other work, {"status": words}.
    note: `data["text"]` is for the user. retry: its worker died, it runs again. done: `data` is the summary.
    failed: `data` is what failed.json holds.
    """

    kind: Literal["start", "step", "note", "retry", "done", "failed"]
    cell: str
    step: int = 0
    total: int = 0
    data: dict[str, Any] = field(default_factory=dict)


class Launcher(Protocol):
    """Runs cells. One that fails is reported and the others go on; only an interrupt by the user ends `run` early."""

    def run(self, cells: Sequence[Cell], folder: Path, on_event: Callable[[Event], None]) -> None:
        """Run all `cells`, each in `folder / cell.name`; returns when each is done or failed."""
        ...


def cell_function(name: str) -> RunCell:
    """The function 'module:function' that runs a cell; looked up at every call, so that it can be replaced."""
    module, _, function = name.partition(":")
    found: RunCell = getattr(importlib.import_module(module), function)
    return found


def execute(
    cell: Cell, directory: rundir.CellDir, run: Callable[[], RunCell], on_event: Callable[[Event], None]
) -> None:
    """Run one cell in this process and leave its files finished or failed; `run` gives the function that trains it.

    Every exception of the cell becomes a `failed` event with its traceback and failed.json. KeyboardInterrupt passes.
    """
    reached = (0, 0)

    def on_step(step: int, total: int, metrics: dict[str, Any]) -> None:
        nonlocal reached
        reached = (step, total)
        on_event(Event("step", cell.name, step, total, files.plain(metrics)))

    def on_status(text: str, done: int, total: int) -> None:
        on_event(Event("step", cell.name, done, total, {"status": text}))

    def on_note(text: str) -> None:
        on_event(Event("note", cell.name, data={"text": text}))

    try:
        with directory.lock():
            done = directory.read_done() if directory.state(cell.hash) == "done" else None
            if done is None:
                started = time.monotonic()
                directory.write_config(cell)
                train = run()
                _restart_on_other_ground(cell, directory, on_event)
                with status.listening(on_status, on_note):
                    summary = train(cell, directory, on_step)
                if directory.read_done() is None:
                    lasted = round(time.monotonic() - started, 3)
                    directory.finish({"seconds": lasted, "wall_seconds": lasted, **summary})
                done = directory.read_done()
                if not cell.config.train.keep_checkpoint:
                    shutil.rmtree(directory.checkpoint_dir, ignore_errors=True)
        on_event(Event("done", cell.name, *reached, data=done or {}))
    except (Exception, SystemExit) as error:
        step, total = reached
        report = rundir.failure(error, min(step + 1, total) if total else None)
        record_failure(directory, report)
        on_event(Event("failed", cell.name, step, total, report))


def record_failure(directory: rundir.CellDir, report: dict[str, Any]) -> None:
    """Write failed.json; where not even that goes (a full disk), say so in the report, which the terminal shows."""
    if report["type"] == rundir.CellBusy.__name__:
        return  # the files belong to the process that runs the cell
    try:
        directory.write_failure(report)
    except (OSError, ValueError) as error:
        report["message"] += f" (failed.json could not be written: {error})"


def _restart_on_other_ground(cell: Cell, directory: rundir.CellDir, on_event: Callable[[Event], None]) -> None:
    """Drop a half-run cell that began with other versions or another device: half of each would be neither's result."""
    before = directory.read_env()
    changed = provenance.differences(before, provenance.collect()) if before else []
    if changed:
        directory.restart()
        on_event(Event("note", cell.name, data={"text": f"starts anew, since it began with {'; '.join(changed)}"}))
