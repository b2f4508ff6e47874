"""The exact KL's benchmark: its gate can be red, and what it writes says where it comes from."""

from __future__ import annotations

import dataclasses
import json

import pytest

from losses import bench_kl

SMALL = ["--tokens", "48", "--batch", "2", "--hidden", "16", "--vocab", "101", "--device", "cpu", "--reps", "2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["frozen", "train"])
def test_report(tmp_path, capsys, dtype, head):
    out = tmp_path / "new" / "exact_kl"
    arguments = [*SMALL, "--rows", "floor,full,chunked", "--dtype", dtype, "--head", head, "--out", str(out)]
    assert bench_kl.main(arguments) == 0
    text, result = out.with_suffix(".md").read_text(), json.loads(out.with_suffix(".json").read_text())
    assert capsys.readouterr().out == text and "`python -m losses.bench_kl --tokens 48" in text
    rows = {(row["row"], row["direction"]): row for row in result["rows"]}
    assert rows.keys() == {(r, d) for r in ("floor", "full", "chunked") for d in ("reverse", "forward")}
    for (name, _), row in rows.items():
        assert len(row["seconds"]) == 2 and (row["over_floor"] == 1) == (name == "floor")
        assert row["errors"].keys() == (set() if name == "floor" else {"v", "kl"})
    assert result["provenance"]["packages"]["torch"] in text


def test_a_wrong_row_is_not_reported(monkeypatch, capsys, tmp_path):
    right = bench_kl.ROWS["chunked"]
    wrong = dataclasses.replace(right, run=lambda p, h, w: right.run(p, h, w) * 1.001)
    monkeypatch.setitem(bench_kl.ROWS, "chunked", wrong)
    assert bench_kl.main([*SMALL, "--rows", "full,chunked", "--out", str(tmp_path / "x")]) == 1
    printed = capsys.readouterr()
    assert "gate is red" in printed.err and not printed.out and not list(tmp_path.iterdir())


def test_a_peer_that_fails_is_left_out(monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(bench_kl.ROWS, "trl", dataclasses.replace(bench_kl.ROWS["trl"], run=fails))
    assert bench_kl.main([*SMALL, "--rows", "full,trl", "--directions", "reverse"]) == 0
    assert "Left out: trl, RuntimeError: no such kernel" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "chuncked"], "chunked"),
        (["--rows", "triton"], "cuda only"),
        (["--directions", "sideways"], "reverse and forward"),
        (["--tokens", "5", "--batch", "2"], "multiple"),
    ],
)
def test_refusals(arguments, said, capsys):
    with pytest.raises(SystemExit):
        bench_kl.main([*SMALL, *arguments])
    assert said in capsys.readouterr().err
