"""Packed runs: small, and the same report."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from ablate import schema
from ablate.errors import RunFileError
from ablate.rundir import CellDir
from analysis import files, load, samples, tables
from analysis.files import PACKED
from analysis.pack import pack

FIXTURE = Path(__file__).parent / "fixture" / "demo"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("packed") / "demo"
    pack(FIXTURE, target)
    return target


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_report_is_the_same(packed: Path) -> None:
    before, after = load.load(FIXTURE), load.load(packed)
    assert tables.comparison_table(after).rows == tables.comparison_table(before).rows
    assert after.metrics.equals(before.metrics) and after.evals.equals(before.evals)
    assert sorted(path.name for path in (packed / schema.REPORT_DIR).iterdir()) == ["curves.svg", "table.md"]
    cell = packed / "reference-seed0-beta1"
    assert not (cell / schema.METRICS_FILE).exists() and not (cell / schema.ROLLOUTS_DIR).exists()
    rows = (FIXTURE / cell.name / schema.METRICS_FILE).read_bytes()
    assert gzip.decompress((cell / (schema.METRICS_FILE + PACKED)).read_bytes()) == rows


def test_again_and_in_parts_gives_the_same_bytes(packed: Path, tmp_path: Path) -> None:
    """A sweep that comes home in two parts, and what is packed already, packed again."""
    parts = [tmp_path / "first", tmp_path / "second"]
    for cell in FIXTURE.glob(f"*/{schema.DONE_FILE}"):
        shutil.copytree(cell.parent, parts["seed0" in cell.parent.name] / cell.parent.name)
    target = tmp_path / "demo"
    for part in parts:
        pack(part, target)
    again = tmp_path / "again" / "demo"
    pack(target, again)
    for cell in packed.glob("*-seed*"):
        for path in (path for path in cell.rglob("*") if path.is_file()):
            assert path.read_bytes() == (again / path.relative_to(packed)).read_bytes(), path
    assert size(again) < size(FIXTURE) / 2


def test_completions_come_along_when_asked_for(tmp_path: Path) -> None:
    pack(FIXTURE, tmp_path / "demo", rollouts=True)
    stored = sorted(path.relative_to(FIXTURE) for path in FIXTURE.glob(f"*/{schema.ROLLOUTS_DIR}/*.parquet"))
    assert stored and stored == sorted(p.relative_to(tmp_path / "demo") for p in (tmp_path / "demo").rglob("*.parquet"))
    before, kept = load.load(FIXTURE), tmp_path / "kept" / "demo"
    shutil.copytree(tmp_path / "demo", kept)
    after = load.load(kept)
    with pytest.raises(ValueError, match="holds completions of an earlier packing.*say --rollouts"):
        pack(FIXTURE, tmp_path / "demo")
    (tmp_path / "demo" / stored[0]).with_name("step-000007.parquet").write_bytes(b"of another run")
    pack(FIXTURE, tmp_path / "demo", rollouts=True)
    assert len(list((tmp_path / "demo").rglob("*.parquet"))) == len(stored)
    right = samples.matching(after, r"^43\+38=\n81$", "^43")  # refers to both, prompt and completion
    assert right.rows == samples.matching(before, r"^43\+38=\n81$", "^43").rows != ()
    row = right.frame.set_index(["variant", "beta"]).loc[("full_reverse_kl", 0.04)]
    assert (row["step"], row["hits"], row["n"]) == (20, 1, 4)  # of 81, 82, 82, 82
    nothing = samples.matching(after, "8", "nothing like it")
    assert len(nothing.frame) == len(nothing.rows) == 0


def test_completions_that_cannot_be_read_stop_the_packing_and_no_table(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / "demo")
    runs = load.load(tmp_path / "demo")
    first, second = sorted((tmp_path / "demo").glob(f"*/{schema.ROLLOUTS_DIR}/*.parquet"))[:2]
    (first.parent / "step-x.parquet").write_text("of something else")
    (first.parent / "step-000030.parquet").mkdir()
    known = samples.matching(runs, "8")
    assert len(known.notes) == 1
    second.write_bytes(second.read_bytes()[:100])
    left = samples.matching(runs, "8")
    assert sum(left.frame["n"]) < sum(known.frame["n"]) and second.name in left.notes[1]
    with pytest.raises(files.RunFileError, match="not a readable parquet file"):
        pack(tmp_path / "demo", tmp_path / "kept", rollouts=True)
    assert not list(tmp_path.glob("kept/*/*"))


def test_matching_where_cells_have_different_axes(tmp_path: Path) -> None:
    cells = sorted(path.parents[1] for path in FIXTURE.glob(f"*/{schema.ROLLOUTS_DIR}/*.parquet"))[:2]
    for cell in cells:
        shutil.copytree(cell, tmp_path / cell.name)
    config = tmp_path / cells[0].name / schema.CONFIG_FILE
    edited = json.loads(config.read_text())
    edited["point"] = {}
    config.write_text(json.dumps(edited))
    table = samples.matching(load.load(tmp_path), "8")
    assert {row[0] for row in table.rows} and all(len(row) == len(table.headers) for row in table.rows)


def test_what_cannot_be_packed_is_said(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished run"):
        pack(tmp_path, tmp_path / "target")
    with pytest.raises(ValueError, match="another folder"):
        pack(packed, packed / ".." / packed.name)


def test_nothing_is_packed_over_another_run(packed: Path, tmp_path: Path) -> None:
    """Of another config under the same name, one that is not packed, damaged ones, and a folder among the runs."""
    other, target, runs = tmp_path / "other", tmp_path / "target", tmp_path / "runs"
    for folder in (target, other):
        shutil.copytree(packed, folder)
    shutil.copytree(FIXTURE, runs)
    path = other / "reference-seed0-beta1" / schema.CONFIG_FILE
    stored = json.loads(path.read_text())
    stored["config"]["train"]["learning_rate"] = 1.0
    stored["hash"] = schema.config_hash(stored["config"], "reference", 0)
    path.write_text(json.dumps(stored))
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"nothing was packed, reference-seed0-beta1 cannot be used.*done\.json"):
        pack(other, target)
    done = path.with_name(schema.DONE_FILE)
    done.write_text(json.dumps(json.loads(done.read_text()) | {"hash": stored["hash"]}))
    with pytest.raises(ValueError, match="reference-seed0-beta1: holds a run of another config"):
        pack(other, target)
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    with pytest.raises(ValueError, match="holds a run that is not packed"):
        pack(packed, runs)
    with pytest.raises(ValueError, match="none inside it"):
        pack(runs, runs / "kept")


def test_a_finished_packed_cell_is_done(packed: Path) -> None:
    cell = CellDir(packed / "reference-seed0-beta1")
    stored = json.loads((cell.path / schema.CONFIG_FILE).read_text())
    assert cell.state(stored["hash"]) == "done"


def test_a_cut_packed_file_is_damage_to_a_run(packed: Path, tmp_path: Path) -> None:
    cell = CellDir(shutil.copytree(packed / "reference-seed0-beta1", tmp_path / "reference-seed0-beta1"))
    path = cell.path / (schema.METRICS_FILE + PACKED)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RunFileError, match=r"metrics\.jsonl\.gz: not readable"):
        cell.metrics()


def test_a_cut_file_is_damage(packed: Path, tmp_path: Path) -> None:
    target = tmp_path / "demo"
    shutil.copytree(packed, target)
    path = target / "reference-seed0-beta1" / (schema.METRICS_FILE + PACKED)
    path.write_bytes(path.read_bytes()[:-20])
    runs = load.load(target)
    assert any("not a whole gzip file" in problem.message for problem in runs.problems)
    assert runs.cells.set_index("cell").loc["reference-seed0-beta1", "state"] == "damaged"


def test_a_pipe_and_a_gzip_bomb_are_damage(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(packed, target := tmp_path / "demo")
    os.mkfifo(target / "reference-seed0-beta1" / schema.FAILED_FILE)
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    messages = [str(problem) for problem in load.load(target).problems]
    assert any("reference-seed1-beta1/metrics.jsonl.gz: more than" in message for message in messages)
    assert any("reference-seed0-beta1/failed.json: not a regular file" in message for message in messages)


def test_a_folder_without_rights_is_damage(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Path.exists

    def exists(path: Path) -> bool:
        if path.parent.name == "reference-seed0-beta1":
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(Path, "exists", exists)
    runs = load.load(packed)
    assert runs.cells.set_index("cell").loc["reference-seed0-beta1", "state"] == "damaged"
    assert any("cannot be read (Permission denied)" in problem.message for problem in runs.problems)
    with pytest.raises(files.RunFileError, match="reference-seed0-beta1: cannot be read"):
        load.load(packed, strict=True)
