"""The figures of a report, one function per figure. Each takes `Runs` and returns a matplotlib Figure (Agg, no pyplot).

In a panel thin lines are seeds, the thick line is their mean and the band is mean ± sd over the finished seeds. A cell
that did not finish is dotted and ends in a cross; it is no part of mean and band.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ablate import schema
from analysis import stats
from analysis.files import write_atomic
from analysis.load import Runs
from analysis.style import RC, Style, styles
from analysis.words import place

PANEL = (3.35, 2.45)  # inches
WRAP = 4  # panels in a row of a figure with one quantity


class Plot(Figure):
    """A matplotlib Figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        return encode(self, "png")


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
    """KL of the policy to its start (k3 estimate, nats per token)."""
    return _panels(runs, runs.metrics, {"kl": "KL to the start (k3, nats per token)"})


@_styled
def entropy(runs: Runs) -> Plot:
    """Entropy of the policy's next-token distribution in nats."""
    return _panels(runs, runs.metrics, {"entropy": "entropy (nats per token)"})


@_styled
def weight_distance(runs: Runs) -> Plot:
    """L2 distance of the trained parameters from their start."""
    return _panels(runs, runs.metrics, {"weight_distance": "L2 distance of the weights from the start"})


@_styled
def differences(runs: Runs, *, baseline: str = stats.BASELINE, level: float = stats.LEVEL) -> Plot:
    """Paired differences to `baseline`: a small mark per seed, mean and t-interval in bold, filled where resolved."""
    compared = [c for c in stats.compare(runs, baseline=baseline, level=level) if c.difference is not None]
    variants = [v for v in runs.variants if v != baseline]
    summary = stats.summarise(runs).set_index(["variant", "point", "seed"])["final"]
    summary = summary[~summary.index.duplicated()]
    rows = math.ceil(len(runs.points) / WRAP)
    columns = min(WRAP, len(runs.points))
    figure = _figure(columns, rows, 0.9 + 0.3 * len(variants))
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    look = styles(runs.variants)
    for index, (panel, point) in enumerate(zip(axes, runs.points, strict=False)):
        panel.axvline(0, color="#555555", linewidth=0.9, zorder=1)
        panel.set_title(place(runs.points[point]))
        for c in compared:
            if c.point != point or c.difference is None or c.difference.n == 0:
                continue
            y, style = variants.index(c.variant), look[c.variant]
            seeds = [summary[c.variant, point, s] - summary[baseline, point, s] for s in c.paired]
            panel.plot(seeds, [y + 0.24] * len(seeds), style.marker, color=style.color, markersize=3, alpha=0.6)
            if c.difference.n > 1:
                panel.plot([c.difference.low, c.difference.high], [y, y], color=style.color, linewidth=2.4)
            face = style.color if c.difference.resolved else "white"
            panel.plot(
                [c.difference.mean], [y], style.marker, color=style.color, markerfacecolor=face, markersize=6.5,
                markeredgewidth=1.5, zorder=3,
            )  # fmt: skip
        if not any(c.point == point and c.difference is not None and c.difference.n for c in compared):
            panel.text(
                0.5, 0.5, "no pair finished", transform=panel.transAxes, ha="center", va="center", color="#777777"
            )
        panel.set_yticks(range(len(variants)), variants)
        panel.set_ylim(max(len(variants), 1) - 0.5, -0.5)
        panel.grid(axis="y", visible=False)
        panel.xaxis.set_major_locator(MaxNLocator(nbins=4))  # labels such as -0.175 are wide
        if index + columns >= len(runs.points):
            panel.tick_params(labelbottom=True)
            panel.set_xlabel(f"difference to {baseline} in\n{runs.primary_label}")
    for panel in axes[len(runs.points) :]:
        panel.set_visible(False)
    return figure


def encode(figure: Figure, kind: str) -> bytes:
    """The figure as "png" or "svg" bytes, the same bytes for the same figure."""
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}[kind]
    buffer = io.BytesIO()
    with matplotlib.rc_context(RC):
        figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write stem.png and stem.svg, each in one move. Raises ValueError where the folder cannot be written."""
    return [write_atomic(stem.with_name(f"{stem.name}.{kind}"), encode(figure, kind)) for kind in ("png", "svg")]


def _figure(columns: int, rows: int, height: float = PANEL[1]) -> Plot:
    figure = Plot(figsize=(PANEL[0] * max(columns, 1) + 0.3, height * rows + 0.45), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _window(runs: Runs) -> int:
    return max(1, int(runs.metrics[schema.STEP].max()) // 16) if len(runs.metrics) else 1


def _panels(
    runs: Runs, frame: pd.DataFrame, columns: dict[str, str], *, markers: bool = False, window: int = 1
) -> Plot:
    """A grid of panels: a row per column of `frame` (key; its label is the value), a column per grid point."""
    points = list(runs.points)
    names = list(columns)
    wrap = len(names) == 1
    across = min(WRAP, len(points)) if wrap else len(points)
    down = math.ceil(len(points) / WRAP) if wrap else max(1, len(names))
    figure = _figure(across, down, PANEL[1] if wrap else 0.8 * PANEL[1])
    axes = figure.subplots(down, across, sharex=True, sharey="all" if wrap else "row", squeeze=False)
    look = styles(runs.variants)
    states = dict(zip(runs.cells["cell"], runs.cells["state"], strict=True))
    unfinished = False
    cells = [(name, point) for name in names for point in points] or [("", point) for point in points]
    for panel, (name, point) in zip(axes.ravel(), cells, strict=False):
        part = frame[frame["point"] == point]
        empty = True
        for variant in runs.variants:
            mine = part[part["variant"] == variant]
            if name not in mine or not mine[name].notna().any():
                continue
            empty = False
            unfinished |= _draw(panel, mine[["cell", schema.STEP, name]], states, look[variant], markers, window)
        if empty:
            panel.text(0.5, 0.5, "no data", transform=panel.transAxes, ha="center", va="center", color="#777777")
        panel.margins(x=0.02)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    for panel in axes.ravel()[len(cells) :]:
        panel.set_visible(False)
    for index, panel in enumerate(axes.ravel()[: len(cells)]):
        name, point = cells[index]
        if wrap or index < across:
            panel.set_title(place(runs.points[point]))
        if index % across == 0:
            panel.set_ylabel(_wrapped(columns.get(name, "")))
        if index + across >= len(cells):
            panel.set_xlabel("optimizer step" + (f" (mean over {window})" if window > 1 else ""))
            panel.tick_params(labelbottom=True)
    _legend(figure, runs.variants, look, markers, unfinished)
    return figure


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


def _legend(figure: Plot, variants: Sequence[str], look: dict[str, Style], markers: bool, unfinished: bool) -> None:
    handles = [
        Line2D(
            [], [], color=look[v].color, linestyle=look[v].line, marker=look[v].marker, markeredgecolor="white", label=v
        )
        for v in variants
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
