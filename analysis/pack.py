"""Packs an experiment's finished runs for keeping: what the report needs, without checkpoints, policies and logs."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

from ablate import schema
from analysis.files import PACKED, read_bytes, read_json, write_atomic
from analysis.load import load, load_rollouts, stored_rollouts
from analysis.render import write_kept

WHOLE = (schema.CONFIG_FILE, schema.ENV_FILE, schema.EVAL_FILE)


def pack(folder: Path, target: Path, *, rollouts: bool = False) -> list[Path]:
    """Copies the finished cells of `folder` into `target` and writes the report's table and curves there.

    metrics.jsonl is compressed (metrics.jsonl.gz, the same bytes for the same rows); a stored replay.json comes along,
    and with `rollouts` the stored completions (not the policies that drew them).
    Cells that `target` already holds under other names stay, so that parts of a sweep can be packed one after the
    other. Returns the folders of the cells. Nothing is written and ValueError is raised where there is no finished
    cell, where one is damaged, where `target` is or lies in `folder`, or holds another run under a cell's name.
    """
    finished = {path.parent.name for path in folder.glob(f"*/{schema.DONE_FILE}")}
    if not finished:
        raise ValueError(f"{folder}: no finished run to pack")
    if target.resolve() == folder.resolve() or folder.resolve() in target.resolve().parents:
        raise ValueError(f"{target}: give another folder than that of the runs, and none inside it")
    runs = load(folder)
    damaged = sorted(finished - set(runs.done["cell"]))
    if damaged:
        why = [str(problem) for problem in runs.problems if (problem.path or "").split("/")[0] in damaged]
        raise ValueError(
            f"{folder}: nothing was packed, {', '.join(damaged[:5])} cannot be used; restore or take away what is "
            f"damaged: {'; '.join(why[:5])}"
        )
    cells = [folder / name for name in sorted(finished)]
    stored = {cell: stored_rollouts(folder, cell.name) if rollouts else {} for cell in cells}
    for cell in cells:
        _refuse_another(cell, target / cell.name)
        if not rollouts and (target / cell.name / schema.ROLLOUTS_DIR).exists():
            raise ValueError(
                f"{target / cell.name}: holds completions of an earlier packing, which may be another run's; nothing "
                "was packed: say --rollouts, or delete them"
            )
        for step in stored[cell]:
            load_rollouts(folder, cell.name, step)  # raises RunFileError where it cannot be read
    for cell in cells:
        place = target / cell.name
        for name in WHOLE:
            if (cell / name).exists():
                write_atomic(place / name, (cell / name).read_bytes())
        rows = read_bytes(cell / schema.METRICS_FILE)
        write_atomic(place / f"{schema.METRICS_FILE}{PACKED}", gzip.compress(rows, 9, mtime=0))
        if rollouts:
            shutil.rmtree(place / schema.ROLLOUTS_DIR, ignore_errors=True)  # of an earlier packing
        for file in stored[cell].values():
            write_atomic(target / file.relative_to(folder), file.read_bytes())
        for replay in cell.glob(f"{schema.REPLAY_DIR}/*/{schema.REPLAY_FILE}"):
            read_json(replay)
            write_atomic(target / replay.relative_to(folder), replay.read_bytes())
        write_atomic(place / schema.DONE_FILE, (cell / schema.DONE_FILE).read_bytes())  # last, as in a run
    write_kept(target)
    return [target / cell.name for cell in cells]


def _refuse_another(cell: Path, place: Path) -> None:
    """Refuse to write over a run of another config, or into a run that is not packed."""
    known = place / schema.CONFIG_FILE
    if known.exists() and read_json(known).get("hash") != read_json(cell / schema.CONFIG_FILE)["hash"]:
        raise ValueError(f"{place}: holds a run of another config; nothing was packed: give another folder")
    if (place / schema.METRICS_FILE).exists():
        raise ValueError(f"{place}: holds a run that is not packed; nothing was packed: give another folder")
