"""The figures of a report, one function per figure. Each takes `Runs` and returns a matplotlib Figure (Agg, no pyplot).

In a panel thin lines are seeds, the thick line is their mean and the band is mean ± sd over the finished seeds. A cell
that did not finish is dotted and ends in a cross; it is no part of mean and band.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from PIL import Image

from ablate import schema
from analysis import costs, stats
from analysis.files import write_atomic
from analysis.load import Runs, place
from analysis.style import OTHER, PARTS, RC, Style, styles

PANEL = (3.35, 2.45)  # inches
WRAP = 4  # panels in a row
NOTEBOOK_DPI, NOTEBOOK_PIXELS, NOTEBOOK_COLORS = 100, 800, 64  # at most so many pixels wide
_EXACT = dict(zip(schema.EXACT_KL, ("exact KL to the start (nats per token)", "exact forward KL (nats per token)"),
                  strict=True))  # fmt: skip


class Plot(Figure):
    """A matplotlib Figure that a notebook shows without pyplot, in few colours so that the notebook stays small."""

    def _repr_png_(self) -> bytes:
        dpi = min(NOTEBOOK_DPI, NOTEBOOK_PIXELS / self.get_figwidth())
        drawn, buffer = Image.open(io.BytesIO(encode(self, "png", dpi))), io.BytesIO()
        drawn.convert("RGB").quantize(NOTEBOOK_COLORS).save(buffer, format="png", optimize=True)
        return buffer.getvalue()


def _styled(draw: Callable[..., Plot]) -> Callable[..., Plot]:
    @wraps(draw)
    def styled(*args: Any, **kwargs: Any) -> Plot:
        with matplotlib.rc_context(RC):
            return draw(*args, **kwargs)

    return styled


@_styled
def learning_curves(runs: Runs) -> Plot:
    """The headline metric over optimizer steps, a panel per grid point."""
    return _panels(runs, runs.evals, {runs.primary_column: runs.primary_label}, markers=True)


@_styled
def evaluations(runs: Runs) -> Plot:
    """Every metric of eval.jsonl, a row each."""
    columns = [c for c in runs.evals.columns if c.startswith(schema.EVAL_PREFIX)]
    return _panels(runs, runs.evals, {c: c.removeprefix(schema.EVAL_PREFIX) for c in columns}, markers=True)


@_styled
def rewards(runs: Runs) -> Plot:
    """Total reward and every reward function's mean in training, a row each, as moving means over 1/16 of the run."""
    columns = {"reward": "reward (total)"} | {f"rewards/{name}/mean": f"reward: {name}" for name in runs.reward_names}
    return _panels(runs, runs.metrics, columns, window=_window(runs))


@_styled
def kl(runs: Runs) -> Plot:
    """KL of the policy to its start in nats per token: the k3 estimate, and the exact one where it is known."""
    names = {"kl": "KL to the start (k3 estimate, nats per token)", **_EXACT}
    columns = {c: label for c, label in names.items() if c == "kl" or c in runs.metrics}
    known = runs.metrics[[c for c in columns if c in runs.metrics]].stack()
    usual = float(known.quantile(0.9)) if len(known) else 0.0
    return _panels(runs, runs.metrics, columns, share=True, linear=usual if 0 < usual < known.max() / 20 else None)


@_styled
def entropy(runs: Runs) -> Plot:
    """Entropy of the policy's next-token distribution in nats."""
    return _panels(runs, runs.metrics, {"entropy": "entropy (nats per token)"})


@_styled
def lengths(runs: Runs) -> Plot:
    """Tokens of a completion, mean over the batch, and the share that was cut off at the limit."""
    names = {"completions/mean_length": "completion length (tokens)", "completions/clipped_ratio": "share cut off"}
    return _panels(runs, runs.metrics, names, window=_window(runs))


@_styled
def weight_distance(runs: Runs) -> Plot:
    """L2 distance of the trained parameters from their start; logarithmic where a variant hardly moves."""
    ends = runs.metrics.groupby("cell")["weight_distance"].last() if "weight_distance" in runs.metrics else pd.Series()
    moved = ends[ends > 0]
    log = len(moved) > 0 and moved.min() < 0.02 * moved.max()
    label = {"weight_distance": "L2 distance of the weights from the start"}
    return _panels(runs, runs.metrics, label, log=bool(log), zeros=True)


@_styled
def cost(runs: Runs) -> Plot:
    """A step's time by part and the most memory in it, a bar per row of the comparison; medians as in the table."""
    compared = stats.compare(runs)
    rows = [(c.variant, c.point) for c in compared]
    single = len({c.group for c in compared}) == 1
    named = [c.label if single else f"{c.variant}, {place(runs.points[c.point])}" for c in compared]
    timed = costs.parts(runs)
    found = costs.medians(runs, ["step_time", *timed, "peak_memory_bytes"])
    figure = Plot(figsize=(2.2 * PANEL[0], 0.9 + 0.33 * max(len(rows), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    heights = range(len(rows))
    start = pd.Series(0.0, index=list(heights))
    for column, name in timed.items():
        values = pd.Series([found.loc[[row]][column].iloc[0] for row in rows], dtype=float).fillna(0.0)
        left.barh(heights, values, left=start, height=0.65, color=PARTS.get(name, OTHER), label=name, linewidth=0)
        start += values
    memory = [found.loc[[row]]["peak_memory_bytes"].iloc[0] / costs.MIB for row in rows]
    right.barh(heights, memory, height=0.65, color=OTHER, linewidth=0)
    left.set_yticks(heights, named)
    left.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    left.set_xlabel("seconds of a step, by part (medians)")
    right.set_xlabel("peak memory (MiB)")
    for panel in (left, right):
        panel.grid(axis="y", visible=False)
        panel.tick_params(axis="y", length=0)
    if timed:
        figure.legend(loc="outside lower center", ncols=len(timed), handlelength=1.2)
    return figure


@_styled
def differences(runs: Runs, *, baseline: stats.Baseline | None = None, level: float = stats.LEVEL) -> Plot:
    """Paired differences to `baseline`: a small mark per seed, mean and t-interval in bold, filled where resolved."""
    everything = stats.compare(runs, baseline=baseline, level=level)
    compared = [c for c in everything if c.difference is not None]
    groups = list(dict.fromkeys(c.group for c in everything)) or [""]
    labels = list(dict.fromkeys(c.label for c in everything if c.difference is not None))
    other = {c.group: (c.variant, c.point) for c in everything if c.difference is None}
    summary = stats.summarise(runs).set_index(["variant", "point", "seed"])["final"]
    summary = summary[~summary.index.duplicated()]
    rows, columns = _wrap(len(groups))
    figure = _figure(columns, rows, 0.9 + 0.3 * len(labels))
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    look = styles(list(dict.fromkeys(c.label for c in everything)))
    against = everything[0].against if everything else stats.BASELINE
    for index, (panel, group) in enumerate(zip(axes, groups, strict=False)):
        panel.axvline(0, color="#555555", linewidth=0.9, zorder=1)
        panel.set_title(group)
        for c in compared:
            if c.group != group or c.difference is None or c.difference.n == 0:
                continue
            y, style = labels.index(c.label), look[c.label]
            seeds = [summary[c.variant, c.point, s] - summary[*other[group], s] for s in c.paired]
            panel.plot(seeds, [y + 0.24] * len(seeds), style.marker, color=style.color, markersize=3, alpha=0.6)
            if c.difference.n > 1:
                panel.plot([c.difference.low, c.difference.high], [y, y], color=style.color, linewidth=2.4)
            face = style.color if c.difference.resolved else "white"
            panel.plot(
                [c.difference.mean], [y], style.marker, color=style.color, markerfacecolor=face, markersize=6.5,
                markeredgewidth=1.5, zorder=3,
            )  # fmt: skip
        if not any(c.group == group and c.difference is not None and c.difference.n for c in compared):
            _note(panel, "no pair finished")
        panel.set_yticks(range(len(labels)), labels)
        panel.set_ylim(max(len(labels), 1) - 0.5, -0.5)
        panel.grid(axis="y", visible=False)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=4))  # labels such as -0.175 are wide
        if index + columns >= len(groups):
            panel.tick_params(labelbottom=True)
            panel.set_xlabel(f"difference to {against} in\n{runs.primary_label}")
    for panel in axes[len(groups) :]:
        panel.set_visible(False)
    return figure


def encode(figure: Figure, kind: str, dpi: float | None = None) -> bytes:
    """The figure as "png" or "svg" bytes, the same bytes for the same figure."""
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}[kind]
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(buffer, format=kind, metadata=metadata, dpi=dpi)
    return buffer.getvalue()


def save(figure: Figure, stem: Path, kinds: tuple[str, ...] = ("svg", "png")) -> list[Path]:
    """Write stem.svg and stem.png, each in one move: SVG first, since a drawn layout shifts by an ulp when drawn again.

    Raises ValueError where the folder cannot be written."""
    return [write_atomic(stem.with_name(f"{stem.name}.{kind}"), encode(figure, kind)) for kind in kinds]


def _figure(columns: int, rows: int, height: float = PANEL[1]) -> Plot:
    across = 1.5 if columns == 1 else columns  # a legend needs width too
    figure = Plot(figsize=(PANEL[0] * across + 0.3, height * rows + 0.45), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _window(runs: Runs) -> int:
    return max(1, int(runs.metrics[schema.STEP].max()) // 16) if len(runs.metrics) else 1


@dataclass(frozen=True)
class _Layout:
    """What stands side by side, and what is drawn into each panel: grid points and variants, or the other way round.

    panel, line: columns of the frames. titles, labels: value of that column -> as shown.
    """

    panel: str
    line: str
    titles: dict[str, str]
    labels: dict[str, str]

    @classmethod
    def of(cls, runs: Runs) -> _Layout:
        points, variants = {p: place(runs.points[p]) for p in runs.points}, {v: v for v in runs.variants}
        if stats.baseline_of(runs).along == "variant":
            return cls("point", "variant", points, variants)
        return cls("variant", "point", variants, points)


def _panels(
    runs: Runs,
    frame: pd.DataFrame,
    columns: dict[str, str],
    *,
    markers: bool = False,
    window: int = 1,
    share: bool = False,
    log: bool = False,
    zeros: bool = False,
    linear: float | None = None,
) -> Plot:
    """A grid of panels: a row per column of `frame` (key; its label is the value), a column per panel of the layout.

    share: one y scale for all rows. log: a logarithmic one. zeros: name the lines that are 0 throughout.
    linear: linear from 0 to this value and logarithmic above, so that a run that explodes leaves the others legible.
    """
    layout = _Layout.of(runs)
    sides = list(layout.titles)
    names = list(columns) or [""]
    blocks, across = _wrap(len(sides))
    figure = _figure(across, blocks * len(names), PANEL[1] if len(names) == 1 else 0.8 * PANEL[1])
    axes = figure.subplots(blocks * len(names), across, sharex=True, squeeze=False)
    looks = styles(list(layout.labels.values()))
    states = dict(zip(runs.cells["cell"], runs.cells["state"], strict=True))
    unfinished = False
    rows = blocks * across
    cells = {n * rows + i: (name, side) for n, name in enumerate(names) for i, side in enumerate(sides)}
    for index, panel in enumerate(axes.ravel()):
        if index not in cells:
            panel.set_visible(False)
            continue
        name, side = cells[index]
        part = frame[frame[layout.panel] == side]
        empty, still = True, []
        for key, label in layout.labels.items():
            mine = part[part[layout.line] == key]
            if name not in mine or not mine[name].notna().any():
                continue
            empty = False
            if zeros and not mine[name].any():
                still.append(label)
            known = mine[["cell", schema.STEP, name]].dropna()
            unfinished |= _draw(panel, known, states, looks[label], markers, window)
        if empty:
            _note(panel, "no data")
        if still:
            _note(panel, f"0 at every step: {', '.join(still)}", 0.12)
        if log:
            panel.set_yscale("log")
        if linear is not None:
            panel.set_yscale("symlog", linthresh=linear, linscale=2)
            panel.set_ylim(0, 1.2 * frame[[c for c in columns if c in frame]].max().max())
        panel.margins(x=0.02)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        if (first := 0 if share else index - index % rows) != index:
            panel.sharey(axes.flat[first])
        if index < across or blocks > 1:
            panel.set_title(layout.titles[side])
        if index % across == 0:
            panel.set_ylabel(_wrapped(columns.get(name, "")))
        else:
            panel.tick_params(labelleft=False)
        if index + across not in cells:
            panel.set_xlabel("optimizer step" + (f" (mean over {window})" if window > 1 else ""))
            panel.tick_params(labelbottom=True)
    _legend(figure, looks, unfinished)
    return figure


def _wrap(count: int) -> tuple[int, int]:
    """Rows and columns for `count` panels side by side, at most WRAP in a row and the rows about equally long."""
    rows = max(1, math.ceil(count / WRAP))
    return rows, max(1, math.ceil(count / rows))


def _note(panel: Any, text: str, height: float = 0.5) -> None:
    panel.text(0.5, height, text, transform=panel.transAxes, ha="center", va="center", color="#777777")


def _draw(panel: Any, frame: pd.DataFrame, states: dict[str, str], style: Style, markers: bool, window: int) -> bool:
    """Seeds, mean and band of one variant; returns whether an unfinished cell was among them."""
    column = frame.columns[-1]
    finished, unfinished = {}, False
    for cell, rows in frame.groupby("cell", sort=False):
        series = rows.set_index(schema.STEP)[column].rolling(window, min_periods=1).mean()
        if states.get(str(cell)) == "done":
            finished[cell] = series
            continue
        unfinished = True
        panel.plot(series.index, series, color=style.color, linewidth=1, linestyle=":", alpha=0.9)
        panel.plot(series.index[-1:], series.iloc[-1:], "x", color=style.color, markersize=6, markeredgewidth=1.5)
    if not finished:
        return unfinished
    table = pd.DataFrame(finished)
    if table.shape[1] > 1:
        for cell in table:
            panel.plot(table.index, table[cell], color=style.color, linewidth=0.7, alpha=0.45)
        mean, sd = table.mean(axis=1), table.std(axis=1, ddof=1).fillna(0.0)
        panel.fill_between(table.index, mean - sd, mean + sd, color=style.color, alpha=0.15, linewidth=0)
    else:
        mean = table.iloc[:, 0]
    every = max(1, len(mean) // 8)
    dense = len(mean) > 12
    panel.plot(
        mean.index, mean, color=style.color, linestyle=style.line, marker=style.marker,
        markevery=(every // 2, every) if dense or not markers else None, markeredgecolor="white", markeredgewidth=0.5,
    )  # fmt: skip
    return unfinished


def _legend(figure: Plot, looks: dict[str, Style], unfinished: bool) -> None:
    handles = [
        Line2D([], [], color=look.color, linestyle=look.line, marker=look.marker, markeredgecolor="white", label=name)
        for name, look in looks.items()
    ]
    if unfinished:
        handles.append(Line2D([], [], color="#555555", linestyle=":", marker="x", linewidth=1, label="unfinished"))
    if handles:
        across = max(2, int(figure.get_figwidth() / 1.6))
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), across))


def _wrapped(label: str, width: int = 32) -> str:
    """A y-label broken at blanks so that it fits a panel's height, into lines of about the same length."""
    count = len(textwrap.wrap(label, width))
    narrowest = next(
        (w for w in range(1, width) if len(textwrap.wrap(label, w, break_long_words=False)) <= count), width
    )
    return "\n".join(textwrap.wrap(label, narrowest, break_long_words=False))
