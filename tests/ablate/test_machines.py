"""A sweep spread over machines and days: cell folders that are copied together are one experiment."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ablate import cli, config, runner

GIVEN = ("variants=reference,no_detach", "grid.beta=0.04,1", "jobs=0")
ONE = {"git": {"sha": "a" * 40}, "packages": {"torch": "2.13.0"}, "device": {"type": "cpu"}}
TWO = {"git": {"sha": "b" * 40}, "packages": {"torch": "2.11.0"}, "device": {"type": "cuda", "name": "H200"}}


@pytest.fixture(autouse=True)
def fakes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent))
    monkeypatch.delenv("FAKE_CELLS", raising=False)


def train(out: Path, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
    monkeypatch.setenv("FAKE_ENV", json.dumps(machine))
    chosen = config.load([*GIVEN, f"out={out}", *overrides])
    assert runner.run(chosen, function="fakes:run_cell") == 0


def report(folder: Path) -> str:
    result = CliRunner().invoke(cli.cli, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    return result.output


def test_cells_of_several_machines_are_one_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "one", ONE, monkeypatch, "seeds=0,")
    train(tmp_path / "two", TWO, monkeypatch, "seeds=1,2", "retries=0")
    together = tmp_path / "all" / "default"
    for machine in ("one", "two"):
        shutil.copytree(tmp_path / machine / "default", together, dirs_exist_ok=True)

    text = report(together)
    rows = [line.split() for line in text.splitlines() if line.startswith(("reference ", "no_detach "))]
    assert [(row[0], row[1], row[2]) for row in rows[:4]] == [
        ("reference", "0.04", "3"),
        ("no_detach", "0.04", "3"),
        ("reference", "1", "3"),
        ("no_detach", "1", "3"),
    ]
    for words in (
        "results of several git commits are mixed: aaaaaaaaaaaa in",
        "cells ran under different packages.torch",
        "cells ran under different device.type",
    ):
        assert words in text

    before = {path: path.read_bytes() for path in together.glob("*/*.json*")}
    monkeypatch.setenv(
        "FAKE_CELLS", json.dumps({f"{path.name}": {"at": 1, "kind": "raise"} for path in together.iterdir()})
    )
    chosen = config.load([*GIVEN, f"out={tmp_path / 'all'}", "seeds=3"])
    assert runner.counts(runner.survey(chosen)) == "12 cells: 12 done"
    assert runner.run(chosen, function="fakes:run_cell") == 0
    assert {path: path.read_bytes() for path in together.glob("*/*.json*")} == before
