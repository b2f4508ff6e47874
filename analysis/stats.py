"""Paired comparisons over seeds: Student t-intervals, verdicts, and what a number of seeds can resolve.

Every variant of one seed and grid point starts from the same weights on the same prompts, so the unit of evidence is
the per-seed difference to the baseline: `reference` at the same grid point or, where a sweep has one variant at
several points, the first point. With n of them the interval is mean +- t(n - 1) sd / sqrt(n) (Student 1908). A
percentile bootstrap over 3 seeds would cover about 73 % where it promises 95 %; the t-interval keeps its level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import pandas as pd
from scipy import optimize
from scipy import stats as distributions

from ablate import schema
from analysis.load import Runs, place

BASELINE = "reference"
LEVEL = 0.95
POWER = 0.8
TAIL = 0.1  # "final" training metrics are means over this last share of the steps
ACROSS_POINTS = ("data_sha256",)  # what a pair of two grid points must agree in: an axis may change the other hashes
TAILS = ("kl", *schema.EXACT_KL, "kl_own", "entropy", "reward", "grad_norm")
SUMMARY = ("start", "final", "gain", *TAILS, "weight_distance", "tokens_per_second", "step_time", "peak_memory_bytes",
           schema.SKIPPED_STEPS, "seconds")  # fmt: skip
_MAX_SEEDS = 100_000


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its t-interval.

    n (int); mean, sd (sample, n - 1), low, high in the unit of the values; level such as 0.95; p two-sided for mean 0.
    With n = 0 all are NaN; with n = 1 there is a mean and no interval (sd, low, high, p NaN). Values that are all equal
    give an interval of zero width.
    """

    n: int
    mean: float
    sd: float
    low: float
    high: float
    p: float
    level: float = LEVEL

    @property
    def resolved(self) -> bool | None:
        """Whether the interval leaves zero out; None where there is no interval."""
        if math.isnan(self.low):
            return None
        return self.low > 0 or self.high < 0

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Baseline:
    """What a cell is compared with, seed by seed: the cell of this variant and this grid point; None: of its own.

    `Baseline("reference")` holds every variant against reference at the same point, `Baseline(point="beta=0.04")` every
    point against that one, each variant by itself.
    """

    variant: str | None = None
    point: str | None = None

    @property
    def along(self) -> Literal["variant", "point"]:
        """What differs between the rows of one comparison."""
        return "variant" if self.variant else "point"


@dataclass(frozen=True)
class Comparison:
    """One variant at one grid point, over its finished seeds.

    planned: seeds of the experiment. start, final, gain = final - start: the headline metric. against: the baseline in
    words, such as "reference" or "beta 0.04". difference: per-seed final minus the baseline's, None for the baseline
    itself; its n counts the seeds of `paired`. unpaired: finished seeds left out because their pairing hashes differ
    from the baseline's. differing: hashes that differ within pairs nonetheless, as a grid axis may make them.
    weights_moved: whether the weight distance at the end is other than 0 for any seed; None where it is not known.
    group, label: what the rows of one comparison share, and what tells this one from them, in words.
    """

    variant: str
    point: str
    planned: int
    seeds: tuple[int, ...]
    start: Interval
    final: Interval
    gain: Interval
    difference: Interval | None
    against: str = BASELINE
    along: str = "variant"
    paired: tuple[int, ...] = ()
    unpaired: tuple[int, ...] = ()
    differing: tuple[str, ...] = ()
    weights_moved: bool | None = None
    group: str = ""
    label: str = ""

    @property
    def verdict(self) -> str:
        """baseline | no result | n = 1 | identical | not resolved | higher | lower"""
        if self.difference is None:
            return "baseline"
        if self.difference.n == 0:
            return "no result"
        if self.difference.resolved is None:
            return "n = 1"
        if self.difference.low == self.difference.high == 0:
            return "identical"
        if not self.difference.resolved:
            return "not resolved"
        return "higher" if self.difference.mean > 0 else "lower"


@lru_cache(maxsize=4096)
def t_quantile(n: int, level: float = LEVEL) -> float:
    """Two-sided Student quantile for n values (n - 1 degrees of freedom)."""
    return float(distributions.t.ppf((1 + level) / 2, n - 1))


def t_interval(values: Sequence[float] | np.ndarray, level: float = LEVEL) -> Interval:
    """Student's interval for the mean of `values` (1-d, any length; others than finite ones raise ValueError)."""
    if not 0 < level < 1:
        raise ValueError(f"level={level!r} should lie between 0 and 1, such as 0.95")
    array = np.asarray(values, dtype=np.float64)
    n = int(array.size)
    nan = math.nan
    if n == 0:
        return Interval(0, nan, nan, nan, nan, nan, level)
    if not np.isfinite(array).all():
        raise ValueError("values hold NaN or infinity; leave such seeds out first, so that n says how many there are")
    if n == 1:
        return Interval(1, float(array[0]), nan, nan, nan, nan, level)
    if array.min() == array.max():  # np.mean of equal values may be off by a rounding, and its sd not 0
        mean = float(array[0])
        return Interval(n, mean, 0.0, mean, mean, 1.0 if mean == 0 else 0.0, level)
    mean, sd = float(array.mean()), float(array.std(ddof=1))
    error = sd / math.sqrt(n)
    half = t_quantile(n, level) * error
    p = 2 * float(distributions.t.sf(abs(mean) / error, n - 1))
    return Interval(n, mean, sd, mean - half, mean + half, p, level)


@lru_cache(maxsize=4)
def summarise(runs: Runs) -> pd.DataFrame:
    """One row per cell: headline metric at the start (step 0), at the end and the gain, and how the run ended.

    Columns: cell, variant, seed, point, state, steps, then SUMMARY: start, final, gain, TAILS (means over the last
    tenth of the steps; of what is logged every few steps the last value where none is there), weight_distance (last
    step), tokens_per_second and step_time (medians over `rounds`), peak_memory_bytes (maximum), skipped_steps and
    seconds (sums over all steps). NaN where a value is missing or not finite.
    """
    rows = []
    evals = dict(list(runs.evals.groupby("cell")))
    for cell in runs.cells.itertuples():
        row = {key: getattr(cell, key) for key in ("cell", "variant", "seed", "point", "state", "steps", "seconds")}
        scores = evals.get(cell.cell)
        row["start"] = row["final"] = math.nan
        if scores is not None and runs.primary_column in scores:
            first = scores[scores[schema.STEP] == 0][runs.primary_column]
            row["start"] = float(first.iloc[0]) if len(first) else math.nan
            row["final"] = float(scores[runs.primary_column].iloc[-1])
        row["gain"] = row["final"] - row["start"]
        training = runs.steps.get(cell.cell)
        for name in TAILS:
            row[name] = _tail_mean(training, name)
        row["weight_distance"] = _last(training, "weight_distance")
        row |= rounds(runs, cell.cell, ("tokens_per_second", "step_time")).median().to_dict()
        known = training is not None and "peak_memory_bytes" in training
        row["peak_memory_bytes"] = float(training["peak_memory_bytes"].max()) if known else math.nan  # type: ignore[index]
        skipped = training is not None and schema.SKIPPED_STEPS in training
        row[schema.SKIPPED_STEPS] = float(training[schema.SKIPPED_STEPS].sum()) if skipped else math.nan  # type: ignore[index]
        rows.append(row)
    columns = ["cell", "variant", "seed", "point", "state", "steps", *SUMMARY]
    table = pd.DataFrame(rows, columns=columns)
    numbers = list(SUMMARY)
    table[numbers] = table[numbers].astype(float).where(lambda frame: np.isfinite(frame))
    return table


def baseline_of(runs: Runs) -> Baseline:
    """reference at the same grid point; where there is nothing of it to compare with, the first point."""
    if len(runs.points) == 1 or (BASELINE in runs.variants and len(runs.variants) > 1):
        return Baseline(BASELINE)
    return Baseline(point=next(iter(runs.points)))


def compare(
    runs: Runs, *, baseline: Baseline | None = None, column: str = "final", level: float = LEVEL
) -> list[Comparison]:
    """Every variant at every grid point against `baseline` (None: `baseline_of`), paired by seed, in display order.

    column: the column of `summarise` that `final` and `difference` are about. Cells that are not done, and seeds where
    the value is NaN, are left out. Where no finished cell of the baseline is there, differences have n = 0. A pair of
    one grid point must agree in all of schema.PAIRING, one of two points in ACROSS_POINTS.
    """
    baseline = baseline or baseline_of(runs)
    table = summarise(runs)
    table = table[table["state"] == "done"]
    hashes = runs.cells.set_index("cell")[list(schema.PAIRING)] if len(runs.cells) else pd.DataFrame()
    rows = [(variant, point) for point in runs.points for variant in runs.variants]
    if baseline.along == "point":
        rows = [(variant, point) for variant in runs.variants for point in runs.points]
    found = []
    for variant, point in rows:
        other = (baseline.variant or variant, baseline.point or point)
        base = table[(table["variant"] == other[0]) & (table["point"] == other[1])].set_index("seed")
        mine = table[(table["variant"] == variant) & (table["point"] == point)]
        mine = mine.dropna(subset=[column]).set_index("seed").sort_index()
        started = mine.dropna(subset=["start"])
        paired, unpaired, differences = [], [], []
        differing: dict[str, None] = {}
        for seed in mine.index:
            if seed not in base.index or math.isnan(base.loc[seed, column]):
                continue
            apart = _apart(hashes.loc[mine.loc[seed, "cell"]], hashes.loc[base.loc[seed, "cell"]])
            if any(point == other[1] or key in ACROSS_POINTS for key in apart):
                unpaired.append(int(seed))
                continue
            paired.append(int(seed))
            differing |= dict.fromkeys(apart)
            differences.append(float(mine.loc[seed, column] - base.loc[seed, column]))
        moved = mine["weight_distance"].dropna()
        where, names = place(runs.points[point]), place(runs.points.get(other[1], {}))
        against = " ".join(text for text in (baseline.variant, names if baseline.point else None) if text)
        found.append(
            Comparison(
                variant=variant,
                point=point,
                planned=len(runs.seeds),
                seeds=tuple(int(s) for s in mine.index),
                start=t_interval(started["start"].to_numpy(), level),
                final=t_interval(mine[column].to_numpy(), level),
                gain=t_interval((started[column] - started["start"]).to_numpy(), level),
                difference=None if other == (variant, point) else t_interval(differences, level),
                against=against,
                along=baseline.along,
                paired=tuple(paired),
                unpaired=tuple(unpaired),
                differing=tuple(differing),
                weights_moved=bool((moved != 0).any()) if len(moved) else None,
                group=where if baseline.along == "variant" else variant,
                label=variant if baseline.along == "variant" else where,
            )
        )
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values (Holm 1979), in the order given; each in [0, 1]."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted


def power(difference: float, sd: float, n: int, *, level: float = LEVEL) -> float:
    """Probability that n paired seeds resolve a true `difference` with its right sign (noncentral t distribution).

    sd: of the per-seed differences, same unit. With sd = 0 it is 1 for any difference but 0.
    """
    if n < 2 or difference == 0:
        return 0.0
    if sd == 0:
        return 1.0
    shift = abs(difference) / sd * math.sqrt(n)
    if shift > 1e3 * t_quantile(n, level):
        return 1.0
    return float(distributions.nct.sf(t_quantile(n, level), n - 1, shift))


def seeds_needed(difference: float, sd: float, *, target: float = POWER, level: float = LEVEL) -> int | None:
    """Smallest n that resolves `difference` with probability `target`; None where it is 0 or 100,000 seeds do not."""
    _check_power(sd, target)
    if difference == 0 or power(difference, sd, _MAX_SEEDS, level=level) < target:
        return None
    low, high = 1, 2
    while power(difference, sd, high, level=level) < target:
        low, high = high, min(2 * high, _MAX_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(difference, sd, middle, level=level) >= target else (middle, high)
    return high


def smallest_difference(n: int, sd: float, *, target: float = POWER, level: float = LEVEL) -> float:
    """The difference that n seeds resolve with probability `target`; NaN for n < 2, 0 for sd = 0. Same unit as sd."""
    _check_power(sd, target)
    if n < 2:
        return math.nan
    if sd == 0:
        return 0.0
    top = 4 * t_quantile(n, level)
    while power(top, 1.0, n, level=level) < target:
        top *= 2
    return sd * float(optimize.brentq(lambda d: power(d, 1.0, n, level=level) - target, 0.0, top, xtol=1e-10))


def sd_interval(sd: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Chi-squared interval for a standard deviation estimated from n values: with 3 of them, 0.52 to 6.3 times `sd`."""
    if n < 2:
        return math.nan, math.nan
    upper, lower = distributions.chi2.ppf([(1 + level) / 2, (1 - level) / 2], n - 1)
    return sd * math.sqrt((n - 1) / upper), sd * math.sqrt((n - 1) / lower)


def _check_power(sd: float, target: float) -> None:
    if not sd >= 0:
        raise ValueError(f"sd={sd!r} should be 0 or more")
    if not 0 < target < 1:
        raise ValueError(f"target={target!r} should lie between 0 and 1, such as 0.8")


def _apart(mine: pd.Series, other: pd.Series) -> list[str]:
    """The pairing hashes that both have and that differ."""
    known = [key for key in schema.PAIRING if isinstance(mine[key], str) and isinstance(other[key], str)]
    return [key for key in known if mine[key] != other[key]]


def _tail_mean(frame: pd.DataFrame | None, column: str) -> float:
    if frame is None or column not in frame:
        return math.nan
    values = frame[column].to_numpy()
    tail = values[-max(1, math.ceil(TAIL * len(values))) :]
    known = values[~np.isnan(values)]
    tail = tail[~np.isnan(tail)] if not np.isnan(tail).all() else known[-1:]
    return float(tail.mean()) if len(tail) else math.nan


def _last(frame: pd.DataFrame | None, column: str) -> float:
    return math.nan if frame is None or column not in frame else float(frame[column].iloc[-1])


def rounds(runs: Runs, cell: str, columns: Sequence[str]) -> pd.DataFrame:
    """What a step of a cell cost, one row per batch of rollouts, without the first, which pays for warming up.

    A row is the mean over the num_iterations steps that the batch served, only one of which drew it; of memory the
    maximum. `columns` are those of metrics.jsonl; NaN where a run lacks one. No row where it has no steps.
    """
    steps = runs.steps.get(cell, runs.metrics.iloc[:0])
    frame = steps.reindex(columns=list(columns)).astype(float)
    reuse = (runs.configs.get(cell, {}).get("train") or {}).get("num_iterations") or 1
    if reuse > 1:
        batch = (steps[schema.STEP] - 1) // int(reuse)
        if "tokens_per_second" in frame and "step_time" in steps:
            frame["tokens_per_second"] *= steps["step_time"] / steps["step_time"].groupby(batch).transform("mean")
        frame = frame.groupby(batch).agg({name: "max" if "memory" in name else "mean" for name in columns})
    return frame.iloc[1:] if len(frame) > 1 else frame
