"""The exact KL's benchmark: its gate can be red, and what it writes says where it comes from."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from losses import bench_kl
from tests.losses import fake_rows

SMALL = ["--tokens", "48", "--batch", "2", "--hidden", "16", "--vocab", "101", "--device", "cpu", "--reps", "2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["frozen", "train"])
def test_report(tmp_path, capsys, dtype, head):
    out = tmp_path / "new" / "exact_kl"
    arguments = [*SMALL, "--rows", "chunked,full", "--dtype", dtype, "--head", head, "--out", str(out)]
    assert bench_kl.main(arguments) == 0
    text, result = out.with_suffix(".md").read_text(), json.loads(out.with_suffix(".json").read_text())
    assert capsys.readouterr().out == text and "`python -m losses.bench_kl --tokens 48" in text
    assert [(row["row"], row["direction"]) for row in result["rows"]] == [
        (r, d) for d in ("reverse", "forward") for r in ("chunked", "full")
    ]
    for row in result["rows"]:
        ratios = [a / b for a, b in zip(row["wall"]["rounds"], row["base"]["wall"]["rounds"], strict=True)]
        assert row["base"]["name"] == "floor" and math.isclose(row["wall_over_floor"], sum(ratios) / 2)
        assert row["errors"].keys() == {"v", "kl"}
    assert result["provenance"]["packages"]["torch"] in text


@pytest.mark.parametrize(("name", "code"), [("chunked", 1), ("trl", 0)], ids=["own", "peer"])
def test_a_wrong_row_has_its_error_and_no_time(name, code, monkeypatch, capsys, tmp_path):
    right = bench_kl.ROWS["full"]
    wrong = dataclasses.replace(bench_kl.ROWS[name], run=lambda p, h, w: right.run(p, h, w) * 1.001)
    monkeypatch.setitem(bench_kl.ROWS, name, wrong)
    options = ["--rows", f"{name},full", "--directions", "reverse", "--out", str(tmp_path / "x")]
    assert bench_kl.main([*SMALL, *options]) == code
    said = capsys.readouterr()
    assert f"RED {name}, reverse" in said.out and "ok  full, reverse" in said.out
    assert ("own failed" in said.err) == bool(code)
    wrong_row, full = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert wrong_row["failed"] == "outside its error budget" and "wall" not in wrong_row and full["wall_over_floor"] > 0


def test_a_peer_that_fails_is_a_line(monkeypatch, capsys, tmp_path):
    """One that hangs and one that is missing, with a limit; what comes after them is measured."""
    hanging = dataclasses.replace(bench_kl.ROWS["trl"], run=fake_rows.hangs_in_kl)
    monkeypatch.setitem(bench_kl.ROWS, "trl", hanging)
    absent = dataclasses.replace(bench_kl.ROWS["liger"], package="no_such_package", cuda_only=False)
    monkeypatch.setitem(bench_kl.ROWS, "liger", absent)
    options = ["--rows", "trl,liger,chunked", "--directions", "reverse", "--limit", "3", "--out", str(tmp_path / "x")]
    assert bench_kl.main([*SMALL, *options]) == 0
    said = capsys.readouterr().out
    assert "| failed: took longer than 3 s |" in said and "| failed: no_such_package is not installed |" in said
    assert "wall_over_floor" in json.loads((tmp_path / "x.json").read_text())["rows"][2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "chuncked"], "chunked"),
        (["--rows", "triton"], "cuda only"),
        (["--directions", "sideways"], "reverse and forward"),
        (["--tokens", "5", "--batch", "2"], "multiple"),
        (["--limit", "-1"], "--limit"),
    ],
)
def test_refusals(arguments, said, capsys):
    with pytest.raises(SystemExit):
        bench_kl.main([*SMALL, *arguments])
    assert said in capsys.readouterr().err
