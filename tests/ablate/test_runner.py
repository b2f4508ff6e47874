"""The sweep around the cells, with a stand-in for their training: isolation of failures, resume to the bit, workers."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ablate import config, files, launchers, plan, resolve, rundir, runner, status
from ablate.errors import ConfigError
from ablate.launchers import local

HERE = Path(__file__).resolve().parent
FUNCTION = "fakes:run_cell"
PAIR = ("variants=reference,no_detach", "seeds=2", "grid=none")
NAMES = [f"{variant}-seed{seed}" for seed in (0, 1) for variant in ("reference", "no_detach")]


@pytest.fixture(autouse=True)
def fakes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))  # worker processes get this path as well
    monkeypatch.delenv("FAKE_CELLS", raising=False)


@pytest.fixture(autouse=True)
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The report is analysis' own matter; here only that it is asked for."""
    asked: list[Path] = []
    monkeypatch.setattr(runner, "report", lambda folder, console: asked.append(folder) or True)
    return asked


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    return lambda faults: monkeypatch.setenv("FAKE_CELLS", json.dumps(faults))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a sweep that nothing disturbed, run in this process."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.delenv("FAKE_CELLS", raising=False)
        patch.setattr(runner, "report", lambda folder, console: True)
        assert run(out, "jobs=0")[0] == 0
    return cell_files(out)


def run(out: Path, *overrides: str) -> tuple[int, str]:
    text = StringIO()
    chosen = config.load([*PAIR, f"out={out}", *(overrides or ("jobs=2",))], check=False)
    code = runner.run(chosen, console=Console(file=text, width=200), function=FUNCTION)
    return code, text.getvalue()


def cell_files(out: Path) -> dict[str, bytes]:
    """Everything that decides tables, by name."""
    names = ("metrics.jsonl", "eval.jsonl", "config.json")
    files = [path for name in names for path in out.rglob(name)] + list(out.rglob("*.parquet"))
    content = {str(path.relative_to(out)): path.read_bytes() for path in files}
    hashes = {name: json.loads(data)["hash"].encode() for name, data in content.items() if name.endswith("config.json")}
    return content | hashes  # config.json itself names the folder and the number of jobs


def states(out: Path, *overrides: str) -> dict[str, str]:
    chosen = config.load([*PAIR, f"out={out}", *overrides], check=False)
    return {item.cell.name: item.state for item in runner.survey(chosen)}


def test_a_sweep_side_by_side_equals_one_by_one(tmp_path: Path, reports: list[Path], whole: dict[str, bytes]) -> None:
    code, text = run(tmp_path / "two", "jobs=2")
    assert code == 0 and "[4/4]" in text and "4 cells: 4 new" in text
    assert set(states(tmp_path / "two").values()) == {"done"}
    assert run(tmp_path / "one", "jobs=1")[0] == 0
    assert cell_files(tmp_path / "two") == cell_files(tmp_path / "one") == whole
    assert len(cell_files(tmp_path / "two")) == 4 * (3 + 3)
    assert reports == [tmp_path / name / "default" for name in ("two", "one")]
    pids = {json.loads(path.read_text())["pid"] for path in (tmp_path / "two").rglob("env.json")}
    assert len(pids) == 2 and os.getpid() not in pids, "workers stay alive from cell to cell"
    assert not list((tmp_path / "two").rglob("checkpoint"))
    log = tmp_path / "two" / "default" / NAMES[0] / rundir.LOG_FILE
    assert log.read_text() == f"training {NAMES[0]}\n"


def test_finished_cells_are_not_run_again(tmp_path: Path, plant: Callable[..., None], reports: list[Path]) -> None:
    run(tmp_path)
    before = cell_files(tmp_path)
    plant({name: {"at": 1, "kind": "raise"} for name in NAMES})
    code, text = run(tmp_path)
    assert code == 0 and "4 done" in text and cell_files(tmp_path) == before
    assert len(reports) == 2, "the report is written all the same"
    code, text = run(tmp_path, "seeds=3", "jobs=1")
    assert code == 0 and "6 cells: 2 new, 4 done" in text


@pytest.mark.parametrize(
    ("kind", "words", "jobs"),
    [
        ("raise", "reward function 'digits' raised: boom", "jobs=2"),
        ("raise", "reward function 'digits' raised: boom", "jobs=0"),
        ("exit", "SystemExit", "jobs=0"),
        ("full disk", "No space left on device", "jobs=0"),
    ],
)
def test_a_failing_cell_does_not_stop_the_others(
    tmp_path: Path, plant: Callable[..., None], whole: dict[str, bytes], kind: str, words: str, jobs: str
) -> None:
    plant({NAMES[0]: {"at": 6, "kind": kind}})
    code, text = run(tmp_path, jobs)
    assert code == 1 and words in text and "1 of 4 cells failed" in text
    assert states(tmp_path) == {name: "failed" if name == NAMES[0] else "done" for name in NAMES}
    failed = rundir.CellDir(tmp_path / "default" / NAMES[0]).read_failed()
    assert failed is not None
    assert failed["step"] == 6 and "fakes.py" in failed["traceback"] and words in failed["traceback"]

    plant({})
    code, text = run(tmp_path, jobs)
    assert code == 0 and "4 cells: 3 done, 1 failed" in text
    assert cell_files(tmp_path) == whole, "resumed to the bit"
    assert not (tmp_path / "default" / NAMES[0] / "failed.json").exists()


def test_a_killed_worker_runs_its_cell_again(
    tmp_path: Path, plant: Callable[..., None], whole: dict[str, bytes]
) -> None:
    plant({NAMES[1]: {"at": 6, "kind": "kill once"}})
    code, text = run(tmp_path)
    assert code == 0 and f"{NAMES[1]}: its worker was ended by SIGKILL" in text
    assert cell_files(tmp_path) == whole


def test_a_worker_that_dies_each_time_fails_its_cell_alone(tmp_path: Path, plant: Callable[..., None]) -> None:
    plant({NAMES[0]: {"at": 6, "kind": "kill"}})
    code, text = run(tmp_path, "jobs=2", "retries=2")
    assert code == 1 and text.count("it runs again") == 2 and "out of memory" in text
    assert states(tmp_path) == {name: "failed" if name == NAMES[0] else "done" for name in NAMES}
    failed = rundir.CellDir(tmp_path / "default" / NAMES[0]).read_failed()
    assert failed is not None and failed["type"] == "WorkerDied"
    assert f"training {NAMES[0]}" in failed["traceback"], "the last lines that the worker printed"


def test_a_missing_cell_function_fails_cells_not_the_sweep(tmp_path: Path) -> None:
    chosen = config.load([*PAIR, f"out={tmp_path}", "jobs=1"], check=False)
    text = StringIO()
    assert runner.run(chosen, console=Console(file=text, width=200), function="fakes:nothing") == 1
    assert "has no attribute 'nothing'" in text.getvalue() and "4 of 4 cells failed" in text.getvalue()


def test_another_config_is_refused_not_mixed_in(tmp_path: Path) -> None:
    run(tmp_path)
    before = cell_files(tmp_path)
    with pytest.raises(ConfigError) as error:
        run(tmp_path, "train.steps=5", "beta=0.5")
    message = str(error.value)
    assert "train.steps: 80 -> 5" in message and "loss.beta: 0.04 -> 0.5" in message
    assert "4 cells" in message and "out=" in message
    assert cell_files(tmp_path) == before
    assert set(states(tmp_path, "train.steps=5").values()) == {"changed"}


def test_a_damaged_cell_is_refused_up_front(tmp_path: Path) -> None:
    run(tmp_path)
    path = tmp_path / "default" / NAMES[2] / "done.json"
    path.write_text(path.read_text()[:20])
    assert states(tmp_path)[NAMES[2]] == "damaged"
    with pytest.raises(ConfigError, match=r"damaged files, nothing was run:\n.*done\.json"):
        run(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error_up_front(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"out=.*file.*cannot be written"):
        run(tmp_path / "file")


def test_other_versions_do_not_continue_a_half_run_cell(tmp_path: Path, plant: Callable[..., None]) -> None:
    plant({NAMES[0]: {"at": 6, "kind": "raise"}})
    run(tmp_path, "jobs=0")
    directory = rundir.CellDir(tmp_path / "default" / NAMES[0])
    env = directory.read_env() or {}
    files.write_json(directory.path / "env.json", env | {"packages": {"torch": "1.0"}})
    plant({})
    code, text = run(tmp_path, "jobs=0")
    assert code == 0 and "starts anew, since it began with" in text and "packages.torch: 1.0 ->" in text
    assert [row["step"] for row in directory.metrics()] == list(range(1, 13))


def test_a_cell_that_runs_elsewhere_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = plan.cells(config.load([*PAIR, f"out={tmp_path}"], check=False))[0]
    directory = rundir.CellDir(tmp_path / "default" / cell.name)
    events: list[launchers.Event] = []
    with directory.lock():
        other = rundir.CellDir(directory.path)
        monkeypatch.setattr(other, "lock", lambda: rundir.CellDir.lock(other, wait=0.1))
        launchers.execute(cell, other, lambda: launchers.cell_function(FUNCTION), events.append)
    assert [event.kind for event in events] == ["failed"] and events[0].data["type"] == "CellBusy"
    assert not (directory.path / "failed.json").exists() and directory.state(cell.hash) == "new"

    lock = rundir.CellDir.lock
    monkeypatch.setattr(rundir.CellDir, "lock", lambda self: lock(self, wait=0.1))
    with lock(directory):
        code, text = run(tmp_path, "jobs=0")
    assert code == 1 and "another process is running this cell; run the same command again" in text
    assert "Traceback" not in text


def test_a_failure_that_cannot_be_written_is_still_told(
    tmp_path: Path, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: rundir.CellDir, report: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundir.CellDir, "write_failure", full)
    plant({NAMES[0]: {"at": 6, "kind": "raise"}})
    code, text = run(tmp_path, "jobs=0")
    assert code == 1 and "boom (failed.json could not be written: [Errno 28] No space left on device)" in text


def test_status_of_other_work_reaches_its_listener() -> None:
    heard: list[tuple[str, int, int]] = []
    status.report("nobody listens", 1, 2)
    with status.listening(lambda *words: heard.append(words)):
        status.report("warm start", 0, 100)
        status.report("warm start", 1, 100)  # too soon after the last
        status.report("warm start", 100, 100)
    status.report("nobody listens", 2, 2)
    assert heard == [("warm start", 0, 100), ("warm start", 100, 100)]


def test_threads_of_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(*overrides: str) -> set[str]:
        out = tmp_path / "-".join(overrides)
        assert run(out, "jobs=1", "variants=reference", "seeds=1", *overrides)[0] == 0
        return {json.loads(path.read_text())["omp"] for path in out.rglob("env.json")}

    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads() == {"5"} and threads("threads=3") == {"3"}
    assert os.environ["OMP_NUM_THREADS"] == "5"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads("device=cpu") == {"1"}
    assert "OMP_NUM_THREADS" not in os.environ


def test_jobs() -> None:
    def jobs(*overrides: str, cells: int = 24) -> int:
        return resolve.jobs(config.load(["device=cpu", *overrides], check=False), cells)

    assert 1 <= jobs() <= resolve.cores()
    assert jobs(cells=1) == 1 and jobs("model=smollm2") == 1
    assert (jobs("jobs=3"), jobs("jobs=0"), jobs("jobs=30", cells=4)) == (3, 0, 4)


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "SIGKILL: most likely out of memory"), (-11, "SIGSEGV"), (3, "exit code 3"), (None, "None")],
)
def test_how_a_worker_ended_in_words(code: int | None, words: str) -> None:
    assert words in local.death(code)


# the whole run ended from outside, in a process of its own


DRIVER = textwrap.dedent(
    f"""
    import sys
    sys.path[:0] = [{str(HERE)!r}]
    if __name__ == "__main__":
        from ablate import config, runner
        runner.report = lambda folder, console: True
        chosen = config.load([*{PAIR!r}, "out=" + sys.argv[1], *sys.argv[2:]], check=False)
        sys.exit(runner.run(chosen, function={FUNCTION!r}))
    """
)


def start(folder: Path, root: Path, *overrides: str, pause: float = 0.05) -> "subprocess.Popen[str]":
    script = folder / "driver.py"
    script.write_text(DRIVER)
    environment = os.environ | {"PYTHONPATH": str(root), "FAKE_PAUSE": str(pause)}
    return subprocess.Popen(
        [sys.executable, str(script), str(folder / "runs"), *overrides],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A test run started in the background ignores Ctrl-C, and what it starts would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*/*/metrics.jsonl"))


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize("jobs", ["jobs=1", "jobs=2"])
def test_a_sweep_killed_again_and_again_ends_with_the_same_files(
    tmp_path: Path, root: Path, whole: dict[str, bytes], jobs: str
) -> None:
    runs = tmp_path / "runs"
    for goal in (3, 30):
        process = start(tmp_path, root, jobs)
        wait_for(lambda goal=goal: lines(runs) >= goal)
        os.kill(process.pid, signal.SIGKILL)  # the parent alone: its workers must end by themselves
        process.wait()
    final = start(tmp_path, root, jobs, pause=0)
    output = final.communicate(timeout=60)[0]
    assert final.returncode == 0, output
    assert cell_files(runs) == whole
    assert not list(runs.rglob("*.tmp")) and set(states(runs).values()) == {"done"}


def test_workers_end_with_a_killed_parent(tmp_path: Path, root: Path) -> None:
    process = start(tmp_path, root, "jobs=2", pause=0.5)
    wait_for(lambda: lines(tmp_path / "runs") >= 2)
    pids = [json.loads(path.read_text())["pid"] for path in (tmp_path / "runs").rglob("env.json")]
    assert len(pids) == 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    def gone(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_for(lambda: all(gone(pid) for pid in pids), seconds=10)


def test_ctrl_c_leaves_a_sweep_that_goes_on(tmp_path: Path, root: Path, whole: dict[str, bytes]) -> None:
    process = start(tmp_path, root, "jobs=2", pause=0.5)  # slow enough not to end before the signal comes
    wait_for(lambda: lines(tmp_path / "runs") >= 6)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: parent and workers
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 130 and "run the same command again" in output and "Traceback" not in output
    assert not list((tmp_path / "runs").rglob("failed.json"))
    assert run(tmp_path / "runs", "jobs=2")[0] == 0
    assert cell_files(tmp_path / "runs") == whole
