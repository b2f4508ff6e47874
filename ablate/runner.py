"""One sweep from config to table: plan, skip what is finished, run the rest, report. Failures stay in their cell."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ablate import config as configs
from ablate import files, plan, resolve, rundir, schema, tracking
from ablate.config import Config
from ablate.errors import ConfigError, RunFileError
from ablate.launchers import CELL_FUNCTION, Launcher
from ablate.launchers.local import InProcess, LocalLauncher
from ablate.plan import Cell
from ablate.progress import Board

OK, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130  # exit codes
TRACEBACK_LINES = 12  # of a failure, in the terminal; failed.json has all of it


@dataclass(frozen=True)
class Planned:
    """A cell and its state on disk, one of rundir.STATES or 'damaged'; `problem` says why it is refused."""

    cell: Cell
    state: str
    problem: str = ""


def experiment_folder(config: Config) -> Path:
    """Where the run directories of an experiment are: <out>/<experiment>."""
    return Path(config.out).expanduser() / config.experiment


def survey(config: Config) -> list[Planned]:
    """All cells of a config with their state on disk. Reads only."""
    folder = experiment_folder(config)
    return [look(cell, folder / cell.name) for cell in plan.cells(config)]


def look(cell: Cell, path: Path) -> Planned:
    """State of one cell; for one of another config, which keys differ."""
    directory = rundir.CellDir(path)
    try:
        state = directory.state(cell.hash)
        if state != "changed":
            return Planned(cell, state)
        stored = directory.read_config() or {}
    except RunFileError as error:
        return Planned(cell, "damaged", str(error))
    lines = configs.differences(stored.get("config", {}), configs.to_dict(cell.config))
    return Planned(cell, state, "; ".join(lines) or f"{path} holds another variant or seed")


def refuse_changed(planned: list[Planned], folder: Path) -> None:
    """Raise ConfigError where a cell's folder holds a run of another config, or damaged files; nothing is mixed in."""
    damaged = [item for item in planned if item.state == "damaged"]
    if damaged:
        lines = "\n".join(f"  {item.problem}" for item in damaged[:5])
        raise ConfigError(f"{len(damaged)} cells have damaged files, nothing was run:\n{lines}")
    reasons = Counter(item.problem for item in planned if item.state == "changed")
    if not reasons:
        return
    lines = "\n".join(f"  {reason}  ({count} cells)" for reason, count in reasons.most_common(5))
    raise ConfigError(
        f"{folder} holds {reasons.total()} of these cells with another config (old -> new), nothing was run:\n{lines}\n"
        f"Say out=ANOTHER_FOLDER to keep both, or delete {folder} to start over."
    )


def plan_table(planned: list[Planned]) -> Table:
    """The grid of cells with their states, for the terminal."""
    table = Table(box=None, pad_edge=False)
    axes = list(planned[0].cell.point) if planned else []
    for heading in ("cell", "variant", "seed", *axes, "state"):
        table.add_column(heading, no_wrap=True)
    for item in planned:
        point = [str(value) for value in item.cell.point.values()]
        table.add_row(item.cell.name, item.cell.variant, str(item.cell.seed), *point, item.state)
    return table


def counts(planned: list[Planned]) -> str:
    """'24 cells: 3 done, 21 new'."""
    states = Counter(item.state for item in planned)
    parts = ", ".join(f"{states[state]} {state}" for state in (*rundir.STATES, "damaged") if states[state])
    return f"{len(planned)} cells: {parts}"


def run(config: Config, *, console: Console | None = None, function: str = CELL_FUNCTION) -> int:
    """Run every cell that is not finished, then write and print the report.

    Args:
        function: 'module:function' that trains one cell, see `ablate.launchers.RunCell`.

    Returns an exit code: 0, 1 where a cell failed, 130 after Ctrl-C. Raises ConfigError where the run is refused before
    anything is computed: cells of another config in the way, a folder that cannot be written.
    """
    console = console or make_console()
    folder = experiment_folder(config)
    planned = survey(config)
    refuse_changed(planned, folder)
    try:
        files.check_writable(folder)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"out={config.out}: {folder} cannot be written ({reason}); say out=ANOTHER_FOLDER") from error

    todo = [item.cell for item in planned if item.state != "done"]
    workers = resolve.jobs(config, len(todo)) if todo else 1
    launcher = make_launcher(config, workers, function) if todo else None
    console.print(f"{config.experiment}: {counts(planned)} in {folder}", highlight=False, soft_wrap=True)
    if todo:
        console.print(choices(config, workers), highlight=False, soft_wrap=True)
    board = Board(console, len(planned), finished=len(planned) - len(todo))
    try:
        with board.live():
            if launcher:
                launcher.run(todo, folder, board)
    except KeyboardInterrupt:
        console.print("interrupted: run the same command again to go on from the last checkpoints", highlight=False)
        return INTERRUPTED
    reported = report(folder, console)
    if reported:
        try:
            tracking.log_comparison(config, [item.cell for item in planned], folder)
        except Exception as error:  # no network, a full disk: the report is there all the same
            text = f"no comparison in wandb: {type(error).__name__}: {error}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    for name, failure in board.failed.items():
        if failure["type"] == rundir.CellBusy.__name__:
            text = f"\n{name} left out: {failure['message']}; run the same command again when it has ended"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            continue
        tail = "\n".join(failure["traceback"].rstrip().splitlines()[-TRACEBACK_LINES:])
        if failure["message"] not in tail:
            tail += f"\n{failure['type']}: {failure['message']}"
        console.print(f"\n{name} failed ({folder / name / schema.FAILED_FILE})\n{tail}", markup=False, soft_wrap=True)
    if board.failed:
        done = len(planned) - len(board.failed)
        text = (
            f"\n{len(board.failed)} of {len(planned)} cells failed, {done} are done; run the same command to try again"
        )
        console.print(text, highlight=False)
    return FAILED if board.failed or not reported else OK


def make_launcher(config: Config, workers: int, function: str) -> Launcher:
    """The launcher of `jobs=`: worker processes, spread over the CUDA devices, or this process for jobs=0."""
    if workers == 0:
        return InProcess(function)
    return LocalLauncher(workers, resolve.threads(config, workers), config.retries, function, resolve.cards(config))


def choices(config: Config, workers: int) -> str:
    """One line on what `auto` came to; axes of the grid that set one of these are left to their cells."""
    device = resolve.device(config.device)
    rollout = resolve.rollout(config.rollout, config.device)
    backend = resolve.backend(config.loss.backend, config.device)
    threads = resolve.threads(config, workers) or os.environ.get("OMP_NUM_THREADS", "torch's default")
    return (
        f"device {device.name} ({device.why}), rollouts {rollout.name} ({rollout.why}), "
        f"loss backend {backend.name} ({backend.why}), {workers or 1} at a time, threads each: {threads}"
    )


def report(folder: Path, console: Console) -> bool:
    """Write the report of an experiment's folder and print table and sentences; False where that cannot be done."""
    from analysis.render import write_report

    try:
        with console.status("writing the report"):
            written = write_report(folder)
    except Exception as error:  # the runs are safe on disk, and `report` can be asked for again
        console.print(f"no report: {type(error).__name__}: {error}", markup=False, soft_wrap=True)
        return False
    console.print(f"\n{written.text.rstrip()}", markup=False, highlight=False, soft_wrap=True)
    return True


def make_console() -> Console:
    """A console that does not fold tables to 80 columns where output goes to a file."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
