"""Run directories: whole files or none, torn lines, states, resume."""

import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ablate import config, files, plan, rundir, schema
from ablate.errors import RunFileError
from ablate.rundir import CellDir


def make_cell(*overrides: str) -> plan.Cell:
    return plan.cells(config.load(["variants=reference", "seeds=1", "grid=none", *overrides], check=False))[0]


@pytest.fixture
def cell() -> plan.Cell:
    return make_cell()


@pytest.fixture
def directory(tmp_path: Path, cell: plan.Cell) -> CellDir:
    made = CellDir(tmp_path / "cell")
    made.write_config(cell)
    return made


def steps(directory: CellDir) -> list[int]:
    return [row["step"] for row in directory.metrics()]


def test_states(tmp_path: Path, cell: plan.Cell) -> None:
    directory = CellDir(tmp_path / cell.name)
    assert directory.state(cell.hash) == "new" and not directory.path.exists()
    directory.write_config(cell)
    assert directory.state(cell.hash) == "partial"
    directory.fail(ValueError("broken"), step=3)
    assert directory.state(cell.hash) == "failed"
    failed = directory.read_failed()
    assert failed is not None
    assert (failed["type"], failed["message"], failed["step"], failed["hash"]) == ("ValueError", "broken", 3, cell.hash)
    directory.finish({"eval": {"eval/probability": 0.5}})
    assert directory.state(cell.hash) == "done" and directory.read_failed() is None
    done = directory.read_done()
    assert done is not None and done["hash"] == cell.hash and done["finished_at"]
    other = make_cell("steps=3")
    assert directory.state(other.hash) == "changed"
    with pytest.raises(RunFileError, match="another config"):
        directory.write_config(other)


def test_config_file(directory: CellDir, cell: plan.Cell) -> None:
    stored = directory.read_config()
    assert stored is not None
    assert stored["hash"] == cell.hash and stored["experiment"] == "default"
    assert stored["cell"] == {"name": cell.name, "variant": "reference", "seed": 0, "point": {}, "axes": {}}
    assert stored["config"] == config.to_dict(cell.config)


def test_edited_and_truncated_files_are_named(directory: CellDir, cell: plan.Cell) -> None:
    path = directory.path / schema.CONFIG_FILE
    text = path.read_text()
    path.write_text(text.replace('"learning_rate": 0.0007', '"learning_rate": 0.1'))
    with pytest.raises(RunFileError, match=r"config\.json.*was edited"):
        directory.state(cell.hash)
    path.write_text(text[:100])
    with pytest.raises(RunFileError, match=r"config\.json.*not readable.*delete the folder"):
        directory.state(cell.hash)
    path.write_text('{"hash": 1}')
    with pytest.raises(RunFileError, match="keys are missing"):
        directory.state(cell.hash)
    path.write_text(text)
    (directory.path / schema.DONE_FILE).write_text('{"hash"')
    with pytest.raises(RunFileError, match=r"done\.json"):
        directory.state(cell.hash)
    (directory.path / schema.DONE_FILE).write_text("[]")
    with pytest.raises(RunFileError, match="not a JSON object"):
        directory.state(cell.hash)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hash": ' + "9" * 5000 + "}"])
def test_json_without_end_is_damage(directory: CellDir, cell: plan.Cell, text: str) -> None:
    path = directory.path / schema.CONFIG_FILE
    path.write_text(text)
    with pytest.raises(RunFileError, match="config.json: not readable"):
        directory.state(cell.hash)
    (directory.path / schema.METRICS_FILE).write_text(text + "\n{}\n")
    with pytest.raises(RunFileError, match="metrics.jsonl: line 1 is damaged"):
        directory.metrics()


def finished(directory: CellDir) -> None:
    for step in range(1, 4):
        directory.append_metrics({"step": step, "loss": 0.1})
    directory.append_eval({"step": 0, "eval/probability": 0.3})
    directory.append_eval({"step": 3, "eval/probability": 0.4})
    directory.finish({"steps": 3})


def test_files_without_their_config_are_not_overwritten(directory: CellDir, cell: plan.Cell) -> None:
    finished(directory)
    (directory.path / schema.CONFIG_FILE).unlink()
    with pytest.raises(RunFileError, match=r"config.json: missing, but there is done.json, metrics.jsonl; .*delete"):
        directory.state(cell.hash)


@pytest.mark.parametrize("name", [schema.METRICS_FILE, schema.EVAL_FILE])
@pytest.mark.parametrize("damage", ["empty", "deleted", "cut", "folder"])
def test_a_finished_cell_has_all_its_lines(directory: CellDir, cell: plan.Cell, name: str, damage: str) -> None:
    finished(directory)
    assert directory.state(cell.hash) == "done"
    path = directory.path / name
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "deleted":
        path.write_bytes(b"" if damage == "empty" else content[:-5])
    with pytest.raises(RunFileError, match=f"{name}: (ends at step|is a folder).*delete the folder"):
        directory.state(cell.hash)


def test_a_finished_cell_has_a_readable_env(directory: CellDir, cell: plan.Cell) -> None:
    finished(directory)
    directory.write_env({"python": "3"})
    assert directory.state(cell.hash) == "done"
    (directory.path / schema.ENV_FILE).write_text('{"python')
    with pytest.raises(RunFileError, match="env.json: not readable"):
        directory.state(cell.hash)


def test_lines_round_trip_to_the_bit(directory: CellDir) -> None:
    import numpy as np

    values = [0.1 + 0.2, 1e-300, math.pi, -0.0, 3]
    for step, value in enumerate(values, start=1):
        directory.append_metrics({"step": step, "loss": value, "nan": math.nan, "array": np.float32(0.1)})
    rows = directory.metrics()
    assert [row["loss"] for row in rows] == values and math.copysign(1, rows[3]["loss"]) == -1
    assert rows[0]["nan"] is None and rows[0]["array"] == float(np.float32(0.1))
    json.loads((directory.path / schema.METRICS_FILE).read_text().splitlines()[0], parse_constant=pytest.fail)


@settings(max_examples=60)
@given(cut=st.integers(0, 200), data=st.data())
def test_a_line_cut_short_anywhere_is_repaired(
    tmp_path_factory: pytest.TempPathFactory, cut: int, data: st.DataObject
) -> None:
    directory = CellDir(tmp_path_factory.mktemp("cell"))
    for step in (1, 2, 3):
        directory.append_metrics({"step": step, "loss": step / 3, "name": "ä"})
    path = directory.path / schema.METRICS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole))])
    again = CellDir(directory.path)
    kept = steps(again)
    assert kept == [1, 2, 3][: len(kept)] and whole[: min(cut, len(whole))].count(b"\n") <= len(kept)
    again.append_metrics({"step": 4, "loss": 1.0})
    assert steps(again) == [*kept, 4]
    lines = path.read_bytes().split(b"\n")
    assert lines[-1] == b"" and all(json.loads(line) for line in lines[:-1])


def test_a_damaged_line_in_the_middle_is_named(directory: CellDir) -> None:
    for step in (1, 2, 3):
        directory.append_metrics({"step": step})
    path = directory.path / schema.METRICS_FILE
    path.write_text(path.read_text().replace('{"step": 2}', '{"step": 2'))
    with pytest.raises(RunFileError, match=r"metrics\.jsonl: line 2"):
        CellDir(directory.path).metrics()
    with pytest.raises(RunFileError, match="line 2"):
        CellDir(directory.path).append_metrics({"step": 4})


def test_steps_only_go_forward(directory: CellDir) -> None:
    directory.append_metrics({"step": 2})
    for row in ({"step": 2}, {"step": 1}):
        with pytest.raises(ValueError, match="does not follow"):
            directory.append_metrics(row)
    for row in ({}, {"step": "3"}, {"step": True}, {"step": 3.0}):
        with pytest.raises(ValueError, match="whole number"):
            directory.append_metrics(row)
    assert steps(directory) == [2]
    directory.append_eval({"step": 0, "eval/x": 1})
    directory.append_eval({"step": 4, "eval/x": 2})
    directory.append_eval({"step": 4, "eval/x": 3})
    assert directory.evals() == [{"step": 0, "eval/x": 1}, {"step": 4, "eval/x": 3}]


def test_rewind(directory: CellDir) -> None:
    for step in range(1, 7):
        directory.append_metrics({"step": step})
        directory.append_eval({"step": step})
        directory.write_rollouts(step, [{"step": step}])
    (directory.rollouts_dir / "policy-000006").mkdir()
    (directory.rollouts_dir / ".step-000007.parquet.x.tmp").touch()
    directory.rewind(4)
    assert steps(directory) == [1, 2, 3, 4] == [row["step"] for row in directory.evals()]
    assert sorted(path.name for path in directory.rollouts_dir.iterdir()) == [
        f"step-{s:06d}.parquet" for s in (1, 2, 3, 4)
    ]
    directory.append_metrics({"step": 5})
    directory.restart()
    assert directory.metrics() == directory.evals() == [] and not list(directory.rollouts_dir.iterdir())


def test_rollouts_of_every_table_kind(directory: CellDir) -> None:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"step": 1, "completion_ids": [1, 2], "old_per_token_logps": None}]
    for step, table in enumerate((rows, pa.Table.from_pylist(rows), pd.DataFrame(rows)), start=1):
        path = directory.write_rollouts(step, table)
        assert path.name == f"step-{step:06d}.parquet"
        assert pq.read_table(path).to_pylist() == rows


def test_checkpoints_take_their_place_whole(directory: CellDir) -> None:
    assert directory.latest_checkpoint() is None
    for step in (5, 100):
        with directory.save_checkpoint(step) as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "state").write_text(str(step))
    with pytest.raises(OSError, match="full"), directory.save_checkpoint(200) as folder:
        (folder / "state").write_text("half")
        raise OSError(errno.ENOSPC, "full")
    found = directory.latest_checkpoint()
    assert found is not None and found[0] == 100
    assert (found[1] / "deep" / "state").read_text() == "100"
    assert [path.name for path in directory.checkpoint_dir.iterdir()] == ["step-000100"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    files.write_json(path, {"a": 1})

    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        files.write_atomic(path, full)
    assert files.read_json(path) == {"a": 1} and [entry.name for entry in tmp_path.iterdir()] == ["file.json"]
    assert path.stat().st_mode & 0o444 == 0o444 & ~files.umask()


def test_a_line_that_does_not_fit_is_repaired(directory: CellDir) -> None:
    """A file size limit cuts a line short as a full disk does: some bytes arrive, then an error."""
    directory.append_metrics({"step": 1})
    path = directory.path / schema.METRICS_FILE
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))
    try:
        with pytest.raises(OSError) as error:
            directory.append_metrics({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.errno == errno.EFBIG and path.stat().st_size == size + 5
    assert steps(directory) == [1]
    directory.append_metrics({"step": 2})
    assert steps(directory) == [1, 2] and path.read_bytes().count(b"\n") == 2


def test_env_keeps_the_sessions_of_a_resumed_cell(directory: CellDir) -> None:
    first = {"started_at": "1", "git": {"sha": "a"}, "command": "x", "packages": {"torch": "2"}}
    directory.write_env(first)
    directory.write_env(first | {"pairing": {}})
    directory.write_env(first | {"started_at": "2", "git": {"sha": "b"}})
    env = directory.read_env()
    assert env is not None and [session["git"]["sha"] for session in env["sessions"]] == ["a", "b"]
    assert env["packages"] == {"torch": "2"}


def test_lock_holds_against_others_and_ends_with_its_process(directory: CellDir) -> None:
    code = textwrap.dedent(
        f"""
        import time
        from ablate.rundir import CellDir
        with CellDir({str(directory.path)!r}).lock():
            print("held", flush=True)
            time.sleep(60)
        """
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(rundir.CellBusy, match="another process"), directory.lock(wait=0.1):
            pass
        os.kill(other.pid, signal.SIGKILL)
        with directory.lock(wait=10):
            pass
    finally:
        other.kill()
        other.wait()


def test_check_writable(tmp_path: Path) -> None:
    files.check_writable(tmp_path / "new" / "deep")
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        files.check_writable(tmp_path / "file" / "below")
