"""Packs an experiment's finished runs for keeping: what the report needs, without rollouts, checkpoints and logs."""

from __future__ import annotations

import gzip
from pathlib import Path

from ablate import schema
from analysis.files import PACKED, read_bytes, write_atomic
from analysis.render import write_kept

WHOLE = (schema.CONFIG_FILE, schema.ENV_FILE, schema.EVAL_FILE, schema.DONE_FILE)


def pack(folder: Path, target: Path) -> list[Path]:
    """Copies the finished cells of `folder` into `target` and writes the report's table and curves there.

    metrics.jsonl is compressed (metrics.jsonl.gz, the same bytes for the same rows); a stored replay.json comes along.
    Cells that `target` already holds under other names stay, so that parts of a sweep can be packed one after the
    other. Returns the folders of the cells. Raises ValueError where there is no finished cell, or where `target` is
    `folder`.
    """
    cells = sorted(path.parent for path in folder.glob(f"*/{schema.DONE_FILE}"))
    if not cells:
        raise ValueError(f"{folder}: no finished run to pack")
    if target.resolve() == folder.resolve():
        raise ValueError(f"{target}: give another folder than that of the runs")
    for cell in cells:
        for name in WHOLE:
            write_atomic(target / cell.name / name, (cell / name).read_bytes())
        rows = read_bytes(cell / schema.METRICS_FILE)
        write_atomic(target / cell.name / f"{schema.METRICS_FILE}{PACKED}", gzip.compress(rows, 9, mtime=0))
        for replay in cell.glob(f"{schema.REPLAY_DIR}/*/{schema.REPLAY_FILE}"):
            write_atomic(target / replay.relative_to(folder), replay.read_bytes())
    write_kept(target)
    return [target / cell.name for cell in cells]
