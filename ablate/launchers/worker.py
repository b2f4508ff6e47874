"""The process that cells run in; it stays alive from cell to cell, since importing TRL takes longer than some."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import connection as connections
from pathlib import Path

from ablate import launchers, rundir
from ablate.launchers import Event
from ablate.plan import Cell

END = None  # sent in place of a cell


def main(pipe: connections.Connection, function: str) -> None:
    """Take (cell, path) from the pipe and send events back, until END comes or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    _end_with_parent()

    def send(event: Event) -> None:
        try:
            pipe.send(event)
        except OSError:  # the parent is gone, and this must not look like a failure of the cell
            os._exit(1)

    with contextlib.suppress(EOFError, OSError):
        while (job := pipe.recv()) is not END:
            cell, path = job
            with _output_to(Path(path) / rundir.LOG_FILE):
                launchers.execute(cell, rundir.CellDir(path), lambda: launchers.cell_function(function), send)


def _end_with_parent() -> None:
    """End this process when the parent ends: an orphan would go on writing into cells that the next run takes up."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connections.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Send what the process prints, native libraries included, to a file: the terminal belongs to the progress bars."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:  # a full or read-only disk: the cell will say so itself
        handle = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    faulthandler.enable()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()


def send_cell(pipe: connections.Connection, cell: Cell, path: Path) -> None:
    """The parent's side of the protocol: hand a cell to the worker."""
    pipe.send((cell, str(path)))
