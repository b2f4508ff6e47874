"""Checks that span cells: is what stands side by side in a table comparable at all?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ablate import schema
from analysis.cells import Cell
from analysis.files import Problem

_SAME = ("python", "packages", "device", "threads")  # of env.json: what makes numbers differ
_RESOLVED = ("device", "loss_backend", "rollout")  # what `auto` came to


def duplicates(cells: Sequence[Cell]) -> list[Problem]:
    """Two folders that claim the same variant, seed and grid point: the later ones are set to state "damaged"."""
    seen: dict[str, str] = {}
    problems = []
    for cell in cells:
        if cell.variant is None:
            continue
        key = json.dumps([cell.variant, cell.seed, sorted(cell.point.items())], default=str)
        if key in seen:
            cell.state = "damaged"
            message = f"same variant, seed and grid point as {seen[key]}; left out"
            problems.append(Problem("error", message, f"{cell.directory.name}/{schema.CONFIG_FILE}"))
        else:
            seen[key] = cell.name
    return problems


def pairing(cells: Sequence[Cell]) -> list[Problem]:
    """The hashes schema.PAIRING must agree over the variants of one seed and grid point.

    A difference is an error: `stats.compare` leaves such a pair out. A finished cell without hashes is a warning.
    """
    problems = []
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.variant is not None and cell.state == "done":
            groups.setdefault(_where(cell), []).append(cell)
    for where, group in groups.items():
        for key in schema.PAIRING:
            values = _by_value(group, lambda c, key=key: c.pairing.get(key))  # type: ignore[misc]
            if len(values) > 1:
                message = f"NOT PAIRED at {where}: {key} differs: {_listing(values, 12)}; differences are left out"
                problems.append(Problem("error", message))
    bare = [c.name for c in cells if c.state == "done" and not set(schema.PAIRING) <= c.pairing.keys()]
    if bare:
        missing = f"pairing cannot be verified: hashes are missing in {_names(bare)}"
        problems.append(Problem("warning", missing))
    return problems


def provenance(cells: Sequence[Cell]) -> list[Problem]:
    """Results of several commits, package versions or devices in one table."""
    run = [c for c in cells if c.variant is not None and c.state != "new" and c.environment]
    problems = []
    commits = _by_value(run, lambda c: git_sha(c.environment))
    if len(commits) > 1:
        problems.append(Problem("warning", f"results of several git commits are mixed: {_listing(commits, 12)}"))
    axes = _axes(run)
    edited = [c.name for c in run if isinstance(c.environment.get("git"), dict) and c.environment["git"].get("dirty")]
    if edited:
        message = f"the code had changes that are in no commit when these ran: {_names(edited)}"
        problems.append(Problem("warning", message))
    for key in sorted({k for c in run for k in _comparable(c.environment)}):
        values = _by_value(run, lambda c, key=key: _comparable(c.environment).get(key))  # type: ignore[misc]
        if len(values) > 1 and not any(axis in key for axis in axes) and not _by_point(run, values):
            problems.append(Problem("warning", f"cells ran under different {key}: {_listing(values, 40)}"))
    return problems


def settings(cells: Sequence[Cell]) -> list[Problem]:
    """Settings that decide numbers and differ between cells, those of the grid's axes left out."""
    known = [c for c in cells if c.variant is not None and c.config]
    axes = _axes(known)
    flat = {c.name: schema.flatten(c.config) for c in known}
    problems = []
    for key in dict.fromkeys(k for settings in flat.values() for k in settings):
        if schema.is_execution(key) or key.rsplit(".", 1)[-1] in axes:
            continue
        values = _by_value(known, lambda c, key=key: flat[c.name].get(key))  # type: ignore[misc]
        if len(values) > 1 and not _by_point(known, values):
            problems.append(Problem("warning", f"cells differ in the setting {key}: {_listing(values, 40)}"))
    return problems


def _axes(cells: Sequence[Cell]) -> set[str]:
    """Short names of the grid's axes."""
    return {axis.rsplit(".", 1)[-1] for c in cells for axis in c.point}


def _by_point(cells: Sequence[Cell], values: dict[str, list[str]]) -> bool:
    """Whether a named point, which stands for several settings at once, decides which of `values` a cell has."""
    names = {c.name: c.point[schema.POINT_AXIS] for c in cells if schema.POINT_AXIS in c.point}
    having = [{names.get(cell) for cell in group} for group in values.values()]
    known = set().union(*having)
    return None not in known and len(known) == sum(map(len, having))


def git_sha(environment: dict[str, Any]) -> str | None:
    """The commit in an env.json, wherever provenance puts it: "git_sha", or "git" as text or with "sha" / "commit"."""
    git = environment.get("git_sha") or environment.get("git")
    if isinstance(git, dict):
        git = git.get("sha") or git.get("commit")
    return str(git) if git else None


def _comparable(environment: dict[str, Any]) -> dict[str, Any]:
    """Versions, device and what `auto` came to, flat."""
    flat = schema.flatten(environment)
    kept = {key: value for key, value in flat.items() if key.split(".")[0] in _SAME}
    return kept | {key: flat[key] for name in _RESOLVED if (key := f"resolved.{name}") in flat}


def _where(cell: Cell) -> str:
    return ", ".join([f"seed {cell.seed}", *(f"{axis}={value}" for axis, value in cell.point.items())])


def _by_value(cells: Sequence[Cell], value_of: Callable[[Cell], Any]) -> dict[str, list[str]]:
    """Shown value -> names of the cells that have it; cells without one are left out."""
    groups: dict[str, list[str]] = {}
    for cell in cells:
        value = value_of(cell)
        if value is not None:
            groups.setdefault(value if isinstance(value, str) else json.dumps(value, default=str), []).append(cell.name)
    return groups


def _listing(groups: dict[str, list[str]], width: int) -> str:
    return "; ".join(f"{value[:width]} in {_names(names)}" for value, names in groups.items())


def _names(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
