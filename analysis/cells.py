"""One cell's run files: reading them, and what a cell's state is.

done      finished, and the hash in done.json is that of config.json
failed    failed.json is there
partial   started, neither finished nor failed
new       planned: a config and no step
changed   done.json or failed.json stems from another config than config.json
damaged   a file is cut short, edited or contradicts another
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ablate import schema
from analysis.files import PACKED, Problem, RunFileError, read_json, read_jsonl

SECTIONS = ("packages", "device", "cpu", "resolved", "model")  # of env.json
FILES = (
    schema.CONFIG_FILE,
    schema.ENV_FILE,
    schema.METRICS_FILE,
    schema.EVAL_FILE,
    schema.DONE_FILE,
    schema.FAILED_FILE,
)


@dataclass
class Cell:
    """What the files of one cell say. `variant` is None where config.json could not be read.

    axes: values of the grid's axes in the order of the sweep, as far as stored. metrics, evals: the rows of the
    JSON-lines files, in file order. pairing: schema.PAIRING -> hash, as far as stored.
    """

    directory: Path
    name: str
    variant: str | None = None
    seed: int | None = None
    point: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, list[Any]] = field(default_factory=dict)
    experiment: str = ""
    state: str = "new"
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    done: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    evals: list[dict[str, float]] = field(default_factory=list)
    failure: dict[str, Any] | None = None
    pairing: dict[str, str] = field(default_factory=dict)

    @property
    def span(self) -> tuple[datetime | None, datetime | None]:
        """When a finished cell began and ended: with loading and evaluations; of one that was resumed, its steps."""
        ended, began = _time(self.done.get("finished_at")), _time(self.environment.get("started_at"))
        if ended is None:
            return None, None
        steps, whole = self.done.get("seconds"), self.done.get("wall_seconds")
        lasted = [x for x in (steps, whole) if isinstance(x, int | float) and math.isfinite(x) and 0 <= x < 1e9]
        if began is not None and whole is None and began <= ended:
            lasted.append((ended - began).total_seconds())
        return (ended - timedelta(seconds=max(lasted)) if lasted else None), ended

    def lookup(self, key: str) -> str | None:
        """A text of the task that env.json, or else config.json, holds."""
        task = self.environment.get("task")
        found = (source.get(key) for source in (task, self.environment, self.config) if isinstance(source, dict))
        return next((str(value) for value in found if value), None)


def read_cell(folder: Path, root: Path, problems: list[Problem], strict: bool) -> Cell:
    """Read the cell in `folder`; faults go to `problems` with paths relative to `root`, or are raised when `strict`."""
    cell = Cell(folder, folder.name)
    damaged = False

    def note(error: RunFileError) -> None:
        nonlocal damaged
        if strict:
            raise error
        damaged = True
        problems.append(Problem("error", error.reason, relative(error.path, root), error.line))

    config_hash = None
    try:
        config_hash = _read_config(cell, folder / schema.CONFIG_FILE)
    except RunFileError as error:
        note(error)
    for name, target in ((schema.ENV_FILE, "environment"), (schema.DONE_FILE, "done"), (schema.FAILED_FILE, "failure")):
        path = folder / name
        if path.exists():
            try:
                setattr(cell, target, read_json(path))
            except RunFileError as error:
                note(error)
    for name, target in ((schema.METRICS_FILE, "metrics"), (schema.EVAL_FILE, "evals")):
        path = folder / name
        if path.exists() or path.with_name(name + PACKED).exists():
            try:
                rows, torn = read_jsonl(path, schema.STEP)
            except RunFileError as error:
                note(error)
                continue
            setattr(cell, target, rows)
            if torn:
                message = "the last line is torn (a killed writer); it is left out"
                problems.append(Problem("warning", message, relative(path, root), len(rows) + 1))
    seconds = cell.done.get("seconds")
    if seconds is not None and not isinstance(seconds, int | float):
        note(RunFileError(folder / schema.DONE_FILE, None, f"'seconds' should be a number, found {seconds!r}"))
        cell.done = {**cell.done, "seconds": None}
    for name, source in ((schema.ENV_FILE, cell.environment), (schema.DONE_FILE, cell.done)):
        pairing = source.get("pairing") or {}
        if not isinstance(pairing, dict):
            note(RunFileError(folder / name, None, f"'pairing' should hold hashes, found {pairing!r}"))
            continue
        cell.pairing |= {key: value for key, value in pairing.items() if isinstance(value, str)}
    if not isinstance(cell.done.get("eval") or {}, dict):
        note(RunFileError(folder / schema.DONE_FILE, None, f"'eval' should hold scores, found {cell.done['eval']!r}"))
    for key in SECTIONS:
        if not isinstance(cell.environment.get(key) or {}, dict):
            found = cell.environment.pop(key)
            note(RunFileError(folder / schema.ENV_FILE, None, f"{key!r} should be an object, found {found!r}"))
    if not damaged and cell.done:
        for contradiction in _contradictions(cell):
            note(contradiction)
    cell.state = _state(cell, config_hash, damaged, root, problems)
    return cell


def _read_config(cell: Cell, path: Path) -> str | None:
    """Fill in the identity of the cell; returns the config hash."""
    if not path.exists():
        raise RunFileError(path, None, "missing: these run files belong to no known cell")
    content = read_json(path)
    identity = content.get("cell")
    if not isinstance(identity, dict) or not {"name", "variant", "seed"} <= identity.keys():
        raise RunFileError(path, None, "'cell' should hold name, variant, seed and point")
    seed, point = identity["seed"], identity.get("point") or {}
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise RunFileError(path, None, f"'cell.seed' should be a whole number, found {seed!r}")
    if not isinstance(point, dict):
        raise RunFileError(path, None, f"'cell.point' should map axes to values, found {point!r}")
    config = content.get("config")
    if not isinstance(config, dict):
        raise RunFileError(path, None, f"'config' should be an object, found {config!r}")
    cell.name, cell.variant, cell.seed, cell.point = str(identity["name"]), str(identity["variant"]), seed, point
    if cell.name != cell.directory.name:
        reason = f"'cell.name' is {cell.name!r}, the folder is {cell.directory.name!r}: it was copied or renamed"
        cell.name = cell.directory.name
        raise RunFileError(path, None, reason)
    axes = identity.get("axes")
    cell.axes = {k: v for k, v in axes.items() if isinstance(v, list)} if isinstance(axes, dict) else {}
    cell.config, cell.experiment = config, str(content.get("experiment") or "")
    value = content.get("hash")
    if value != schema.config_hash(config, cell.variant, seed):
        raise RunFileError(path, None, "its hash does not fit its content: it was edited")
    return str(value)


def _contradictions(cell: Cell) -> list[RunFileError]:
    """Where a finished cell's files disagree with each other: the sign of a truncated or edited file."""
    found = []
    steps = cell.done.get("steps")
    last = int(cell.metrics[-1][schema.STEP]) if cell.metrics else 0
    if isinstance(steps, int) and steps != last:
        reason = f"ends at step {last}, done.json says {steps} steps: rows are missing or were added"
        found.append(RunFileError(cell.directory / schema.METRICS_FILE, len(cell.metrics) or None, reason))
    elif isinstance(steps, int) and len(cell.metrics) != steps:
        reason = f"holds {len(cell.metrics)} rows for {steps} steps: rows were taken out"
        found.append(RunFileError(cell.directory / schema.METRICS_FILE, None, reason))
    if not cell.evals:
        found.append(RunFileError(cell.directory / schema.EVAL_FILE, None, "no evaluation, yet the cell is done"))
        return found
    for key, value in (cell.done.get("eval") or {}).items():
        column = key if key.startswith(schema.EVAL_PREFIX) else schema.EVAL_PREFIX + key
        row = cell.evals[-1].get(column)
        if row is None or not isinstance(value, int | float):
            continue
        if not (math.isclose(row, value, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(row) and math.isnan(value))):
            reason = f"last {column} is {row!r}, done.json says {value!r}: one of them was edited"
            found.append(RunFileError(cell.directory / schema.EVAL_FILE, len(cell.evals), reason))
    return found


def _state(cell: Cell, config_hash: str | None, damaged: bool, root: Path, problems: list[Problem]) -> str:
    if damaged:
        return "damaged"
    for name, content in ((schema.DONE_FILE, cell.done), (schema.FAILED_FILE, cell.failure or {})):
        if content and content.get("hash") != config_hash:
            message = (
                f"hash {content.get('hash')!r} differs from {config_hash!r} in {schema.CONFIG_FILE}: "
                "these results come from another config and are left out"
            )
            problems.append(Problem("error", message, relative(cell.directory / name, root)))
            return "changed"
    if cell.done:
        return "done"
    if cell.failure is not None:
        return "failed"
    return "partial" if cell.metrics or cell.evals else "new"


def relative(path: Path, root: Path) -> str:
    """`path` below `root`, with forward slashes on every system."""
    return path.relative_to(root).as_posix()


def _time(text: Any) -> datetime | None:
    """A time in ISO 8601, taken as UTC where it names no zone; None where it is none."""
    try:
        time = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)
