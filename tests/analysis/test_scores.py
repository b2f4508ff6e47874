"""The held-out score by step: means and ranges of the finished seeds, whatever the grid and the evaluations."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import render, scores
from analysis.formats import Table
from analysis.load import Runs, committed, load


def made(runs: Runs) -> Table:
    table = scores.score_table(runs)
    assert table is not None, "no table of runs that have one"
    return table


def test_every_number_is_that_of_the_evaluations(demo: Path) -> None:
    runs = load(demo)
    table = made(runs)
    assert table.headers[:3] == ("variant", "beta", "n")
    done = runs.evals[runs.evals["cell"].isin(runs.done["cell"])]
    frame = table.frame.set_index(["variant", "beta", "step"])
    for (variant, point, step), part in done.groupby(["variant", "point", "step"]):
        values = part[runs.primary_column]
        row = frame.loc[(variant, runs.points[point]["beta"], step)]
        assert (row["mean"], row["least"], row["most"], row["n"]) == pytest.approx(
            (values.mean(), values.min(), values.max(), len(values))
        )
    assert len(frame) == done.groupby(["variant", "point", "step"]).ngroups
    assert len(table.rows) == len(runs.variants) * len(runs.points)


def test_what_is_shown_is_rounded_from_the_frame() -> None:
    table = made(load(committed("founding")))
    row = dict(zip(table.headers, next(r for r in table.rows if r[0] == "reference"), strict=True))
    of = table.frame.set_index(["variant", "step"]).loc[("reference", 100)]
    assert row["step 100"] == f"{of['mean']:.2f} ({of['least']:.2f} to {of['most']:.2f})"
    assert row["step 0"] == "0.26"  # the same for every seed


def test_the_first_and_the_last_of_many_evaluations_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "MOST", 3)
    table = made(load(committed("founding")))
    assert table.headers == ("variant", "n", "step 0", "step 150", "step 300")
    assert sorted(table.frame["step"].unique()) == [0, 50, 100, 150, 200, 250, 300]


def test_too_few_evaluations_make_no_table(demo: Path) -> None:
    runs = load(demo)
    evals = runs.evals
    assert scores.score_table(replace(runs, evals=evals[evals["step"] == 0])) is None
    first, last = evals["step"].min(), evals["step"].max()
    others = evals["step"].isin([first, last]) | (evals["variant"] == "reference")
    assert scores.score_table(replace(runs, evals=evals[others])) is None  # two that all rows have


def test_only_steps_that_all_rows_have_are_shown(demo: Path) -> None:
    runs = load(demo)
    middle = sorted(runs.evals["step"].unique())[1]
    table = made(
        replace(runs, evals=runs.evals[(runs.evals["step"] != middle) | (runs.evals["variant"] != "forward_kl")])
    )
    assert f"step {middle}" not in table.headers
    assert middle in set(table.frame["step"])


def test_a_seed_without_a_score_is_counted(demo: Path) -> None:
    runs = load(demo)
    evals, step = runs.evals.copy(), sorted(runs.evals["step"].unique())[1]
    of = (evals["variant"] == "reference") & (evals["step"] == step) & (evals["point"] == next(iter(runs.points)))
    evals.loc[evals.index[of][0], runs.primary_column] = math.nan
    table = made(replace(runs, evals=evals))
    shown = dict(zip(table.headers, table.rows[0], strict=True))
    assert shown["variant"] == "reference" and shown["n"] == "3" and "2 of 3 seeds" in shown[f"step {step}"]


def test_the_page_shows_it(demo: Path, tmp_path: Path) -> None:
    render.write_report(demo, tmp_path)
    table = made(load(demo))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(text in page for text in (table.title, *table.headers, *table.rows[0]))
