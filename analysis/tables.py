"""The tables of a report, one function per table. Each takes `Runs` and returns a `formats.Table`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd

from ablate import schema
from analysis import stats
from analysis.formats import MISSING, Table, number, significant
from analysis.load import Runs, value_label
from analysis.stats import Baseline, Comparison, Interval
from analysis.words import POWER_SEEDS

TERMINAL = (
    "variant",
    "n",
    "start",
    "final",
    "difference",
    "verdict",
    "KL",
    "entropy",
    "|Δw|",
)  # headers; axes come on top
_EXTRA = ("kl", *schema.EXACT_KL, "entropy", "weight_distance", "tokens_per_second", "step_time", schema.SKIPPED_STEPS)
_EXACT_HEADERS = dict(zip(schema.EXACT_KL, ("exact KL", "forward KL"), strict=True))


def comparison_table(runs: Runs, *, baseline: Baseline | None = None, level: float = stats.LEVEL) -> Table:
    """The result: a row per grid point and variant with n, start, final mean and sd, and the paired difference.

    baseline: what differences are taken to; None: `stats.baseline_of`.
    """
    comparisons = stats.compare(runs, baseline=baseline, level=level)
    extra = _means(runs, _EXTRA)
    exact = [name for name in schema.EXACT_KL if name in runs.metrics]
    skipped = schema.SKIPPED_STEPS in runs.metrics
    headers = (
        *("variant", *runs.axes, "n", "start", "final", "difference", "verdict", "KL"),
        *(_EXACT_HEADERS[name] for name in exact),
        *("entropy", "|Δw|", "tokens/s", "s/step", *(["skipped"] if skipped else [])),
    )
    rows, records = [], []
    for c in comparisons:
        means = extra.get((c.variant, c.point), dict.fromkeys(_EXTRA, math.nan))
        rows.append(
            (
                c.variant,
                *coordinates(runs, c.point),
                _count(c.final.n, c.planned),
                number(c.start.mean),
                _plus_minus(c.final),
                _interval(c.difference),
                c.verdict,
                number(means["kl"]),
                *(number(means[name]) for name in exact),
                number(means["entropy"]),
                number(means["weight_distance"], 2),
                number(means["tokens_per_second"], 0),
                number(means["step_time"]),
                *([number(means[schema.SKIPPED_STEPS], 1)] if skipped else []),
            )
        )
        records.append(_record(runs, c) | means)
    columns = [*_record_columns(runs), *_EXTRA]
    return Table(
        name="table",
        title=f"{runs.experiment}: {runs.primary_label}",
        headers=headers,
        rows=tuple(rows),
        align="l" + "r" * len(runs.axes) + "rrrrl" + "r" * (5 + len(exact) + skipped),
        frame=pd.DataFrame(records, columns=columns),
        breaks=breaks([c.group for c in comparisons]),
        notes=(
            f"start, final: {runs.primary_label}, before the first and after the last step; "
            "final is mean ± sd over seeds",
            f"difference: mean over seeds of final minus final of {_against(comparisons)} with the same seed, "
            f"with Student's {level:.0%} interval; not resolved: the interval holds zero",
            *_across_points(comparisons),
            "KL (k3 to the start) and entropy (nats): mean over the last tenth of the steps; |Δw|: L2 distance of the "
            "trained parameters from their start; tokens/s and s/step: medians without the first step; "
            "all of them are means over seeds",
            *(
                ["exact KL, forward KL: over the whole vocabulary, the latter of the start to the policy"]
                if exact
                else []
            ),
            *(["skipped: steps that GradScaler left out, as a gradient was not finite"] if skipped else []),
            "n: finished seeds",
        ),
    )


def reward_table(runs: Runs) -> Table:
    """Every reward function's mean over the first and over the last tenth of the training steps."""
    names = ["reward", *(f"rewards/{name}/mean" for name in runs.reward_names)]
    titles = ["total", *runs.reward_names]
    done = runs.metrics[runs.metrics["cell"].isin(runs.done["cell"])]
    rows, records = [], []
    for point, variant in grid(runs):
        part = done[(done["point"] == point) & (done["variant"] == variant)]
        cells = [frame for _, frame in part.groupby("cell")]
        texts = []
        record: dict[str, Any] = {"variant": variant, **runs.points[point], "n": len(cells)}
        for name, title in zip(names, titles, strict=True):
            first = _mean(_edge(frame, name, head=True) for frame in cells)
            last = _mean(_edge(frame, name, head=False) for frame in cells)
            texts.append(f"{number(first)} → {number(last)}" if not math.isnan(last) else MISSING)
            record |= {f"{title}/first": first, f"{title}/last": last}
        rows.append((variant, *coordinates(runs, point), str(len(cells)), *texts))
        records.append(record)
    return Table(
        name="rewards",
        title="Rewards in training, by reward function",
        headers=("variant", *runs.axes, "n", *titles),
        rows=tuple(rows),
        align="l" + "r" * (len(runs.axes) + 1 + len(titles)),
        frame=pd.DataFrame(records),
        breaks=breaks([point for point, _ in grid(runs)]),
        notes=("mean over seeds: first tenth of the steps → last tenth, on training prompts as sampled",),
    )


def power_table(runs: Runs, *, baseline: Baseline | None = None, level: float = stats.LEVEL) -> Table:
    """What the seeds at hand can resolve, and how many it would take for the difference seen."""
    rows, records = [], []
    compared = [c for c in stats.compare(runs, baseline=baseline, level=level) if c.difference is not None]
    for c in compared:
        difference = c.difference
        assert difference is not None
        known = difference.n >= 2
        low, high = stats.sd_interval(difference.sd, difference.n, level) if known else (math.nan, math.nan)
        sizes = {
            k: stats.smallest_difference(k, difference.sd, level=level) if known else math.nan for k in POWER_SEEDS
        }
        needed = stats.seeds_needed(difference.mean, difference.sd, level=level) if known else None
        rows.append(
            (
                c.variant,
                *coordinates(runs, c.point),
                str(difference.n),
                number(difference.mean, signed=True),
                significant(difference.sd),
                f"{significant(low)} to {significant(high)}" if known else MISSING,
                *(significant(size) for size in sizes.values()),
                MISSING if needed is None else str(needed),
            )
        )
        spread = {"n": difference.n, "difference": difference.mean, "sd": difference.sd, "sd_low": low, "sd_high": high}
        record = {"variant": c.variant, **runs.points[c.point], **spread}
        record |= {f"smallest_difference_n{k}": size for k, size in sizes.items()} | {"seeds_needed": needed}
        records.append(record)
    frame = pd.DataFrame(records)
    if len(frame):
        frame["seeds_needed"] = frame["seeds_needed"].astype("Int64")
    return Table(
        name="power",
        title=f"What a number of seeds resolves ({stats.POWER:.0%} power)",
        headers=(
            "variant",
            *runs.axes,
            "n",
            "seen",
            "sd",
            "sd between",
            *(f"n = {k}" for k in POWER_SEEDS),
            "n for seen",
        ),
        rows=tuple(rows),
        align="l" + "r" * (len(runs.axes) + 4 + len(POWER_SEEDS) + 1),
        frame=frame,
        breaks=breaks([c.group for c in compared]),
        notes=(
            f"seen, sd: mean and spread of the paired differences to {_against(compared)}; sd between: its own "
            f"{level:.0%} interval, which is wide for few seeds, so read the rest as an order of magnitude",
            f"n = k: the true difference that k seeds resolve with {stats.POWER:.0%} probability "
            "(noncentral t, with the sd seen); n for seen: seeds that this takes for the difference seen",
        ),
    )


def mismatch_table(runs: Runs) -> Table | None:
    """How far the engine's log-probs of the sampled tokens are from the trainer's; None where no engine gave any."""
    column, ratio = "sampling/sampling_logp_difference", "sampling/sequence_ratio"
    if f"{column}/mean" not in runs.metrics:
        return None
    done = runs.metrics[runs.metrics["cell"].isin(runs.done["cell"])]
    names = [f"{ratio}/{q}" for q in ("mean", "min", "q05", "q95", "max")]
    rows, records = [], []
    for point, variant in grid(runs):
        part = done[(done["point"] == point) & (done["variant"] == variant)]
        cells = [frame for _, frame in part.groupby("cell")]
        first, last = (_mean(_edge(frame, f"{column}/mean", head=head) for frame in cells) for head in (True, False))
        most = _mean([part[f"{column}/max"].max()]) if f"{column}/max" in part else math.nan
        ratios = {name: _mean(part[name]) if name in part else math.nan for name in names}
        kept = _mean(part["sampling/kept_mass/mean"]) if "sampling/kept_mass/mean" in part else math.nan
        differences = f"{significant(first)} → {significant(last)}" if not math.isnan(last) else MISSING
        shown = (differences, significant(most), *(number(ratios[name]) for name in names), number(kept))
        rows.append((variant, *coordinates(runs, point), str(len(cells)), *shown))
        values = {"difference/first": first, "difference/last": last, "difference/max": most, **ratios, "kept": kept}
        records.append({"variant": variant, **runs.points[point], "n": len(cells), **values})
    titles = ("|Δ log-prob|", "largest", *(f"ratio {n.rpartition('/')[2]}" for n in names), "kept mass")
    return Table(
        name="mismatch",
        title="Sampler and trainer: log-probs of the sampled tokens",
        headers=("variant", *runs.axes, "n", *titles),
        rows=tuple(rows),
        align="l" + "r" * (len(runs.axes) + 1 + len(titles)),
        frame=pd.DataFrame(records),
        breaks=breaks([point for point, _ in grid(runs)]) if len(runs.variants) > 1 else (),
        notes=(
            "|Δ log-prob|: mean over tokens in nats, first tenth of the steps → last tenth; largest: of any token of "
            "any step",
            "ratio: exp of the difference summed over a completion, its mean, extremes and quantiles over the batch, "
            "as means over steps and seeds; kept mass: what truncated sampling (top_p, top_k, min_p) left of the "
            "distribution",
        ),
    )


def pairing_table(runs: Runs) -> Table:
    """Per grid point and seed: the hashes that the variants share, or how many different ones there are."""
    rows, records = [], []
    known = runs.cells[runs.cells["variant"].notna()]
    groups = [(p, s) for p in runs.points for s in runs.seeds]
    for point, seed in groups:
        part = known[(known["point"] == point) & (known["seed"] == seed)]
        with_hash = part[part[list(schema.PAIRING)].notna().any(axis=1)]
        texts = []
        record: dict[str, Any] = {"seed": seed, **runs.points[point], "cells": len(with_hash)}
        for key in schema.PAIRING:
            values = sorted(part[key].dropna().unique())
            texts.append(values[0][:12] if len(values) == 1 else f"{len(values)} DIFFERENT" if values else MISSING)
            record[key] = " ".join(values)
        rows.append((str(seed), *coordinates(runs, point), _count(len(with_hash), len(part)), *texts))
        records.append(record)
    return Table(
        name="pairing",
        title="Pairing: what the variants of one seed share",
        headers=("seed", *runs.axes, "cells", *map(hash_name, schema.PAIRING)),
        rows=tuple(rows),
        align="r" * (len(runs.axes) + 2) + "l" * len(schema.PAIRING),
        frame=pd.DataFrame(records),
        breaks=breaks([point for point, _ in groups]),
        notes=("first 12 digits of SHA-256; one value means that all variants of this seed had the same",),
    )


def cells_table(runs: Runs) -> Table:
    """Every cell with its state, and what failed."""
    summary = stats.summarise(runs)
    failures = runs.failures.drop_duplicates("cell").set_index("cell")
    rows, records = [], []
    results = ["state", "steps", "start", "final", *stats.TAILS[:-1], "weight_distance", "seconds"]
    for row, commit in zip(summary.to_dict("records"), runs.cells["git_sha"], strict=True):
        cell, why = row["cell"], ""
        if cell in failures.index:
            failure = failures.loc[cell]
            why = f"{_text(failure['type'])} at step {_text(failure['step'])}: {_text(failure['message'])}"
        elif row["state"] in ("damaged", "changed"):
            why = "; ".join(_short(p) for p in runs.problems if p.path and p.path.startswith(f"{cell}/"))
        rows.append((cell, row["state"], str(row["steps"]), number(row["final"]), number(row["seconds"], 1), why))
        record = {key: row[key] for key in ("cell", "variant", "seed")} | runs.points.get(row["point"], {})
        records.append(record | {key: row[key] for key in results} | {"git_sha": commit, "problem": why})
    return Table(
        name="cells",
        title="Cells",
        headers=("cell", "state", "steps", "final", "seconds", "problem"),
        rows=tuple(rows),
        align="llrrrl",
        frame=pd.DataFrame(records),
        notes=("only cells in state done enter the comparison",),
    )


def _against(comparisons: list[Comparison]) -> str:
    return comparisons[0].against if comparisons else stats.BASELINE


def _across_points(comparisons: list[Comparison]) -> list[str]:
    """What pairs of two grid points have in common, where such are compared."""
    if not any(c.along == "point" for c in comparisons):
        return []
    apart = dict.fromkeys(key for c in comparisons for key in c.differing)
    shared = ", ".join(hash_name(key) for key in schema.PAIRING if key not in apart)
    rest = f"; different, as an axis may make them: {', '.join(map(hash_name, apart))}" if apart else ""
    return [f"grid points are paired by seed; equal within pairs: {shared}{rest}; pairs on other data are left out"]


def hash_name(key: str) -> str:
    """ "initial_weights_sha256" -> "initial weights"."""
    return key.removesuffix("_sha256").replace("_", " ")


def _means(runs: Runs, columns: Iterable[str]) -> dict[tuple[str, str], dict[str, float]]:
    """Means over finished seeds of columns of `stats.summarise`, by (variant, point)."""
    summary = stats.summarise(runs)
    summary = summary[summary["state"] == "done"]
    return {
        (variant, point): {c: _mean(part[c]) for c in columns}
        for (variant, point), part in summary.groupby(["variant", "point"])
    }


def _mean(values: Iterable[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return float(np.mean(finite)) if finite else math.nan


def _edge(frame: pd.DataFrame, column: str, *, head: bool) -> float:
    """Mean over the first or the last tenth of a cell's steps."""
    if column not in frame:
        return math.nan
    size = max(1, math.ceil(stats.TAIL * len(frame)))
    return _mean(frame[column].iloc[:size] if head else frame[column].iloc[-size:])


def _record_columns(runs: Runs) -> list[str]:
    return list(_record(runs, None))


def _record(runs: Runs, c: Comparison | None) -> dict[str, Any]:
    """Raw values of a comparison; with None only the keys count."""
    empty = stats.t_interval([])
    start, final, gain, difference = (c.start, c.final, c.gain, c.difference or empty) if c else (empty,) * 4
    return {
        "variant": c.variant if c else "",
        **{axis: runs.points[c.point].get(axis) if c else None for axis in runs.axes},
        "n": final.n,
        "planned": c.planned if c else 0,
        "start": start.mean,
        "final": final.mean,
        "final_sd": final.sd,
        "gain": gain.mean,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "difference": difference.mean,
        "difference_low": difference.low,
        "difference_high": difference.high,
        "difference_sd": difference.sd,
        "difference_n": difference.n,
        "p": difference.p,
        "verdict": c.verdict if c else "",
    }


def grid(runs: Runs) -> list[tuple[str, str]]:
    return [(point, variant) for point in runs.points for variant in runs.variants]


def coordinates(runs: Runs, point: str, show: Callable[[Any], str] = value_label) -> tuple[str, ...]:
    return tuple(show(runs.points[point][axis]) if axis in runs.points[point] else MISSING for axis in runs.axes)


def breaks(keys: list[str]) -> tuple[int, ...]:
    return tuple(i for i in range(1, len(keys)) if keys[i] != keys[i - 1])


def _count(n: int, planned: int) -> str:
    return str(n) if n == planned else f"{n} of {planned}"


def _plus_minus(interval: Interval) -> str:
    if interval.n < 2:
        return number(interval.mean)
    return f"{number(interval.mean)} ± {number(interval.sd)}"


def _interval(interval: Interval | None) -> str:
    if interval is None or interval.n == 0:
        return MISSING
    if interval.n == 1:
        return number(interval.mean, signed=True)
    return f"{number(interval.mean, signed=True)} [{number(interval.low)}, {number(interval.high)}]"


def _text(value: Any) -> str:
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    return "?" if missing else f"{value:g}" if isinstance(value, float) else str(value)


def _short(problem: Any) -> str:
    line = f", line {problem.line}" if problem.line else ""
    return f"{problem.path.rsplit('/', 1)[-1]}{line}: {problem.message}"
