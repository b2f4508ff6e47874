"""The held-out score along training, as a table: learning curves in numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import tables
from analysis.formats import MISSING, Table, number
from analysis.load import Runs

MOST = 7  # columns: evaluations that are shown, the first and the last among them


def score_table(runs: Runs) -> Table | None:
    """The primary metric of every evaluation, mean and range over finished seeds; None with fewer than three of them.

    The table shows at most MOST evaluations, its frame has all.
    """
    column = runs.primary_column
    done = runs.evals[runs.evals["cell"].isin(runs.done["cell"])]
    done = done[np.isfinite(done[column])] if column in done else done.iloc[:0]
    steps = sorted(done["step"].unique())
    if len(steps) < 3:
        return None
    picked = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, MOST).round().astype(int))]
    scores = done.groupby(["variant", "point", "step"])[column].agg(["mean", "min", "max", "size"])
    rows, records, points = [], [], []
    for point, variant in tables.grid(runs):
        shown = {}
        for step in steps:
            if (variant, point, step) in scores.index:
                mean, least, most, n = scores.loc[variant, point, step]
                shown[step] = _text(mean, least, most)
                place = {"variant": variant, **runs.points[point], "step": step}
                records.append({**place, "mean": mean, "least": least, "most": most, "n": int(n)})
        if shown:
            rows.append((variant, *tables.coordinates(runs, point), *(shown.get(step, MISSING) for step in picked)))
            points.append(point)
    return Table(
        name="scores",
        title=f"{runs.primary_label[:1].upper()}{runs.primary_label[1:]}, by step",
        headers=("variant", *runs.axes, *(f"step {step}" for step in picked)),
        rows=tuple(rows),
        align="l" + "r" * (len(runs.axes) + len(picked)),
        frame=pd.DataFrame(records),
        breaks=tables.breaks(points),
        notes=("mean over finished seeds (least to most of them)",),
    )


def _text(mean: float, least: float, most: float) -> str:
    return number(mean, 2) if least == most else f"{number(mean, 2)} ({number(least, 2)} to {number(most, 2)})"
