"""Run files of one experiment as pandas frames, with everything that is wrong with them said by file and line.

Only cells in state "done" enter statistics; the states are explained in `analysis.cells`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ablate import schema
from analysis import checks
from analysis.cells import FILES, Cell, read_cell
from analysis.files import Problem, RunFileError

CELL_COLUMNS = ["cell", "variant", "seed", "point", "state", "steps", "seconds", "began", "ended", "git_sha",
                *schema.PAIRING]  # fmt: skip
KEY_COLUMNS = ["cell", "variant", "seed", "point", schema.STEP]
RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "results"
FAILURE_COLUMNS = ["cell", "step", "type", "message", "traceback"]


@dataclass(frozen=True, eq=False)
class Runs:
    """Everything read from `runs/<experiment>/`. Not to be changed: what is derived from it is kept.

    cells     one row per cell, CELL_COLUMNS; seconds: of its training steps; began, ended: UTC, NaT where not known
    metrics   one row per optimizer step: cell, variant, seed, point, step (from 1), then the columns of metrics.jsonl
    evals     one row per evaluation: cell, variant, seed, point, step (from 0), then eval/<name>
    failures  one row per failed cell, FAILURE_COLUMNS
    points    label of a grid point -> its coordinates, in display order; {"": {}} where there is no grid
    variants  names in display order: the founding four first, the others by name
    """

    directory: Path
    experiment: str
    cells: pd.DataFrame
    metrics: pd.DataFrame
    evals: pd.DataFrame
    failures: pd.DataFrame
    points: dict[str, dict[str, Any]]
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    primary_metric: str
    primary_label: str
    problems: tuple[Problem, ...] = ()
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def steps(self) -> dict[str, pd.DataFrame]:
        """Rows of `metrics` by cell, for the cells that have any."""
        return dict(list(self.metrics.groupby("cell")))

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the grid's axes, such as ("beta",)."""
        return tuple(dict.fromkeys(axis for point in self.points.values() for axis in point))

    @property
    def primary_column(self) -> str:
        return schema.EVAL_PREFIX + self.primary_metric

    @property
    def done(self) -> pd.DataFrame:
        return self.cells[self.cells["state"] == "done"]

    @property
    def planned(self) -> int:
        """Number of cells there would be with every seed for each variant and grid point that has one."""
        known = self.cells[["variant", "point"]].dropna().drop_duplicates()
        return max(len(self.cells), len(known) * len(self.seeds))

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Reward functions with a rewards/<name>/mean column, in order of appearance."""
        columns = [c for c in self.metrics.columns if c.startswith("rewards/") and c.endswith("/mean")]
        return tuple(c.removeprefix("rewards/").removesuffix("/mean") for c in columns)


def load(experiment_dir: str | os.PathLike[str], *, strict: bool = False) -> Runs:
    """Read all cells below `experiment_dir` (`runs/<experiment>`).

    strict: raise at the first problem of severity "error" instead of keeping it in `Runs.problems`.
    Raises ValueError when `experiment_dir` is no folder (with the nearest names beside it), RunFileError when strict.
    """
    directory = Path(experiment_dir)
    if not directory.is_dir():
        raise ValueError(f"experiment_dir={str(directory)!r} is no folder{_nearest(directory)}")
    problems: list[Problem] = []
    cells: list[Cell] = []
    for folder in sorted(p for p in directory.iterdir() if p.is_dir() and p.name != schema.REPORT_DIR):
        try:
            if any((folder / name).exists() for name in FILES):
                cells.append(read_cell(folder, directory, problems, strict))
        except OSError as failed:  # no right to look into it
            reason = f"cannot be read ({failed.strerror or failed})"
            if strict:
                raise RunFileError(folder, None, reason) from failed
            cells.append(Cell(folder, folder.name, state="damaged"))
            problems.append(Problem("error", reason, folder.name))
    problems += checks.duplicates(cells)
    problems += checks.pairing(cells)
    problems += checks.provenance(cells)
    problems += checks.settings(cells)
    if strict and (error := next((p for p in problems if p.severity == "error"), None)):
        raise ValueError(str(error))
    return _assemble(directory, cells, problems)


def committed(name: str) -> Path:
    """The folder of an experiment whose run files are part of the repository."""
    return RESULTS / name


def point_label(point: dict[str, Any]) -> str:
    """`{"beta": 0.04}` -> "beta=0.04"; "" for no grid."""
    return ", ".join(f"{axis}={value_label(value)}" for axis, value in point.items())


def place(point: dict[str, Any]) -> str:
    """A grid point in words: "beta 0.04", several axes with commas, a named point by its name, "" without a grid."""
    named = (value if axis == schema.POINT_AXIS else f"{axis} {value_label(value)}" for axis, value in point.items())
    return ", ".join(map(str, named))


def value_label(value: Any) -> str:
    """A grid value as shown: floats in shortest form, "none" for None, everything else as it is."""
    if value is None:
        return "none"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def variant_order(names: Iterable[str]) -> tuple[str, ...]:
    """The founding four first, in their order, then the others by name."""
    present = set(names)
    return tuple(n for n in schema.FOUNDING if n in present) + tuple(sorted(present - set(schema.FOUNDING)))


def load_rollouts(
    directory: Path, cell: str, step: int | None = None, columns: list[str] | None = None
) -> pd.DataFrame:
    """The stored completions of a cell at an optimizer step (None: the last stored): schema.ROLLOUT_COLUMNS.

    An empty frame where the cell stores none. Raises RunFileError where the file cannot be read.
    """
    stored = stored_rollouts(directory, cell)
    file = stored.get(max(stored, default=0) if step is None else step)
    if file is None:
        return pd.DataFrame(columns=columns or list(schema.ROLLOUT_COLUMNS))
    try:
        return pd.read_parquet(file, columns=columns)
    except Exception as error:  # pyarrow raises half a dozen unrelated types for a damaged file
        raise RunFileError(file, None, f"not a readable parquet file ({error})") from error


def stored_rollouts(directory: Path, cell: str) -> dict[int, Path]:
    """The files of a cell's stored completions by optimizer step, in their order."""
    paths = (directory / cell / schema.ROLLOUTS_DIR).glob("step-*.parquet")
    known = [path for path in paths if re.fullmatch(r"step-\d{6,}", path.stem) and path.is_file()]
    return {step: path for step, path in sorted((int(path.stem[5:]), path) for path in known)}


def _nearest(directory: Path) -> str:
    if not directory.parent.is_dir():
        return f"; its parent {str(directory.parent)!r} does not exist either"
    siblings = [p.name for p in directory.parent.iterdir() if p.is_dir()]
    close = difflib.get_close_matches(directory.name, siblings, n=3) or sorted(siblings)[:5]
    return f"; there are: {', '.join(close)}" if close else ""


def _assemble(directory: Path, cells: list[Cell], problems: list[Problem]) -> Runs:
    known = [c for c in cells if c.variant is not None]
    variants = variant_order(c.variant for c in known if c.variant is not None)
    orders = _orders(known)
    points = {point_label(c.point): c.point for c in sorted(known, key=lambda c: _sort_key(c.point, orders))}
    rank = {name: i for i, name in enumerate(points)}
    cells = sorted(
        cells,
        key=lambda c: (
            variants.index(c.variant) if c.variant is not None else len(variants),
            rank.get(point_label(c.point), len(rank)),
            -1 if c.seed is None else c.seed,
            c.name,
        ),
    )
    evals = _rows(cells, "evals")
    metric, label = _primary(known, evals, problems)
    failures = [
        {"cell": c.name, **{key: (c.failure or {}).get(key) for key in FAILURE_COLUMNS[1:]}}
        for c in cells
        if c.failure is not None and c.state in ("failed", "partial", "damaged")
    ]
    return Runs(
        directory=directory,
        experiment=next((c.experiment for c in known if c.experiment), directory.resolve().name),
        cells=_cells(cells),
        metrics=_rows(cells, "metrics"),
        evals=evals,
        failures=pd.DataFrame(failures, columns=FAILURE_COLUMNS),
        points=points or {"": {}},
        variants=variants,
        seeds=tuple(sorted({c.seed for c in known if c.seed is not None})),
        primary_metric=metric,
        primary_label=label,
        problems=tuple(problems),
        configs={c.name: c.config for c in cells},
        environments={c.name: c.environment for c in cells},
    )


def _cells(cells: list[Cell]) -> pd.DataFrame:
    frame = pd.DataFrame([_cell_row(c) for c in cells], columns=CELL_COLUMNS)
    for column in ("began", "ended"):
        frame[column] = pd.to_datetime(frame[column], utc=True)
    return frame


def _cell_row(cell: Cell) -> dict[str, Any]:
    return {
        "cell": cell.name,
        "variant": cell.variant,
        "seed": cell.seed,
        "point": point_label(cell.point),
        "state": cell.state,
        "steps": int(cell.metrics[-1][schema.STEP]) if cell.metrics else 0,
        "seconds": cell.done.get("seconds"),
        **dict(zip(("began", "ended"), cell.span, strict=True)),
        "git_sha": checks.git_sha(cell.environment),
        **{key: cell.pairing.get(key) for key in schema.PAIRING},
    }


def _rows(cells: list[Cell], kind: str) -> pd.DataFrame:
    """Metric or evaluation rows of all cells below each other; columns in order of first appearance."""
    rows = [
        {"cell": c.name, "variant": c.variant, "seed": c.seed, "point": point_label(c.point), **row}
        for c in cells
        if c.variant is not None
        for row in getattr(c, kind)
    ]
    columns = list(dict.fromkeys([*KEY_COLUMNS, *(key for row in rows for key in row)]))
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({schema.STEP: int, "seed": int}) if rows else frame


def _primary(cells: list[Cell], evals: pd.DataFrame, problems: list[Problem]) -> tuple[str, str]:
    """The headline metric (without prefix) and its label."""
    named = list(dict.fromkeys(value for c in cells if (value := c.lookup("primary_metric"))))
    labels = [value for c in cells if (value := c.lookup("primary_label"))]
    present = [c.removeprefix(schema.EVAL_PREFIX) for c in evals.columns if c.startswith(schema.EVAL_PREFIX)]
    if len(named) > 1:
        message = f"cells name different primary metrics: {', '.join(named)}; {named[0]} is shown"
        problems.append(Problem("error", message))
    if named and (named[0] in present or not present):
        return named[0], labels[0] if labels else named[0]
    if not present:
        return "score", "score"
    why = f"{schema.EVAL_PREFIX}{named[0]} is in no {schema.EVAL_FILE}" if named else "no cell names its primary_metric"
    problems.append(Problem("warning", f"{why}; {schema.EVAL_PREFIX}{present[0]} is shown in its place"))
    return present[0], present[0]


def _orders(cells: list[Cell]) -> dict[str, list[Any]]:
    """Values of every axis in the order of the sweep; of several sweeps the longest list, then what others add."""
    orders: dict[str, list[Any]] = {}
    lists = sorted(
        ((axis, values) for c in cells for axis, values in c.axes.items()), key=lambda x: (-len(x[1]), str(x))
    )
    for axis, values in lists:
        known = orders.setdefault(axis, [])
        known += [value for value in values if value not in known]
    return orders


def _sort_key(point: dict[str, Any], orders: dict[str, list[Any]]) -> tuple[Any, ...]:
    """Axis by axis: in the order of the sweep, where that is stored, else numbers by size before text by name."""
    keys = []
    for axis, value in point.items():
        order = orders.get(axis, [])
        rank = order.index(value) if value in order else len(order)
        number = isinstance(value, int | float)
        keys.append((axis, rank, not number, float(value) if number else 0.0, "" if number else str(value)))
    return tuple(keys)
