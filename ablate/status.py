"""Progress of work that is no training step (a model being made, ...), from where it happens to where it shows.

Whoever does such work calls `report` and need not know who shows it; where nobody listens, nothing happens. What is to
be kept, like the options of an engine, is told by `note`; where nobody listens, it is printed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

Listener = Callable[[str, int, int], None]
NoteListener = Callable[[str], None]

INTERVAL = 0.1  # seconds: reports in between are dropped, the first and the last of a piece of work are not

_listener: Listener | None = None
_notes: NoteListener | None = None
_last = 0.0


def report(text: str, done: int = 0, total: int = 0) -> None:
    """Say that `done` of `total` parts of some work are done; a total of 0 means that it is not known."""
    global _last
    now = time.monotonic()
    if _listener is None or (now - _last < INTERVAL and done not in (0, total)):
        return
    _last = now
    _listener(text, done, total)


def note(text: str) -> None:
    """Say something that the user keeps."""
    if _notes is None:
        print(text)
    else:
        _notes(text)


@contextlib.contextmanager
def listening(listener: Listener, notes: NoteListener | None = None) -> Iterator[None]:
    """Send every report of the block to `listener`, every note to `notes`."""
    global _listener, _notes
    before = _listener, _notes
    _listener, _notes = listener, notes
    try:
        yield
    finally:
        _listener, _notes = before
