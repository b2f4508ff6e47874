"""Trackers beside the run files, read back from what they wrote: wandb's offline runs and TensorBoard's event files."""

from __future__ import annotations

import csv
import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ablate import cell as cells
from ablate import config as configs
from ablate import plan, runner, schema, tracking
from ablate.errors import ConfigError
from ablate.rundir import CellDir

SMALL = ("train.steps=2", "train.prompts_per_step=2", "train.num_generations=2", "seeds=0,", "grid=none")
SMALL += ("eval.prompts=4", "eval.every=0", "train.rollouts_every=0", "variants=reference")
CURVES = {"loss", "reward", "kl", "rewards/correct/mean", "rewards/format/mean"}


def run(folder: Path, *overrides: str) -> CellDir:
    (cell,) = plan.cells(configs.load([*SMALL, *overrides]))
    directory = CellDir(folder / cell.name)
    directory.write_config(cell)
    cells.run_cell(cell, directory, lambda *a: None)
    return directory


def leveldb_log(data: bytes, block: int = 1 << 15, header: int = 7) -> Iterator[bytes]:
    """Records of a wandb file: LevelDB's log format in blocks of 32 KiB, after a head of 7 bytes."""
    position, parts = header, []
    while position + header <= len(data):
        left = block - position % block
        if left < header:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        parts.append(data[position + header : position + header + length])
        position += header + length
        if kind in (1, 4):  # whole, or last part
            yield b"".join(parts)
            parts = []


def records(file: Path, seconds: float = 30) -> list[Any]:
    """The records of a finished run; wandb's process may still be writing after `finish()` has returned."""
    from wandb.proto.wandb_internal_pb2 import Record

    end = time.monotonic() + seconds
    while True:
        found = [Record.FromString(data) for data in leveldb_log(file.read_bytes())]
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        assert time.monotonic() < end, f"{file} has no end"
        time.sleep(0.1)


def offline_run(folder: Path) -> dict[str, Any]:
    """The one offline wandb run below a folder: group, name, config, and the values of each history key in order."""
    (stored,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found: dict[str, Any] = {"folder": stored.parent, "history": {}, "config": {}}
    for record in records(stored):
        for item in record.history.item:
            key = item.key or "/".join(item.nested_key)
            found["history"].setdefault(key, []).append(json.loads(item.value_json))
        for item in (*record.run.config.update, *record.config.update):
            found["config"][item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
        if record.run.run_group:
            found |= {"group": record.run.run_group, "name": record.run.display_name}
    return found


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar in a folder's TensorBoard event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_wandb_holds_config_and_curves_of_a_cell(tmp_path: Path) -> None:
    directory = run(tmp_path, "wandb.project=ablation", "wandb.mode=offline")
    found = offline_run(directory.path)
    assert (found["group"], found["name"]) == ("default", "reference-seed0")
    assert found["config"]["variant"] == "reference" and found["config"]["seed"] == 0
    assert found["config"]["train"]["steps"] == 2 and found["config"]["model/num_parameters"] > 0
    history, rows = found["history"], directory.metrics()
    assert {f"train/{name}" for name in CURVES} <= set(history)
    assert history["train/rewards/correct/mean"] == [row["rewards/correct/mean"] for row in rows]
    assert history["eval/probability"] == [row["eval/probability"] for row in directory.evals()]


def test_tensorboard_holds_the_curves_of_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = run(tmp_path / "runs", "trl.report_to=tensorboard")
    found, rows, evals = scalars(directory.path / "tensorboard"), directory.metrics(), directory.evals()
    for name in CURVES:
        assert found[f"train/{name}"] == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows]
    assert found["eval/probability"] == [
        (row["step"], pytest.approx(row["eval/probability"], rel=1e-6)) for row in evals
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"] and not list(directory.path.glob("wandb*"))


def test_both_trackers_and_none_give_the_same_numbers(tmp_path: Path) -> None:
    both = run(tmp_path / "both", "trl.report_to=tensorboard", "wandb.project=ablation", "wandb.mode=offline")
    assert offline_run(both.path)["history"]["train/kl"] == [row["kl"] for row in both.metrics()]
    assert len(scalars(both.path / "tensorboard")["train/kl"]) == 2
    with pytest.MonkeyPatch.context() as patch:
        for name in ("wandb", "tensorboard"):
            patch.setitem(sys.modules, name, None)  # as if it were not installed
        bare = run(tmp_path / "bare")
    for file in (schema.EVAL_FILE,):
        assert (bare.path / file).read_bytes() == (both.path / file).read_bytes()
    assert [row["loss"] for row in bare.metrics()] == [row["loss"] for row in both.metrics()]
    assert bare.read_config()["hash"] == both.read_config()["hash"], "where it is reported is no part of a cell"


def test_a_sweep_ends_with_its_comparison_in_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent))
    given = ["variants=reference,no_detach", "seeds=2", "jobs=0", f"out={tmp_path}", "wandb.group=mine"]
    chosen = configs.load([*given, "wandb.project=ablation", "wandb.mode=offline"])
    assert runner.run(chosen, function="fakes:run_cell") == 0
    folder = tmp_path / "default"
    found = offline_run(folder)
    assert (found["group"], found["name"]) == ("mine", "comparison")
    assert len(found["config"]["cells"]) == 8 and found["config"]["loss"]["backend"] == "auto"
    (path,) = found["history"]["comparison/path"]
    table = json.loads((found["folder"] / "files" / path).read_text())
    rows = list(csv.DictReader((folder / "report" / "table.csv").open()))
    assert len(table["data"]) == len(rows) == 4 and table["columns"] == list(rows[0])
    for stored, row in zip(table["data"], rows, strict=True):
        for value, text in zip(stored, row.values(), strict=True):
            assert (value is None and text == "") or str(value) == text or float(value) == float(text)


def test_a_comparison_that_cannot_be_logged_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_network(*arguments: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent))
    monkeypatch.setattr(tracking, "log_comparison", no_network)
    given = ["variants=reference", "seeds=1", "jobs=0", f"out={tmp_path}"]
    assert runner.run(configs.load(given), function="fakes:run_cell") == 0
    assert "no comparison in wandb: OSError: no route to host" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trl.report_to=tensorbord", r"trl\.report_to: unknown name 'tensorbord'; did you mean tensorboard"),
        ("trl.report_to=[tensorboard,wnadb]", r"wnadb.*wandb"),
        ("trl.report_to=comet_ml", r"trl\.report_to=comet_ml: its package is not installed"),
        ("wandb.id=x", r"wandb\.id cannot be set: every cell is a run of its own"),
        ("wandb.name=x", r"wandb\.name cannot be set.*wandb\.group"),
        ("grid.trl.report_to=wandb,tensorboard", r"trl\.report_to cannot be an axis"),
    ],
)
def test_trackers_are_checked_up_front(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configs.load([override])


def test_names_of_trackers() -> None:
    def names(*overrides: str) -> list[str]:
        return tracking.trackers(configs.load(overrides, check=False))

    assert names() == names("trl.report_to=none") == []
    assert names("wandb.project=p") == names("trl.report_to=wandb") == ["wandb"]
    assert names("trl.report_to=tensorboard", "wandb.project=p") == ["tensorboard", "wandb"]
    assert {"tensorboard", "wandb"} <= set(names("trl.report_to=all"))
