"""The result in sentences: what a table resolves, what it does not, and what more seeds would."""

from __future__ import annotations

import math
from collections.abc import Sequence

from analysis import stats
from analysis.formats import decimals_for, escape_markdown, fixed, number, significant
from analysis.load import Runs, place
from analysis.stats import Comparison, Interval

POWER_SEEDS = (3, 5, 8, 16)
SMALL_DRIFT = 0.01


class Lines(tuple[str, ...]):
    """Sentences that a notebook shows as a list."""

    def _repr_markdown_(self) -> str:
        return "\n".join(f"- {escape_markdown(line)}" for line in self)


def estimate(interval: Interval, *, signed: bool = True) -> str:
    """`-0.41 [-0.47, -0.35]`, with as many decimals as the width of the interval allows; the mean alone for n = 1."""
    if interval.n == 0:
        return "no value"
    if math.isnan(interval.low):
        return number(interval.mean, 3, signed=signed)
    if interval.low == interval.high == 0:
        return "0 [0, 0]"
    decimals = decimals_for(interval.half_width)
    if interval.mean and abs(interval.mean) < 0.5 * 10**-decimals:
        decimals += 1  # show which way the mean lies
    low, high = fixed(interval.low, decimals), fixed(interval.high, decimals)
    return f"{fixed(interval.mean, decimals, signed=signed)} [{low}, {high}]"


def learns(gain: Interval) -> str:
    """What a variant's own gain shows, in a verb: "learns", "does not learn", ..."""
    if gain.n == 0:
        return "has no start to compare with"
    if gain.mean == 0 and (gain.n == 1 or gain.low == gain.high):
        return "does not learn"
    if gain.resolved is None:
        return "moves up" if gain.mean > 0 else "moves down"
    if not gain.resolved:
        return "is not shown to learn"
    return "learns" if gain.mean > 0 else "ends below its start"


def sentence(comparison: Comparison) -> str:
    """One comparison in words, such as `no_detach does not learn: -0.41 [-0.47, -0.35] against reference, n = 3`."""
    c = comparison
    if not c.seeds:
        return f"{c.variant} has no finished run"
    text = _sentence(c, learns(c.gain))
    return f"{text}; its weights do not move" if c.weights_moved is False else text


def _sentence(c: Comparison, verb: str) -> str:
    n = f"n = {c.final.n}" + (f" of {c.planned}" if c.final.n < c.planned else "")
    if c.difference is None:
        decimals = decimals_for(c.final.sd)
        course = f"{number(c.start.mean, decimals)} to {number(c.final.mean, decimals)}"
        if c.gain.n == 0:
            return f"{c.variant} ends at {number(c.final.mean, decimals)}, {n}"
        rest = ", no interval from one seed" if c.gain.n == 1 else ""
        return f"{c.variant} {verb}: {course}, {estimate(c.gain)} over its start, {n}{rest}"
    if c.difference.n == 0:
        why = "no pair is left" if c.unpaired else f"no finished run of {c.against} to compare with"
        return f"{c.variant} {verb}: {estimate(c.gain)} over its start, {n}; {why}"
    against = f"{estimate(c.difference)} against {c.against}, n = {c.difference.n}"
    if c.difference.n < c.planned:
        against += f" of {c.planned}"
    other = c.against if c.along == "variant" else f"at {c.against}"
    if c.verdict == "n = 1":
        return f"{c.variant} {verb}: {against}, no interval from one seed"
    if c.verdict == "identical":
        ends = f"{c.against} ends" if c.along == "variant" else f"it ends {other}"
        return f"{c.variant} ends exactly where {ends}: {against}"
    if verb == "is not shown to learn":
        verb += f" ({estimate(c.gain)} over its start)"
    if c.verdict == "not resolved":
        return f"{c.variant} {verb}; its difference is not resolved: {against}"
    if verb != "learns":
        return f"{c.variant} {verb}: {against}"
    return f"{c.variant} learns {'more' if c.difference.mean > 0 else 'less'} than {other}: {against}"


def sentences(runs: Runs, comparisons: Sequence[Comparison]) -> list[str]:
    """One sentence per row of the comparison table, in its order, with the grid point in front."""
    if not comparisons:
        return ["No cell has a readable config, so there is nothing to compare."]
    lines = []
    for c in comparisons:
        where = place(runs.points[c.point])
        text = sentence(c)
        mine = runs.cells[(runs.cells["variant"] == c.variant) & (runs.cells["point"] == c.point)]
        left = mine["state"][mine["state"] != "done"].value_counts().sort_index()
        if len(left):
            text += f" ({', '.join(f'{count} {state}' for state, count in left.items())})"
        lines.append(f"{where}: {text}" if where else text)
    return lines


def multiplicity(comparisons: Sequence[Comparison]) -> str | None:
    """How many of the differences stay resolved when all of them are read together (Holm)."""
    tested = [c.difference for c in comparisons if c.difference is not None and c.difference.resolved is not None]
    if len(tested) < 2:
        return None
    alpha = 1 - tested[0].level
    kept = sum(p < alpha for p in stats.holm([d.p for d in tested]))
    resolved = sum(bool(d.resolved) for d in tested)
    verb = "is" if resolved == 1 else "are"
    return (
        f"Each interval stands alone: of {len(tested)} differences {resolved} {verb} resolved, "
        f"{kept} also when all are read together (Holm)"
    )


def verdicts(runs: Runs) -> Lines:
    """All that the runs show: what is resolved and what is not, each comparison, weights that hardly moved."""
    comparisons = stats.compare(runs)
    together = multiplicity(comparisons)
    return Lines((*resolution(comparisons), *([together] if together else []), *sentences(runs, comparisons),
                  *drift(runs, comparisons)))  # fmt: skip


def resolution(comparisons: Sequence[Comparison]) -> list[str]:
    """Which differences are resolved and which are not, a line each; nothing where no difference has an interval."""
    tested = [c for c in comparisons if c.difference is not None and c.difference.resolved is not None]
    lines = []
    for title, kind in (("Resolved", True), ("Not resolved", False)):
        names = [f"{c.group}: {c.label}" if c.group else c.label for c in tested if c.difference.resolved is kind]  # type: ignore[union-attr]
        if tested:
            lines.append(f"{title}, {len(names)} of {len(tested)}" + (f": {'; '.join(names)}" if names else ""))
    return lines


def drift(runs: Runs, comparisons: Sequence[Comparison]) -> list[str]:
    """Weights that moved, but by less than SMALL_DRIFT of the group's farthest: by how much."""
    summary = stats.summarise(runs)
    ends = summary[summary["state"] == "done"].groupby(["variant", "point"])["weight_distance"].mean().dropna()
    lines = []
    for group in dict.fromkeys(c.group for c in comparisons):
        far = {c.label: float(ends[c.variant, c.point]) for c in comparisons
               if c.group == group and (c.variant, c.point) in ends.index}  # fmt: skip
        most = max(far, key=lambda label: far[label], default="")
        for label, distance in far.items():
            if 0 < distance < SMALL_DRIFT * far[most]:
                where, share = f"{group}: " if group else "", f"{100 * distance / far[most]:.2g} %"
                lines.append(
                    f"{where}{label}'s weights end {number(distance)} from their start, {share} of {most}'s way"
                )
    return lines


def power_notes(comparisons: Sequence[Comparison]) -> list[str]:
    """Per group of comparisons: what its seeds and more of them resolve, with the widest seed spread seen there."""
    notes = []
    for group in dict.fromkeys(c.group for c in comparisons):
        spreads = [
            (c.difference.sd, c.label, c.difference.n)
            for c in comparisons
            if c.group == group and c.difference is not None and c.difference.n >= 2
        ]
        if not spreads:
            continue
        sd, label, n = max(spreads)
        where = f"{group}: " if group else ""
        if sd == 0:
            notes.append(f"{where}the differences of all seeds are equal, so their spread says nothing about power")
            continue
        low, high = stats.sd_interval(sd, n)
        sizes = sorted({n, *(k for k in POWER_SEEDS if k > n)})[:4]
        gains = [f"n = {k} seeds resolve {significant(stats.smallest_difference(k, sd))}" for k in sizes]
        notes.append(
            f"{where}with this seed spread {', '.join(gains)} ({stats.POWER:.0%} power; sd {significant(sd)} of the "
            f"paired differences of {label}, the widest here, which {n} seeds only place between "
            f"{significant(low)} and {significant(high)})"
        )
    return notes
