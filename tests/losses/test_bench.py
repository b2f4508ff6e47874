"""The benchmark: its gate lets nothing wrong pass, its figures are what they say, and its options are checked."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from losses import bench, bench_measure, bench_report, bench_rows
from losses.bench_gate import Gate
from losses.bench_rows import ROWS, TERMS, VARIANTS, Entry, Problem, Row, Shape
from tests import oracles
from tests.losses import fake_rows

SMALL = Shape(tokens=96, hidden=16, vocab=331, batch=3)
SMALL_OPTIONS = ["--tokens", "96", "--batch", "3", "--hidden", "16", "--vocab", "331", "--reps", "2", "--device", "cpu"]


def run(capsys, *options: str) -> tuple[int, str, str]:
    code = bench.main([*SMALL_OPTIONS, *options])
    said = capsys.readouterr()
    return code, said.out, said.err


# ---------------------------------------------------------------------------------------------------------------- gate


@pytest.mark.parametrize("variant", TERMS)
@pytest.mark.parametrize("head", ["frozen", "train"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_right_rows_pass(variant, head, dtype):
    problem = Problem.make(dataclasses.replace(SMALL, head=head, dtype=dtype))
    gate = Gate(problem, samples=16)
    for name in ("full", "reference", "chunked"):
        checked = gate.check(Entry(ROWS[name], variant))
        assert checked["ok"], (name, checked)
        assert set(checked["errors"]) == {"loss", "d_hidden"} | ({"d_weight"} if head == "train" else set())


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in TERMS])
def test_every_other_variant_passes(variant):
    problem = Problem.make(dataclasses.replace(SMALL, head="train"))
    checked = Gate(problem, samples=16).check(Entry(ROWS["chunked"], variant))
    assert checked["ok"], checked


@pytest.mark.parametrize("variant", TERMS)
def test_the_exact_values_are_the_oracles(variant):
    """The oracle knows nothing of the benchmark: full logits and autograd in float64, formulas from the papers."""
    problem = Problem.make(dataclasses.replace(SMALL, head="train"))
    gate = Gate(problem, samples=16)
    exact = gate.exact(variant)
    batch = oracles.Batch(problem.ids, torch.ones_like(problem.ids), problem.advantages.double(), ref=problem.ref)
    options = oracles.Options(beta=bench_rows.BETA)
    want = oracles.evaluate(oracles.DEFINITIONS[variant], problem.hidden, problem.weight, batch, options)
    torch.testing.assert_close(exact["loss"][0], want.loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(exact["d_hidden"][0], want.hidden.view(-1, 16)[gate.tokens], rtol=1e-8, atol=1e-14)
    torch.testing.assert_close(exact["d_weight"][0], want.weight[gate.words], rtol=1e-8, atol=1e-14)


WRONG = {
    "loss": lambda loss, hidden, weight: loss * 1.001,
    "d hidden by a factor": lambda loss, hidden, weight: loss + (hidden - hidden.detach()).sum() * 1e-4,
    "NaN": lambda loss, hidden, weight: loss * math.nan,
    "no gradient": lambda loss, hidden, weight: loss.detach() + 0 * hidden.sum() + 0 * weight.sum(),
    "d weight": lambda loss, hidden, weight: loss + (weight - weight.detach()).sum() * 1e-4,
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("ours", [True, False], ids=["own", "peer"])
def test_a_wrong_row_has_its_error_and_no_time(fault, ours, monkeypatch, tmp_path, capsys):
    def wrong(problem, hidden, weight, variant):
        return WRONG[fault](ROWS["full"].run(problem, hidden, weight, variant), hidden, weight)

    monkeypatch.setitem(ROWS, "wrong", Row("wrong", "a wrong row", wrong, ours=ours, package="torch"))
    options = ["--rows", "wrong,full", "--head", "train", "--no-memory", "--out", str(tmp_path)]
    code, said, complaint = run(capsys, *options)
    assert code == (1 if ours else 0)
    assert "RED wrong[reference]: loss " in said and "ok  full[reference]: loss " in said
    assert ("own failed" in complaint) == ours
    wrong_row, full = json.loads((tmp_path / f"{dataclasses.replace(SMALL, head='train')}.json").read_text())["rows"]
    assert wrong_row["failed"] == "outside its error budget" and "wall" not in wrong_row
    assert any(not error <= limit for error, limit in wrong_row["errors"].values())
    assert "failed" not in full and full["wall"]["median"] > 0


@pytest.mark.parametrize("variant", [v for v in TERMS if v != "reference"])
def test_another_variants_loss_does_not_pass(variant):
    def other(problem, hidden, weight, _):
        return ROWS["chunked"].run(problem, hidden, weight, variant)

    checked = Gate(Problem.make(SMALL)).check(Entry(Row("other", "other", other), "reference"))
    assert not checked["ok"]


def test_a_row_that_rounds_its_logits_to_half_does_not_pass_in_float32():
    def rounds(problem, hidden, weight, variant):
        logits = (hidden.view(-1, hidden.shape[-1]) @ weight.t()).bfloat16().float()
        logps = torch.log_softmax(logits, -1).gather(1, problem.ids.view(-1, 1)).squeeze(1)
        return bench_rows.plain_loss(problem, logps, variant)

    checked = Gate(Problem.make(SMALL)).check(Entry(Row("rounds", "rounds", rounds), "reference"))
    assert checked["errors"]["d_hidden"][0] > checked["errors"]["d_hidden"][1]


# ------------------------------------------------------------------------------------------------------ time and memory


needs_proc = pytest.mark.skipif(
    not bench_measure.CLEAR_REFS.exists(), reason="no high-water mark of this process to reset"
)


@needs_proc
def test_peak_memory_is_that_of_the_work():
    """In a process of its own: here malloc may hand out pages that earlier tests left resident."""
    code = """
import torch
from losses import bench_measure

def work(n):
    a = torch.ones(n << 20, dtype=torch.uint8)
    b = a + 1
    del a, b

work(1)
print(*(bench_measure.peak_extra(lambda: work(n), "cpu") for n in (40, 140)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    small, large = map(int, done.stdout.split())
    assert 2 * 95 * 2**20 < large - small < 2 * 105 * 2**20


@needs_proc
def test_memory_of_a_row_leaves_out_inputs_and_gradients():
    """d hidden and d weight are 32 MiB each; `full` holds 16 MiB of logits more than once, `chunked` once at most."""
    shape = Shape(tokens=1024, hidden=8192, vocab=1024, head="train")
    logits = 4 * 1024 * 1024
    full = bench.memory(Entry(ROWS["full"], "reference"), shape)
    assert full is not None
    assert 1.5 * logits < full < 32 * 2**20


@needs_proc
def test_memory_from_the_command_line():
    """As a user runs it: full logits are 128 MiB here, several times over; `chunked` stays far below."""
    shape = [
        "--tokens",
        "2048",
        "--hidden",
        "8",
        "--vocab",
        "16384",
        "--device",
        "cpu",
        "--reps",
        "1",
        "--warm-up",
        "0",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "losses.bench", *shape, "--rows", "full,chunked", "--json"],
        capture_output=True, text=True, cwd=Path(bench.__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peaks = {row["row"]: row["peak_extra_bytes"] for row in json.loads(done.stdout)["rows"]}
    assert peaks["full"] > 200 * 2**20
    assert 0 < peaks["chunked"] < 160 * 2**20


def test_seconds_are_those_of_the_work():
    wall, processor = bench_measure.seconds(lambda: time.sleep(0.05), "cpu")
    assert 0.05 <= wall < 1
    assert processor < 0.04


# -------------------------------------------------------------------------------------------------------------- report


def test_report(capsys, tmp_path):
    out = tmp_path / "a/b"
    options = ["--rows", "full,chunked", "--variant", "founding", "--json", "--no-memory", "--out", str(out)]
    code, said, _ = run(capsys, *options)
    assert code == 0
    result = json.loads(said)
    name = "cpu-float32-frozen-96x16x331"
    assert json.loads((out / f"{name}.json").read_text()) == result
    rows = [(row["row"], row["variant"]) for row in result["rows"]]
    assert rows == [("full", "reference"), *(("chunked", v) for v in TERMS)]
    for row in result["rows"]:
        assert len(row["wall"]["rounds"]) == result["reps"] == 2
        assert 0 < row["wall"]["min"] <= row["wall"]["median"] <= row["wall"]["max"]
        assert row["base"]["name"] == "full" and len(row["base"]["wall"]["rounds"]) == 2
        ratios = [a / b for a, b in zip(row["wall"]["rounds"], row["base"]["wall"]["rounds"], strict=True)]
        assert math.isclose(row["wall_over_full"], sum(ratios) / 2)
    assert result["rows"][0]["wall_over_full"] == 1
    source = result["provenance"]
    assert source["packages"]["torch"] == torch.__version__ and source["threads"] == torch.get_num_threads()
    assert "--variant founding" in source["command"]
    assert source["commit"] is None or len(source["commit"]) == 40
    page = (out / f"{name}.md").read_text()
    for row in result["rows"]:
        assert f"| {row['label']} | {row['variant']} | {row['wall']['median']:.3f} " in page
    assert source["date"] in page and page.count("ok  ") == len(rows)
    result["rows"][0]["peak_extra_bytes"] = 1234 * 2**20
    assert "| 1,234 MiB |" in bench.markdown(result)


def test_without_full_there_is_no_ratio(capsys):
    code, said, _ = run(capsys, "--rows", "chunked", "--no-memory")
    assert code == 0
    assert "| ours: chunked | reference |" in said and "not measured" in said


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rows", "chunkd"], "chunked"),
        (["--rows", "triton"], "cuda only"),
        (["--variant", "forwardkl"], "forward_kl"),
        (["--limit", "0"], "--limit"),
        (["--site", "trl=no/such/folder"], "no such folder"),
        (["--site", "trll=."], "trl"),
        (["--steps", "0"], "--steps"),
        (["--tokens", "0"], "--tokens"),
        (["--tokens", "97"], "--batch"),
        (["--reps", "0"], "--reps"),
        (["--warm-up", "-1"], "--warm-up"),
        (["--dtype", "float8"], "float8"),
        (["--head", "frozn"], "frozn"),
    ],
)
def test_bad_options_are_named(options, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main([*SMALL_OPTIONS, *options])
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ rows that fail


def test_peers_that_fail_are_lines_and_the_rest_is_measured(monkeypatch, tmp_path, capsys):
    """With a limit: one that never ends, one that raises, one that takes its process along, one that is wrong, one that
    is missing; in the order given, with everything so far on disk when the next one starts."""
    folder = tmp_path / "out"
    monkeypatch.setenv("FAKE_ROWS_LOOK_AT", str(folder / f"{SMALL}.json"))
    monkeypatch.setenv("FAKE_ROWS_SAW", str(tmp_path / "saw.json"))
    order = ["chunked", "hangs", "raises", "dies", "wrong", "absent", "looks", "full"]
    for name in order[1:-1]:
        package = "no_such_package" if name == "absent" else "torch"
        monkeypatch.setitem(ROWS, name, Row(name, f"a peer that {name}", getattr(fake_rows, name), package=package))
    start = time.monotonic()
    options = ["--rows", ",".join(order), "--limit", "3", "--no-memory", "--out", str(folder)]
    code, said, _ = run(capsys, *options)
    assert code == 0 and time.monotonic() - start < 200  # a hanging row would take 600
    result = json.loads((folder / f"{SMALL}.json").read_text())
    assert [row["row"] for row in result["rows"]] == order and result["waiting"] == []
    failed = {row["row"]: row["failed"] for row in result["rows"] if "failed" in row}
    assert failed == {
        "hangs": "took longer than 3 s",
        "raises": "NotImplementedError: no kernel for this",
        "dies": "its process ended with exit code 3",
        "wrong": "outside its error budget",
        "absent": "no_such_package is not installed",
    }
    for row in result["rows"]:
        assert ("wall_over_full" in row) == (row["row"] not in failed)
        assert f"| {row['label']}" in said
        assert row["row"] not in failed or f"| failed: {failed[row['row']]} |" in said
    saw = json.loads((tmp_path / "saw.json").read_text())
    assert [row["row"] for row in saw["rows"]] == order[: order.index("looks")]
    assert saw["waiting"] == ["looks[reference]", "full[reference]"]
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".md"]
    with pytest.raises(ProcessLookupError):  # what the hanging row had started is gone as well
        os.kill(int((tmp_path / "saw.json.child").read_text()), 0)


def test_without_a_limit_a_peer_that_raises_is_a_line_too(monkeypatch, capsys):
    monkeypatch.setitem(ROWS, "raises", Row("raises", "raises", fake_rows.raises, package="torch"))
    code, said, _ = run(capsys, "--rows", "raises,chunked", "--no-memory")
    assert code == 0 and "failed: NotImplementedError: no kernel for this" in said and "| ours: chunked |" in said


def test_a_row_imports_from_its_own_folder(monkeypatch, tmp_path, capsys):
    """Two peers may want two versions of one package in one run."""
    for name, number in (("old", 1), ("new", 2)):
        package = tmp_path / name / "fake_peer"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"NUMBER = {number}\n")
        info = tmp_path / name / f"fake_peer-{number}.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-peer\nVersion: {number}.0\n")
        monkeypatch.setitem(ROWS, name, Row(name, name, fake_rows.of_version, package="fake_peer"))
    sites = [word for name in ("old", "new") for word in ("--site", f"{name}={tmp_path / name}")]
    code, said, _ = run(capsys, "--rows", "chunked,old,new", "--no-memory", "--json", *sites)
    own, old, new = json.loads(said)["rows"]
    assert code == 0 and "failed" not in own and own["version"] is None
    assert old["version"] == "1.0" and "failed" not in old
    assert new["version"] == "2.0" and new["failed"] == "RuntimeError: fake_peer is 2"


def test_all_rows_are_those_of_the_device():
    names = [row.name for row in bench_rows.choose_rows("all", "cpu")]
    assert "trl" in names and "triton" not in names
    assert [row.name for row in bench_rows.choose_rows(None, "cpu")] == ["full", "reference", "chunked"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main([*SMALL_OPTIONS[:-1], "cuda"])
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(("told", "known"), [("0a1b2c3d\n", True), ("a name", False), ("", False)])
def test_a_copy_without_git_is_told_its_commit(told: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ABLATE_COMMIT", told)
    source = bench_report.provenance("losses.bench", [], "cpu")
    assert (source["commit"] == "0a1b2c3d") is known and (source["changed"] is None or not known)
