"""The held-out score along training, as a table: learning curves in numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import tables
from analysis.formats import Table, number
from analysis.load import Runs

MOST = 7  # columns: evaluations that are shown, the first and the last among them


def score_table(runs: Runs) -> Table | None:
    """The primary metric of the evaluations, mean and range over finished seeds.

    The table shows at most MOST of the steps at which all rows have a score, and is None where these are fewer than
    three; its frame has every evaluation.
    """
    column = runs.primary_column
    done = runs.evals[runs.evals["cell"].isin(runs.done["cell"])]
    if column not in done:
        return None
    done = done[np.isfinite(done[column])]
    scores = done.groupby(["point", "variant", "step"])[column].agg(mean="mean", least="min", most="max", n="size")
    by_row = {key: part.droplevel([0, 1]) for key, part in scores.groupby(["point", "variant"])}
    steps = sorted(set.intersection(*(set(part.index) for part in by_row.values()))) if by_row else []
    if len(steps) < 3:
        return None
    picked = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, MOST).round().astype(int))]
    seeds = runs.done.groupby(["point", "variant"]).size()
    shown = [key for key in tables.grid(runs) if key in by_row]
    rows, records = [], []
    for point, variant in shown:
        found, n = by_row[point, variant].to_dict("index"), int(seeds[point, variant])
        texts = (_text(**found[step], finished=n) for step in picked)
        rows.append((variant, *tables.coordinates(runs, point), str(n), *texts))
        records += [{"variant": variant, **runs.points[point], "step": step, **score} for step, score in found.items()]
    return Table(
        name="scores",
        title=f"{runs.primary_label}, by step",
        headers=("variant", *runs.axes, "n", *(f"step {step}" for step in picked)),
        rows=tuple(rows),
        align="l" + "r" * (len(runs.axes) + 1 + len(picked)),
        frame=pd.DataFrame(records),
        breaks=tables.breaks([point for point, _ in shown]),
        notes=("mean over n finished seeds (least to most of them)",),
    )


def _text(mean: float, least: float, most: float, n: int, finished: int) -> str:
    low, high = number(least, 2), number(most, 2)
    notes = [f"{low} to {high}"] if low != high else []
    notes += [f"{n} of {finished} seeds"] if n < finished else []
    return f"{number(mean, 2)} ({'; '.join(notes)})" if notes else number(mean, 2)
