"""python -m losses.bench at small sizes: what it reports, that a wrong row stops it, and what it refuses."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import losses
from losses import bench
from tests.losses.common import BACKENDS

SMALL = ["--tokens", "48", "--hidden", "16", "--vocab", "96", "--device", "cpu", "--reps", "2"]
QUICK = [*SMALL, "--no-memory", "--json"]


@pytest.fixture(autouse=True)
def few_objects_to_collect():
    """The benchmark collects garbage before every round: what torch's import left need not be walked each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = bench.main([*QUICK, *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head", ["frozen", "train"])
def test_report(capsys, dtype, head):
    code, out, _ = run(capsys, "--dtype", dtype, "--head", head, "--variant", "all", "--batch", "4")
    assert code == 0
    result = json.loads(out)
    rows = {(row["row"], row["variant"]) for row in result["rows"]}
    assert rows >= {(name, variant) for name in BACKENDS for variant in losses.founding} | {("full", "reference")}
    for row in result["rows"]:
        assert set(row["errors"]) == {"loss", "d_hidden"} | ({"d_weight"} if head == "train" else set())
        assert all(0 <= error <= limit for error, limit in row["errors"].values())
        assert len(row["wall"]["rounds"]) == 2
        assert 0 < row["wall"]["min"] <= row["wall"]["median"] <= row["wall"]["max"]
        assert row["peak_extra_bytes"] is None
    full = next(row for row in result["rows"] if row["row"] == "full")
    assert full["wall_over_full"]["median"] == 1.0
    assert {"commit", "date", "command", "python", "packages", "device", "threads"} <= set(result["provenance"])
    assert result["shape"]["dtype"] == dtype


def scaled(factor: float):
    """A backend whose value is right and whose gradient is not."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * factor

    def wrong(hidden, weight, inputs, variant, **options):
        out = original(hidden, weight, inputs, variant, **options)
        spoilt = Scale.apply(out.loss) if options["backend"] == "chunked" else out.loss
        return dataclasses.replace(out, loss=spoilt)

    original = losses.linear_policy_loss
    return wrong


@pytest.mark.parametrize("factor", [1.001, 0.5, 0.0, float("nan")])
def test_a_wrong_gradient_stops_everything(capsys, monkeypatch, factor):
    monkeypatch.setattr(losses, "linear_policy_loss", scaled(factor))
    code, out, err = run(capsys)
    assert code == 1 and out == ""
    red = [line for line in err.splitlines() if line.startswith("RED")]
    assert len(red) == 1 and "chunked[reference]" in red[0]


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_value_stops_everything(capsys, monkeypatch, factor):
    original = losses.linear_policy_loss

    def wrong(hidden, weight, inputs, variant, **options):
        out = original(hidden, weight, inputs, variant, **options)
        return dataclasses.replace(out, loss=out.loss + (out.loss * (factor - 1)).detach())

    monkeypatch.setattr(losses, "linear_policy_loss", wrong)
    code, out, err = run(capsys)
    assert code == 1 and out == ""
    assert err.count("RED") == len(BACKENDS)


def test_a_wrong_row_measures_no_time(capsys, monkeypatch):
    """The gate comes first: no round is timed once a row is wrong."""
    monkeypatch.setattr(losses, "linear_policy_loss", scaled(0.9))
    monkeypatch.setattr(bench, "times", lambda *_: pytest.fail("timed a wrong row"))
    assert run(capsys)[0] == 1


def test_the_gate_s_terms_are_the_library_s():
    """The benchmark writes the founding terms again; they are those of the registry, in value and slope."""
    from losses.bench_rows import BETA, TERMS

    assert set(TERMS) == set(losses.founding)
    rng = torch.Generator().manual_seed(3)
    n, p = (-4 * torch.rand(3, 5, generator=rng, dtype=torch.float64) for _ in range(2))
    a = torch.randn(3, generator=rng, dtype=torch.float64)
    for name, term in TERMS.items():
        mine, theirs = n.clone().requires_grad_(True), n.clone().requires_grad_(True)
        inputs = losses.LossInputs(torch.zeros(3, 5, dtype=torch.long), torch.ones(3, 5), a, ref_per_token_logps=p)
        loss = losses.policy_loss(mine, inputs, name, beta=BETA).loss
        want = term(theirs, p, a[:, None]).mean(1).mean()
        torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
        loss.backward()
        want.backward()
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_files_and_markdown(capsys, tmp_path):
    assert bench.main([*SMALL, "--no-memory", "--out", str(tmp_path / "new" / "folder")]) == 0
    text = capsys.readouterr().out
    (written,) = (tmp_path / "new" / "folder").glob("*.md")
    (encoded,) = (tmp_path / "new" / "folder").glob("*.json")
    assert written.read_text(encoding="utf-8") == text
    result = json.loads(encoded.read_text(encoding="utf-8"))
    assert all(row["label"] in text for row in result["rows"])
    assert "48" in written.stem and "float32" in written.stem


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "chunkd"], "chunked"),
        (["--rows", "triton"], "triton"),
        (["--variant", "refrence"], "refrence"),
        (["--tokens", "0"], "tokens"),
        (["--reps", "0"], "reps"),
        (["--warm-up", "-1"], "warm-up"),
        (["--tokens", "10", "--batch", "3"], "multiple"),
        (["--dtype", "float8"], "float8"),
    ],
)
def test_refusals(capsys, arguments, said):
    with pytest.raises(SystemExit) as caught:
        bench.main([*QUICK, *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_cuda_where_there_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--device", "cuda"])
    assert "CUDA" in capsys.readouterr().err


@pytest.mark.skipif(not bench.CLEAR_REFS.exists(), reason="needs Linux's high-water mark")
def test_memory_from_the_command_line(tmp_path):
    """As a user runs it: `chunked` far below full logits, which are 128 MiB here, several times over."""
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
        capture_output=True,
        text=True,
        cwd=Path(bench.__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    peaks = {row["row"]: row["peak_extra_bytes"] for row in json.loads(done.stdout)["rows"]}
    if None in peaks.values():
        pytest.skip("the system does not let a process reset its high-water mark")
    assert peaks["full"] > 200 * 2**20
    assert 0 < peaks["chunked"] < 160 * 2**20
