"""Replays in tables, in the picture and in the report, from a replay.json alone."""

import copy
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ablate import schema
from analysis import replay
from analysis.files import RunFileError
from analysis.formats import MISSING
from analysis.render import write_report

# Gradients in two layers of two numbers each: surrogate and beta x KL of every variant.
PARTS = {
    "reference": ([3.0, 0.0, 4.0, 0.0], [0.0, 1.0, 0.0, 0.0]),
    "no_detach": ([0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]),
    "k3": ([3.0, 0.0, 4.0, 0.0], [0.0, 1.0, 0.0, 0.0]),
    "against": ([-3.0, 0.0, -4.0, 0.0], [0.0, -1.0, 0.0, 0.0]),
    "plain": ([3.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
    "nothing": ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
}
LAYERS = [("block 0 attention", "attention"), ("block 1 attention", "attention"), ("head", "head")]


def norm(x: list[float]) -> float:
    return math.sqrt(sum(v * v for v in x))


def cosine(a: list[float], b: list[float]) -> float | None:
    size = norm(a) * norm(b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / size if size else None


def make(names: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    """What replay.json holds for gradients PARTS."""
    names = names or list(PARTS)
    whole = {n: [s + k for s, k in zip(*PARTS[n], strict=True)] for n in names}
    variants = []
    for n in names:
        first, second = norm(PARTS[n][0]), norm(PARTS[n][1])
        both = first + second
        variants.append(
            {
                "name": n,
                "params": {"beta": 0.04},
                "loss": 0.5,
                "grad_norm": norm(whole[n]),
                "surrogate_norm": first,
                "kl_norm": second,
                "surrogate_share": first / both if both else None,
                "kl_share": second / both if both else None,
                "cosine_surrogate_kl": cosine(*PARTS[n]),
                "clip_fraction": 0.125,
                "exact_kl": "reverse" if n == "plain" else None,
                "norm_by_group": dict(
                    zip((g for g, _ in LAYERS), (norm(whole[n][:2]), norm(whole[n][2:]), 0.0), strict=True)
                ),
                "token_weight": {
                    "mean": 1.0,
                    "by_position": [1.25, None],
                    "by_sign": {
                        "positive": {"tokens": 3, "mean": 0.5, "share": 0.25},
                        "negative": {"tokens": 4, "mean": 2.0, "share": 0.75},
                        "zero": {"tokens": 0, "mean": None, "share": 0.0},
                    },
                },
            }
        )
    return {
        "cell": "reference-seed0-beta0.04",
        "trained_variant": "reference",
        "step": 21,
        "policy": {"step": 21, "source": "rollouts/policy-000021", "off_policy": False},
        "model": "tiny",
        "completions": 4,
        "tokens": 7,
        "parameters": 4,
        "checks": [{"what": "kl", "against": "relative to metrics.jsonl", "difference": 2e-8, "tolerance": 0.01}],
        "training": {"grad_norm": 5.1, "replayed": 5.1, "relative_difference": 3e-8},
        "position_bins": [[0, 1], [1, 4]],
        "layers": [{"name": g, "kind": k, "parameters": 2 if k == "attention" else 0} for g, k in LAYERS],
        "variants": variants,
        "cosine": [[cosine(whole[a], whole[b]) for b in names] for a in names],
        "cosine_kl": [[cosine(PARTS[a][1], PARTS[b][1]) for b in names] for a in names],
        **changes,
    }


def put(folder: Path, data: dict[str, Any], name: str = "step-000021") -> Path:
    path = folder / schema.REPLAY_DIR / name / schema.REPLAY_FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def item(tmp_path: Path) -> replay.Replay:
    return replay.read(put(tmp_path, make()))


def row(table: Any, name: str) -> dict[str, str]:
    return next(dict(zip(table.headers, r, strict=True)) for r in table.rows if r[0] == name)


def test_summary(item: replay.Replay) -> None:
    table = replay.summary_table(item)
    assert row(table, "reference") == {
        "variant": "reference", "gradient": "5.099", "surrogate": "5.000", "beta x KL": "1.000", "KL share": "16.7 %",
        "KL vs surrogate": "+0.00", "cosine to reference": "+1.0000", "clipped": "12.50 %",
        "weight of A > 0": "25.0 %", "weight of A < 0": "75.0 %",
    }  # fmt: skip
    assert row(table, "against")["cosine to reference"] == "-1.0000"
    nothing = row(table, "nothing")
    assert nothing["gradient"] == "0" and nothing["cosine to reference"] == nothing["KL share"] == MISSING
    assert any("exact KL" in note and "plain" in note for note in table.notes)
    frame = pd.read_csv(pd.io.common.StringIO(table.csv()))
    assert frame["grad_norm"].tolist() == [v["grad_norm"] for v in item.variants]
    assert frame["token_weight/token 1"].tolist() == [1.25] * 6
    assert frame["token_weight/tokens 2-4"].isna().all()


def test_without_reference_the_first_is_the_baseline(tmp_path: Path) -> None:
    item = replay.read(put(tmp_path, make(["k3", "against"])))
    assert row(replay.summary_table(item), "against")["cosine to k3"] == "-1.0000"


def test_norms_by_kind_and_layer(item: replay.Replay) -> None:
    kinds = replay.layer_table(item)
    assert kinds.headers == ("variant", "attention (4)", "head (0)")
    assert row(kinds, "reference")["attention (4)"] == "5.099"
    blocks = replay.block_table(item)
    assert row(blocks, "block 1 attention")["reference"] == "4.000"
    assert row(blocks, "block 0 attention")["no_detach"] == "1.000"


def test_weights_by_position_and_sign(item: replay.Replay) -> None:
    table = replay.weight_table(item)
    assert table.headers == ("variant", "token 1", "tokens 2-4", "A > 0", "A < 0", "A = 0")
    assert table.rows[0] == ("reference", "1.250", MISSING, "0.5000", "2.000", MISSING)


def test_sentences(item: replay.Replay, tmp_path: Path) -> None:
    text = "\n".join(replay.sentences(item))
    origin = {"git": {"sha": "a" * 40}, "command": "python -m ablate replay run=runs/x step=1"}
    known = replay.sentences(replay.Replay(item.path, {**item.data, "provenance": origin}))
    assert f"Command: python -m ablate replay run=runs/x step=1; commit {'a' * 12}." in known
    assert "kl 2e-08 (relative to metrics.jsonl)" in text
    assert "gradient norm of 5.1 for reference" in text and "differs by 3e-08" in text
    assert "No gradient at all: nothing." in text
    assert "The same gradient: reference, k3." in text
    assert "against" not in text.partition("The same gradient")[2]
    bare = replay.read(put(tmp_path / "bare", make(["plain"], checks=[], training=None)))
    assert replay.sentences(bare) == ["Nothing stored to check the policy by."]


def test_picture_shows_both_matrices(item: replay.Replay) -> None:
    figure = replay.cosine_matrix(item)
    panels = [a for a in figure.axes if a.images]
    assert [a.get_title() for a in panels] == list(replay.MATRICES.values())
    for panel, key in zip(panels, replay.MATRICES, strict=True):
        assert [t.get_text() for t in panel.get_xticklabels()] == item.names
        shown = panel.images[0].get_array()
        texts = [t.get_text() for t in panel.texts]
        for i, values in enumerate(item.data[key]):
            for j, c in enumerate(values):
                assert texts[6 * i + j] == ("–" if c is None else f"{c:.2f}")
                assert bool(shown.mask[i, j]) if c is None else shown[i, j] == pytest.approx(c)
    assert "step 21" in figure.get_suptitle()


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1.00"), (0.9996, ">.99"), (-0.9996, "<-.99"), (-1.0, "-1.00"), (0.994, "0.99"), (0, "0.00")],
)
def test_only_equal_gradients_are_called_1(value: float, text: str) -> None:
    assert replay._two_digits(value) == text


def test_a_large_family_is_drawn_too(tmp_path: Path) -> None:
    data = make()
    names = [f"variant_{i}" for i in range(25)]
    data["variants"] = [{**copy.deepcopy(data["variants"][0]), "name": n} for n in names]
    data["cosine"] = data["cosine_kl"] = [[math.cos(i - j) for i in range(25)] for j in range(25)]
    item = replay.read(put(tmp_path, data))
    files = replay.write(item, tmp_path / "out")
    assert {f.name for f in files} == {"table.md", "table.csv", "cosine.png", "cosine.svg"}
    assert all(f.stat().st_size > 1000 for f in files)


def test_written_files_are_the_same_each_time(item: replay.Replay, tmp_path: Path) -> None:
    a, b = (replay.write(item, tmp_path / name) for name in "ab")
    assert [f.read_bytes() for f in a] == [f.read_bytes() for f in b]
    text = a[0].read_text()
    assert "![Cosines](cosine.png)" in text and text.count("\n## ") == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("variants"),
        lambda d: d.update(variants=[]),
        lambda d: d["cosine"].pop(),
        lambda d: d["variants"][0].pop("token_weight"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: Any) -> None:
    data = make()
    damage(data)
    path = put(tmp_path, data)
    with pytest.raises(RunFileError, match=f"{re.escape(str(path))}.*no replay: it lacks .*ablate replay"):
        replay.read(path)


def test_report_holds_replays_of_experiment_and_cells(copied: Path) -> None:
    cell = copied / "reference-seed0-beta0.04"
    assert cell.is_dir()
    put(copied, make())
    put(cell, make(["reference"], tokens=99))  # the same step of the same cell: the experiment's replay stands for it
    off = {"step": 41, "source": "rollouts/policy-000041", "off_policy": True}
    put(cell, make(step=1, policy=off), "step-000001-policy-000041")
    put(cell, {}, "step-000031")
    report = write_report(copied)
    names = {p.name for p in report.paths}
    stem = "replay-reference-seed0-beta0.04-step"
    assert {f"{stem}21.csv", f"{stem}21.png", f"{stem}21.svg", f"{stem}1-policy41.svg"} <= names
    (problem,) = [p for p in report.problems if p.path and "replay" in p.path]
    assert problem.severity == "warning" and "step-000031/replay.json" in str(problem.path)
    page = next(p for p in report.paths if p.suffix == ".html").read_text()
    assert 'id="replay"' in page and 'href="#replay"' in page
    assert page.count("Replay of reference-seed0-beta0.04") == 2
    assert "policy of step 41 (off-policy)" in page and "99 tokens" not in page
    assert page.count("Cosines of the variants") == 2
    assert (
        f"## {replay.read(copied / 'replay/step-000021/replay.json').title}"
        in (copied / schema.REPORT_DIR / "table.md").read_text()
    )


def test_a_report_without_replays_has_no_section(copied: Path) -> None:
    shutil.rmtree(copied / schema.REPLAY_DIR, ignore_errors=True)
    page = next(p for p in write_report(copied).paths if p.suffix == ".html").read_text()
    assert "#replay" not in page and "One batch through every variant" not in page


def test_a_replay_of_wrong_kinds_is_a_warning_and_writes_nowhere_else(copied: Path) -> None:
    cells = sorted(path for path in copied.iterdir() if path.is_dir())
    put(cells[0], make(cell="../../../outside"))
    put(cells[1], make(checks=3))
    report = write_report(copied)
    assert {path.parent for path in report.paths} == {copied / schema.REPORT_DIR}
    assert any("replay-.._.._.._outside" in path.name for path in report.paths)
    assert ["no replay: TypeError" in problem.message for problem in report.problems] == [True]
