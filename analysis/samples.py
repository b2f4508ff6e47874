"""Completions out of the stored rollouts, as a reader of a report wants to see them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis import tables
from analysis.files import Problem, RunFileError
from analysis.formats import MISSING, Table
from analysis.load import Runs, load_rollouts, place, stored_rollouts

COLUMNS = ["step", "group", "sample", "prompt", "completion", "rewards", "advantage"]
# Of `matching`, for the task `sums`: a + b - c in two steps, as a + b = x, x - c = y or as a + b - c = x - c = y.
BOTH_STEPS = (
    r"What is (\d+ [-+] \d+) ([-+] \d+)\?[^?\n]*\n.*<reasoning>"
    r"(?:\1 = (-?\d+)\b[^\d=<]{1,6}\3 \2 = -?\d+|\1 \2 = -?\d+ \2 = -?\d+)",
    r"What is \d+ [-+] \d+ [-+] \d+\?[^?]*$",
)
LONGEST = 1200  # characters of a prompt or completion that are shown


@dataclass(frozen=True)
class Sample:
    """One completion; all fields are text as stored (shortened), to be escaped by whoever shows them."""

    prompt: str
    completion: str
    rewards: str
    advantage: str


@dataclass(frozen=True)
class Samples:
    """Completions of one cell at one optimizer step."""

    cell: str
    variant: str
    where: str
    step: int
    rows: tuple[Sample, ...]


def samples(runs: Runs, *, groups: int = 2, per_group: int = 4) -> tuple[list[Samples], list[Problem]]:
    """The first completions of the last stored step, for one cell per variant and grid point (its first seed with any).

    Files that cannot be read come back as problems of severity "warning": no number of the tables rests on them.
    """
    found, problems = [], []
    for point, coordinates in runs.points.items():
        for variant in runs.variants:
            part = runs.cells[(runs.cells["point"] == point) & (runs.cells["variant"] == variant)]
            for cell in part["cell"]:
                try:
                    frame = load_rollouts(runs.directory, cell, columns=COLUMNS)
                except RunFileError as error:
                    path = error.path.relative_to(runs.directory).as_posix()
                    problems.append(Problem("warning", error.reason, path))
                    continue
                if len(frame):
                    frame = frame.sort_values(["group", "sample"])
                    first = frame[frame["group"].isin(sorted(frame["group"].unique())[:groups])]
                    rows = first.groupby("group").head(per_group).to_dict("records")
                    shown = tuple(_sample(row) for row in rows)
                    found.append(Samples(cell, variant, place(coordinates), int(frame["step"].iloc[0]), shown))
                    break
    return found, problems


def table(runs: Runs, *, groups: int = 1, per_group: int = 4) -> Table:
    """The same completions as one table."""
    found, problems = samples(runs, groups=groups, per_group=per_group)
    rows = [
        (block.variant, block.where, str(block.step), row.prompt, row.completion, row.rewards, row.advantage)
        for block in found
        for row in block.rows
    ]
    headers = ("variant", "grid point", "step", "prompt", "completion", "rewards", "advantage")
    return Table(
        name="completions",
        title="Sample completions",
        headers=headers,
        rows=tuple(rows),
        align="llrlllr",
        frame=pd.DataFrame(rows, columns=list(headers)),
        breaks=tuple(i for i in range(1, len(rows)) if rows[i][:2] != rows[i - 1][:2]),
        notes=tuple(str(problem) for problem in problems) or ("first groups of the last stored step, one seed each",),
    )


def matching(runs: Runs, wanted: str, asked: str = "") -> Table:
    """How many of the stored completions match a regular expression, by variant, grid point, step and seed.

    wanted: searched in the prompt and, below it, the completion, so that it may refer back to what was asked. asked:
    only completions whose prompt has this regular expression in it count. A file that cannot be read is left out and
    named in the notes.
    """
    found: dict[tuple[str, str, int, int], tuple[int, int]] = {}
    left_out = []
    for cell in runs.done.itertuples():
        for step in stored_rollouts(runs.directory, cell.cell):
            try:
                frame = load_rollouts(runs.directory, cell.cell, step, columns=["prompt", "completion"]).astype(str)
            except RunFileError as error:
                left_out.append(f"left out: {error.path.relative_to(runs.directory).as_posix()}: {error.reason}")
                continue
            if pairs := [(p, c) for p, c in frame.itertuples(index=False) if re.search(asked, p)]:
                hits = sum(re.search(wanted, f"{p}\n{c}") is not None for p, c in pairs)
                found[cell.point, cell.variant, step, cell.seed] = hits, len(pairs)

    def shown(point: str, variant: str, step: int) -> str:
        counts = (found.get((point, variant, step, seed)) for seed in runs.seeds)
        return " ".join(MISSING if count is None else f"{count[0]}/{count[1]}" for count in counts)

    steps = sorted({step for _, _, step, _ in found})
    rows = [
        (variant, *tables.coordinates(runs, point), *(shown(point, variant, step) for step in steps))
        for point, variant in tables.grid(runs)
        if any(key[:2] == (point, variant) for key in found)
    ]
    records = [
        {"variant": variant, **runs.points[point], "seed": seed, "step": step, "hits": hits, "n": n}
        for (point, variant, step, seed), (hits, n) in found.items()
    ]
    headers = ("variant", *runs.axes, *(f"step {step}" for step in steps))
    return Table(
        name="matching",
        title="Completions that match",
        headers=headers,
        rows=tuple(rows),
        align="l" + "r" * (len(headers) - 1),
        frame=pd.DataFrame(records, columns=["variant", *runs.axes, "seed", "step", "hits", "n"]),
        notes=(f"stored completions of seeds {', '.join(map(str, runs.seeds))}", *left_out),
    )


def _sample(row: Mapping[Any, Any]) -> Sample:
    rewards = row["rewards"] if isinstance(row["rewards"], dict) else {}
    known = [f"{name} {_number(value)}" for name, value in rewards.items() if value is not None]
    return Sample(_shorten(row["prompt"]), _shorten(row["completion"]), ", ".join(known), _number(row["advantage"]))


def _shorten(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text) - LONGEST} more characters)"


def _number(value: Any) -> str:
    if isinstance(value, int | float) and math.isfinite(value):
        return f"{value:.3g}"
    return "-" if value is None or isinstance(value, float) else str(value)
