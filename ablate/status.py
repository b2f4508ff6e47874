"""Progress of work that is no training step (a model being made, ...), from where it happens to where it shows.

Whoever does such work calls `report` and need not know who shows it; where nobody listens, nothing happens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

Listener = Callable[[str, int, int], None]

INTERVAL = 0.1  # seconds: reports in between are dropped, the first and the last of a piece of work are not

_listener: Listener | None = None
_last = 0.0


def report(text: str, done: int = 0, total: int = 0) -> None:
    """Say that `done` of `total` parts of some work are done; a total of 0 means that it is not known."""
    global _last
    now = time.monotonic()
    if _listener is None or (now - _last < INTERVAL and done not in (0, total)):
        return
    _last = now
    _listener(text, done, total)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send every report of the block to `listener`."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
