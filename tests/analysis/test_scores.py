"""The held-out score by step: means and ranges of the finished seeds, whatever the grid and the evaluations."""

from pathlib import Path

import pytest

from analysis import scores
from analysis.load import Runs, committed, load


def test_every_number_is_that_of_the_evaluations(demo: Path) -> None:
    runs = load(demo)
    table = scores.score_table(runs)
    assert table is not None and table.headers[:2] == ("variant", "beta")
    done = runs.evals[runs.evals["cell"].isin(runs.done["cell"])]
    frame = table.frame.set_index(["variant", "beta", "step"])
    for (variant, point, step), part in done.groupby(["variant", "point", "step"]):
        values = part[runs.primary_column]
        row = frame.loc[(variant, runs.points[point]["beta"], step)]
        assert (row["mean"], row["least"], row["most"], row["n"]) == pytest.approx(
            (values.mean(), values.min(), values.max(), len(values))
        )
    assert len(table.rows) == len(runs.variants) * len(runs.points)


def test_what_is_shown_is_rounded_from_the_frame() -> None:
    table = scores.score_table(load(committed("founding")))
    assert table is not None
    row = dict(zip(table.headers, next(r for r in table.rows if r[0] == "reference"), strict=True))
    of = table.frame.set_index(["variant", "step"]).loc[("reference", 100)]
    assert row["step 100"] == f"{of['mean']:.2f} ({of['least']:.2f} to {of['most']:.2f})"
    assert row["step 0"] == "0.26"  # the same for every seed


def test_the_first_and_the_last_of_many_evaluations_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "MOST", 3)
    table = scores.score_table(load(committed("founding")))
    assert table is not None and table.headers == ("variant", "step 0", "step 150", "step 300")
    assert sorted(table.frame["step"].unique()) == [0, 50, 100, 150, 200, 250, 300]


def test_too_few_evaluations_make_no_table(demo: Path) -> None:
    runs = load(demo)
    few = {**vars(runs), "evals": runs.evals[runs.evals["step"] == 0]}
    assert scores.score_table(Runs(**{k: v for k, v in few.items() if k in Runs.__dataclass_fields__})) is None
