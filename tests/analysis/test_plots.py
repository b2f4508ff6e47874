"""Colours that stay apart in grey and for colour-blind readers, and figures of every kind of run directory."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from analysis import costs, plots
from analysis.load import load
from analysis.render import FIGURES
from analysis.style import FOUNDING, styles

# Machado, Oliveira, Fernandes (2009), full deficiency, on linear RGB
DEFICIENCIES = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "none": np.eye(3).tolist(),
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def lab(color: str, deficiency: str = "none") -> np.ndarray:
    """CIE L*a*b* (D65) of #RRGGBB as a reader with a deficiency sees it."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.array(DEFICIENCIES[deficiency]) @ linear, 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def hue(color: str) -> float:
    return float(np.degrees(np.arctan2(*lab(color)[:0:-1])) % 360)


def test_founding_hues() -> None:
    ranges = {"reference": (0, 50), "no_detach": (250, 320), "full_reverse_kl": (70, 105), "forward_kl": (125, 180)}
    for name, (low, high) in ranges.items():
        assert low < hue(FOUNDING[name].color) < high, name


def test_founding_tones_differ_in_print() -> None:
    lightness = sorted(lab(style.color)[0] for style in FOUNDING.values())
    assert np.diff(lightness).min() > 12
    assert lightness[-1] < 78  # still seen on white paper


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_founding_colours_stay_apart(deficiency: str) -> None:
    for a, b in itertools.combinations(FOUNDING.values(), 2):
        assert np.linalg.norm(lab(a.color, deficiency) - lab(b.color, deficiency)) > 20, (a, b)


def test_no_two_variants_look_alike() -> None:
    names = [*FOUNDING, *(f"variant{i:02d}" for i in range(24))]
    look = styles(names)
    assert list(look) == names
    assert {name: look[name] for name in FOUNDING} == FOUNDING
    assert len({(s.color, str(s.line)) for s in look.values()}) == len(names)
    assert len({s.color for s in styles(names[:10]).values()}) == 10
    assert len({(str(s.line), s.marker) for s in FOUNDING.values()}) == len({s.marker for s in FOUNDING.values()}) == 4


def panels(figure: Figure) -> list:
    return [axes for axes in figure.axes if axes.get_visible()]


def test_learning_curves_show_the_evaluations(demo: Path) -> None:
    runs = load(demo)
    figure = plots.learning_curves(runs)
    left, right = panels(figure)
    assert [left.get_title(), right.get_title()] == ["beta 0.04", "beta 1"]
    assert left.get_ylabel().replace("\n", " ") == runs.primary_label
    for panel, point in zip((left, right), runs.points, strict=True):
        for variant in runs.variants:
            color = FOUNDING[variant].color
            lines = [line for line in panel.lines if line.get_color() == color]
            *seeds, mean = lines
            part = runs.evals[(runs.evals["variant"] == variant) & (runs.evals["point"] == point)]
            table = part.pivot(index="step", columns="seed", values=runs.primary_column)
            assert len(seeds) == 3
            for line, seed in zip(seeds, table, strict=True):
                np.testing.assert_array_equal(line.get_ydata(), table[seed])
            np.testing.assert_allclose(mean.get_ydata(), table.mean(axis=1))
            assert mean.get_linewidth() > seeds[0].get_linewidth()
        assert len(panel.collections) == 4  # bands
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(runs.variants)


def test_unfinished_cells_are_marked_and_not_averaged(partial: Path) -> None:
    figure = plots.learning_curves(load(partial))
    (panel,) = panels(figure)
    crosses = [line for line in panel.lines if line.get_marker() == "x"]
    assert [line.get_xdata().tolist() for line in crosses] == [[5], [5]]
    assert "unfinished" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_differences_show_interval_and_seeds(demo: Path) -> None:
    runs = load(demo)
    left, right = panels(plots.differences(runs))
    assert [t.get_text() for t in left.get_yticklabels()] == ["no_detach", "full_reverse_kl", "forward_kl"]
    means = [line for line in left.lines if line.get_markersize() == 6.5]
    assert [line.get_markerfacecolor() == "white" for line in means] == [False, True, True]  # resolved, not, not
    seeds = [line for line in right.lines if line.get_markersize() == 3]
    assert [len(line.get_xdata()) for line in seeds] == [3, 3, 3]


def test_rewards_have_a_row_per_function(demo: Path) -> None:
    labels = [axes.get_ylabel() for axes in panels(plots.rewards(load(demo)))]
    assert labels[::2] == ["reward (total)", "reward: right_answer", "reward: format", "reward: length"]


@pytest.mark.parametrize(
    "draw",
    [*(f.draw for f in FIGURES)],
)
def test_nothing_to_draw(draw, tmp_path: Path, demo: Path) -> None:
    """No cell at all, and a cell without any evaluation or metric."""
    cell = tmp_path / "bare" / "reference-seed0-beta0.04"
    cell.mkdir(parents=True)
    (tmp_path / "none").mkdir()
    (cell / "config.json").write_text((demo / cell.name / "config.json").read_text())
    for name in ("none", "bare"):
        assert isinstance(draw(load(tmp_path / name)), Figure)


def test_exact_kl_beside_the_estimate(demo: Path, partial: Path) -> None:
    runs = load(demo)
    estimate, _, exact, _, forward, _ = axes = panels(plots.kl(runs))
    assert [a.get_ylabel().split()[0] for a in (estimate, exact, forward)] == ["KL", "exact", "exact"]
    assert len({a.get_ylim() for a in axes}) == 1  # one scale
    red = [line for line in exact.lines if line.get_color() == FOUNDING["reference"].color][-1]
    rows = runs.metrics[(runs.metrics["variant"] == "reference") & (runs.metrics["point"] == "beta=0.04")]
    means = rows.groupby("step")["kl_exact/reverse"].mean().dropna()
    assert red.get_xdata().tolist() == [4, 8, 12, 16, 20]
    np.testing.assert_allclose(red.get_ydata(), means)
    assert len(panels(plots.kl(load(partial)))) == 1  # not logged there


def test_a_run_that_explodes_leaves_the_other_kls_legible(demo: Path) -> None:
    runs = load(demo)
    assert {panel.get_yscale() for panel in panels(plots.kl(runs))} == {"linear"}
    runs.metrics.loc[runs.metrics.index[-1], "kl"] = 1000.0
    for panel in panels(plots.kl(runs)):
        low, high = panel.get_ylim()
        usual = panel.transAxes.inverted().transform(panel.transData.transform((0, runs.metrics["kl"].quantile(0.9))))
        assert low == 0 and high > 1000 and usual[1] > 0.2


def test_points_share_a_panel(points: Path) -> None:
    runs = load(points)
    figure = plots.learning_curves(runs)
    (panel,) = panels(figure)
    assert panel.get_title() == "reference"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fp32", "bf16", "fp8_head"]
    assert len({line.get_color() for line in panel.lines}) == 3
    (difference,) = panels(plots.differences(runs))
    assert [t.get_text() for t in difference.get_yticklabels()] == ["bf16", "fp8_head"]
    assert difference.get_xlabel().startswith("difference to fp32")
    means = [line for line in difference.lines if line.get_markersize() == 6.5]
    assert [line.get_markerfacecolor() == "white" for line in means] == [True, False]


def test_cost_adds_up(demo: Path, points: Path) -> None:
    runs = load(demo)
    figure = plots.cost(runs)
    times, memory = panels(figure)
    assert times.get_yticklabels()[0].get_text() == "reference, beta 0.04"
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        p for p in costs.PARTS if p not in ("logps", "exact_kl")
    ]
    found = costs.timing_table(runs).frame
    ends = [bar.get_x() + bar.get_width() for bar in times.containers[-1]]
    np.testing.assert_allclose(ends, found[[c for c in found if c.startswith("time/")]].sum(axis=1))
    every = dataclasses.replace(runs, metrics=runs.metrics.assign(**{"time/exact_kl": 0.02}))
    assert "exact_kl" in [t.get_text() for t in plots.cost(every).legends[0].get_texts()]
    np.testing.assert_allclose([bar.get_width() for bar in memory.containers[0]], 512)
    assert [t.get_text() for t in panels(plots.cost(load(points)))[0].get_yticklabels()] == ["fp32", "bf16", "fp8_head"]


def test_small_drift_is_seen_beside_a_large_one(demo: Path) -> None:
    runs = load(demo)
    still = panels(plots.weight_distance(runs))[0]
    assert still.get_yscale() == "linear"
    assert [text.get_text() for text in still.texts] == ["0 at every step: no_detach"]
    metrics = runs.metrics.copy()
    metrics.loc[metrics["variant"] == "no_detach", "weight_distance"] = 1e-3
    drifting = panels(plots.weight_distance(dataclasses.replace(runs, metrics=metrics)))[0]
    assert drifting.get_yscale() == "log" and not drifting.texts


def test_notebook_pictures_are_small(demo: Path) -> None:
    runs = load(demo)
    small = plots.kl(runs)._repr_png_()
    assert small.startswith(b"\x89PNG") and len(small) < len(plots.encode(plots.kl(runs), "png")) / 4
    assert small == plots.kl(runs)._repr_png_()


def test_many_grid_points_wrap(demo: Path, tmp_path: Path) -> None:
    source = demo / "reference-seed0-beta0.04"
    for i in range(6):
        folder = tmp_path / f"reference-seed0-beta{i}"
        folder.mkdir()
        for file in source.glob("*.json*"):
            (folder / file.name).write_text(file.read_text())
        config = json.loads((folder / "config.json").read_text())
        config["cell"] |= {"name": folder.name, "point": {"beta": i}}
        (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "reference-seed0-beta0").rename(tmp_path / "k2-seed0-beta0")  # two variants: a panel per point
    moved = tmp_path / "k2-seed0-beta0" / "config.json"
    moved.write_text(moved.read_text().replace("reference", "k2"))
    runs = load(tmp_path)
    figure = plots.learning_curves(runs)
    assert [axes.get_title() for axes in panels(figure)] == [f"beta {i}" for i in range(6)]
    assert figure.get_figwidth() < 15
    rows = panels(plots.rewards(runs))  # 4 quantities in two rows of three panels each
    assert len(rows) == 24 and plots.rewards(runs).get_figwidth() < 15
    limits = [{axes.get_ylim() for axes in rows[i : i + 6]} for i in range(0, 24, 6)]
    assert all(len(same) == 1 for same in limits) and len(set.union(*limits)) == 4


def test_files_are_the_same_every_time(partial: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        plots.save(plots.kl(load(partial)), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert not re.search(rb"(?<!xmlns[:=])(href|src)=\"https?:", (tmp_path / "a.svg").read_bytes())
    assert plots.kl(load(partial))._repr_png_().startswith(b"\x89PNG")


def test_a_name_is_never_read_as_a_formula(demo: Path, tmp_path: Path) -> None:
    runs = dataclasses.replace(load(demo), primary_label="$x^{$")
    plots.save(plots.learning_curves(runs), tmp_path / "curves", kinds=("svg",))
    assert "$x^{$" in (tmp_path / "curves.svg").read_text()
