"""Tables: the numbers they show, and text that survives Markdown, LaTeX and CSV."""

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import markdown_it
import pandas as pd
import pytest

from analysis import costs, stats, tables, words
from analysis.formats import Table, decimals_for, escape_latex, escape_markdown, fixed, number
from analysis.load import Runs, load
from analysis.stats import Comparison, t_interval

MAKERS = (
    tables.comparison_table,
    tables.reward_table,
    tables.power_table,
    costs.timing_table,
    costs.repeat_table,
    tables.pairing_table,
    tables.cells_table,
)


@pytest.fixture(scope="module")
def runs(demo: Path) -> Runs:
    return load(demo)


def test_comparison_table_shows_the_statistics(runs: Runs) -> None:
    table = tables.comparison_table(runs)
    assert table.headers[:7] == ("variant", "beta", "n", "start", "final", "difference", "verdict")
    assert [row[:2] for row in table.rows[:5]] == [
        ("reference", "0.04"),
        ("no_detach", "0.04"),
        ("full_reverse_kl", "0.04"),
        ("forward_kl", "0.04"),
        ("reference", "1"),
    ]
    assert table.breaks == (4,)
    for row, c in zip(table.rows, stats.compare(runs), strict=True):
        shown = dict(zip(table.headers, row, strict=True))
        assert shown["n"] == "3"
        assert shown["verdict"] == c.verdict
        if c.difference is not None:
            mean, low, high = (float(x) for x in re.findall(r"[-+]?[\d.]+", shown["difference"]))
            assert (mean, low, high) == pytest.approx(
                (c.difference.mean, c.difference.low, c.difference.high), abs=6e-4
            )
        else:
            assert shown["difference"] == "-"
    assert dict(zip(table.headers, table.rows[1], strict=True))["|Δw|"] == "0"


def test_csv_keeps_every_digit(runs: Runs) -> None:
    table = tables.comparison_table(runs)
    read = pd.read_csv(io.StringIO(table.csv()))
    assert read["difference_low"].tolist()[1:4] == pytest.approx(
        [c.difference.low for c in stats.compare(runs)[1:4] if c.difference is not None], rel=1e-15
    )
    assert read["beta"].tolist() == [0.04] * 4 + [1.0] * 4


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", ["demo", "partial", "points", "empty"])
def test_every_table_of_every_run_directory(
    make: Callable[[Runs], Table], name: str, demo: Path, partial: Path, points: Path, tmp_path: Path
) -> None:
    folder = {"demo": demo, "partial": partial, "points": points, "empty": tmp_path}[name]
    table = make(load(folder))
    html = markdown_it.MarkdownIt("commonmark").enable("table").render(table.markdown(notes=False))
    assert html.count("<tr>") == len(table.rows) + 1
    assert html.count("<td") == len(table.rows) * len(table.headers)
    assert table.latex().count(r" \\") == len(table.rows) + 1
    assert len(table.text().splitlines()) == len(table.rows) + 2 + len(table.breaks)
    assert not {"nan", "None", "inf", "<NA>"} & {text for row in table.rows for text in row}
    assert (name == "empty") == (not table.rows)
    assert table.csv() == make(load(folder)).csv()


def test_unfinished_cells_show_as_such(partial: Path) -> None:
    runs = load(partial)
    rows = {
        row[0]: dict(zip(tables.comparison_table(runs).headers, row, strict=True))
        for row in tables.comparison_table(runs).rows
    }
    assert rows["reference"]["n"] == "1"
    assert rows["no_detach"]["n"] == "0 of 1"
    assert rows["no_detach"]["verdict"] == "no result"
    cells = {row[0]: row for row in tables.cells_table(runs).rows}
    assert cells["no_detach-seed0-beta0.04"][1] == "failed"
    assert "ValueError at step 8: reward function" in cells["no_detach-seed0-beta0.04"][-1]
    assert cells["forward_kl-seed0-beta0.04"][1:3] == ("new", "0")


def test_pairing_table_says_different(copied: Path) -> None:
    for name in ("env.json", "done.json"):
        path = copied / "forward_kl-seed1-beta0.04" / name
        hashes = pd.read_json(path, typ="series")["pairing"]
        path.write_text(path.read_text().replace(hashes["data_sha256"], "e" * 64))
    rows = tables.pairing_table(load(copied)).rows
    assert [row[4] for row in rows] == [rows[0][4], "2 DIFFERENT", rows[0][4]]
    assert len(rows[0][4]) == 12


def test_power_table_by_definition(runs: Runs) -> None:
    frame = tables.power_table(runs).frame
    row = frame[(frame["variant"] == "forward_kl") & (frame["beta"] == 0.04)].iloc[0]
    assert stats.power(row["smallest_difference_n8"], row["sd"], 8) == pytest.approx(0.8, abs=1e-6)
    needed = int(row["seeds_needed"])
    assert (
        stats.power(row["difference"], row["sd"], needed) >= 0.8 > stats.power(row["difference"], row["sd"], needed - 1)
    )


def test_rewards_and_times_add_up(runs: Runs) -> None:
    rewards, timing = tables.reward_table(runs).frame, costs.timing_table(runs).frame
    total = rewards["right_answer/last"] + 0.1 * rewards["format/last"] + rewards["length/last"]
    assert total.tolist() == pytest.approx(rewards["total/last"].tolist(), abs=1e-4)
    phases = [c for c in timing if c.startswith("time/")]
    assert [c.removeprefix("time/") for c in phases] == [c for c in costs.PARTS if c not in ("logps", "exact_kl")]
    assert timing[phases].sum(axis=1).tolist() == pytest.approx(timing["step_time"].tolist(), rel=0.02)


HOSTILE = (
    "a|b",
    "x_y_z",
    "_under_",
    "*bold*",
    "`code`",
    "<b>",
    "[text](http://x)",
    "back\\slash",
    "50% & $3 #1 {x} ~ ^",
    "two\nlines",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_reads_back_from_markdown(text: str) -> None:
    table = Table("t", "title", ("a", "b"), ((text, "end"),), "lr", pd.DataFrame())
    html = markdown_it.MarkdownIt("commonmark").enable("table").render(table.markdown())
    cells = re.findall(r"<td[^>]*>(.*?)</td>", html, flags=re.DOTALL)
    unescaped = cells[0].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").replace("&quot;", '"')
    assert unescaped == " ".join(text.split())
    assert cells[1] == "end"


def test_latex_escapes() -> None:
    assert escape_latex("no_detach & 50% {x}") == r"no\_detach \& 50\% \{x\}"
    assert escape_latex(r"\end{table}") == r"\textbackslash{}end\{table\}"
    assert escape_latex("-0.41 [-0.47, -0.35]") == "$-$0.41 [$-$0.47, $-$0.35]"
    assert escape_latex("0.7 ± 0.1") == r"0.7 $\pm$ 0.1"
    assert escape_latex("seed0-beta0.04, 2026-01-01, 1e-05") == "seed0-beta0.04, 2026-01-01, 1e-05"


def test_markdown_keeps_names_readable() -> None:
    assert escape_markdown("full_reverse_kl") == "full_reverse_kl"


def test_wide_table_is_refused() -> None:
    with pytest.raises(ValueError, match="every row should have 2 entries"):
        Table("t", "title", ("a", "b"), (("only one",),), "lr", pd.DataFrame())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.12345, "0.123"),
        (-2e-4, "-2.0e-04"),
        (math.nan, "-"),
        (math.inf, "inf"),
        (3e8, "3.0e+08"),
        (-0.5, "-0.500"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_decimals() -> None:
    assert [decimals_for(x) for x in (0.06, 0.012, 0.0007, 3.0, 0.0)] == [2, 3, 4, 2, 3]
    assert fixed(-0.0004, 3) == "0.000"
    assert fixed(0.4142, 2, signed=True) == "+0.41"


def comparison(start: list[float], final: list[float], base: list[float] | None, **more: object) -> Comparison:
    difference = None if base is None else t_interval([a - b for a, b in zip(final, base, strict=True)])
    fields = {
        "variant": "no_detach",
        "point": "",
        "planned": len(final),
        "seeds": tuple(range(len(final))),
        "start": t_interval(start),
        "final": t_interval(final),
        "gain": t_interval([a - b for a, b in zip(final, start, strict=True)]),
        "difference": difference,
    }
    return Comparison(**(fields | more))  # type: ignore[arg-type]


START, BASE = [0.34, 0.34, 0.34], [0.73, 0.75, 0.776]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (comparison(START, START, BASE), "no_detach does not learn: -0.41 [-0.47, -0.35] against reference, n = 3"),
        (
            comparison(START, START, BASE, weights_moved=False),
            "no_detach does not learn: -0.41 [-0.47, -0.35] against reference, n = 3; its weights do not move",
        ),
        (comparison(START, BASE, None), "no_detach learns: 0.340 to 0.752, +0.41 [0.35, 0.47] over its start, n = 3"),
        (
            comparison(START, [0.74, 0.75, 0.75], BASE),
            "no_detach learns; its difference is not resolved: -0.01 [-0.05, 0.04] against reference, n = 3",
        ),
        (
            comparison(START, BASE, BASE),
            "no_detach ends exactly where reference ends: 0 [0, 0] against reference, n = 3",
        ),
        (
            comparison(START, [0.9, 0.93, 0.94], BASE),
            "no_detach learns more than reference: +0.171 [0.151, 0.191] against reference, n = 3",
        ),
        (
            comparison(START, [0.5, 0.53, 0.54], BASE),
            "no_detach learns less than reference: -0.229 [-0.249, -0.209] against reference, n = 3",
        ),
        (
            comparison(START, [0.1, 0.12, 0.11], BASE),
            "no_detach ends below its start: -0.64 [-0.69, -0.59] against reference, n = 3",
        ),
        (
            comparison(START, [0.3, 0.36, 0.37], BASE),
            "no_detach is not shown to learn (+0.003 [-0.091, 0.097] over its start): "
            "-0.41 [-0.46, -0.36] against reference, n = 3",
        ),
        (
            comparison([0.34], [0.7], [0.75]),
            "no_detach moves up: -0.050 against reference, n = 1, no interval from one seed",
        ),
        (
            comparison(START, BASE, BASE, planned=5),
            "no_detach ends exactly where reference ends: 0 [0, 0] against reference, n = 3 of 5",
        ),
        (
            comparison(START, BASE, BASE, difference=t_interval([])),
            "no_detach learns: +0.41 [0.35, 0.47] over its start, n = 3; no finished run of reference to compare with",
        ),
        (comparison([], [], []), "no_detach has no finished run"),
    ],
)
def test_sentences(made: Comparison, text: str) -> None:
    assert words.sentence(made) == text


def test_sentences_carry_point_and_state(partial: Path) -> None:
    runs = load(partial)
    lines = words.sentences(runs, stats.compare(runs))
    assert lines[1] == "beta 0.04: no_detach has no finished run (1 failed)"
    assert lines[0].startswith("beta 0.04: reference moves up: 0.345 to ")


def test_notes(runs: Runs, partial: Path, tmp_path: Path) -> None:
    compared = stats.compare(runs)
    assert words.multiplicity(compared) == (
        "Each interval stands alone: of 6 differences 4 are resolved, 4 also when all are read together (Holm)"
    )
    notes = words.power_notes(compared)
    assert len(notes) == 2
    sd = max(c.difference.sd for c in compared[:4] if c.difference is not None)
    assert f"n = 8 seeds resolve {stats.smallest_difference(8, sd):.3f}" in notes[0]
    few = load(partial)
    assert words.power_notes(stats.compare(few)) == []
    assert words.multiplicity(stats.compare(few)) is None
    empty = load(tmp_path)
    assert words.sentences(empty, stats.compare(empty)) == [
        "No cell has a readable config, so there is nothing to compare."
    ]


def test_points_in_table_and_words(points: Path) -> None:
    runs = load(points)
    table = tables.comparison_table(runs)
    assert [row[:2] for row in table.rows] == [("reference", p) for p in ("fp32", "bf16", "fp8_head")]
    assert {"exact KL", "forward KL"} <= set(table.headers)
    assert [row[table.headers.index("skipped")] for row in table.rows] == ["0", "0", "2.0"]
    notes = "\n".join(table.notes)
    assert "minus final of fp32 with the same seed" in notes
    assert (
        "equal within pairs: data, prompt order, sampling seeds; different, as an axis may make them: initial" in notes
    )
    lines = words.verdicts(runs)
    assert lines[:2] == ("Resolved, 1 of 2: reference: fp8_head", "Not resolved, 1 of 2: reference: bf16")
    assert any(line.startswith("fp8_head: reference learns less than at fp32: -0.05") for line in lines)
    assert "paired differences of bf16" in words.power_notes(stats.compare(runs))[0]
    assert "reference: fp8_head" in words.verdicts(runs)._repr_markdown_()


@pytest.mark.parametrize(
    ("distance", "text"),
    [
        (0.0, []),
        (0.03, ["beta 0.04: no_detach's weights end 0.030 from their start, 0.96 % of forward_kl's way"]),
        (0.1, []),
    ],
)
def test_weights_that_hardly_move(copied: Path, distance: float, text: list[str]) -> None:
    for folder in copied.glob("*-beta0.04"):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        end = distance if folder.name.startswith("no_detach") else 3.125 if folder.name.startswith("forward") else 3.0
        rows[-1]["weight_distance"] = end
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = load(copied)
    assert words.drift(runs, stats.compare(runs)) == text
    verdicts = [line for line in words.sentences(runs, stats.compare(runs)) if "no_detach" in line]
    assert [line.endswith("its weights do not move") for line in verdicts] == [distance == 0]
