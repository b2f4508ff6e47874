"""Rows of a benchmark that go wrong in every way; at the top level of a module, so that a worker can import them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from losses.bench_rows import ROWS


def _right(problem, hidden, weight, variant):
    return ROWS["full"].run(problem, hidden, weight, variant)


def hangs(problem, hidden, weight, variant):
    """With a process of its own, as compilers have, which must not outlive it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["FAKE_ROWS_SAW"] + ".child").write_text(str(child.pid))
    time.sleep(600)


def raises(problem, hidden, weight, variant):
    raise NotImplementedError("no kernel for this")


def dies(problem, hidden, weight, variant):
    os._exit(3)


def wrong(problem, hidden, weight, variant):
    return _right(problem, hidden, weight, variant) * 1.001


def looks(problem, hidden, weight, variant):
    """Right, and keeps what was written by the time it starts."""
    saw = Path(os.environ["FAKE_ROWS_SAW"])
    if not saw.exists():
        saw.write_text(Path(os.environ["FAKE_ROWS_LOOK_AT"]).read_text())
    return _right(problem, hidden, weight, variant)


def of_version(problem, hidden, weight, variant):
    import fake_peer

    if fake_peer.NUMBER != 1:
        raise RuntimeError(f"fake_peer is {fake_peer.NUMBER}")
    return _right(problem, hidden, weight, variant)


def hangs_in_kl(problem, hidden, weight):
    time.sleep(600)


absent = _right
