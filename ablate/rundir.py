"""Run directories: what a cell writes, and what can be read from it of where the cell stands.

Whole files are written beside their place, synced and renamed. Lines are appended and synced; a last line that was
cut short is dropped before the next is added. `done.json` is written last, so a cell is finished or it is not. File
names and columns: `ablate.schema`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from ablate import files, schema
from ablate.errors import RunFileError

if TYPE_CHECKING:
    from ablate.plan import Cell

STATES = ("new", "partial", "done", "failed", "changed")
LOG_FILE = "output.log"  # what the cell's process printed
LOCK_FILE = ".lock"


class CellBusy(RuntimeError):
    """Another process is running this cell."""


class CellDir:
    """The files of one cell. Every method leaves the directory in a state that a later `run` can go on from."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._ends: dict[str, tuple[int, int]] = {}  # file name -> (bytes, last step) as this object left it

    def __repr__(self) -> str:
        return f"CellDir({str(self.path)!r})"

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of what a resume needs."""
        return self.path / schema.CHECKPOINT_DIR

    @property
    def rollouts_dir(self) -> Path:
        """Folder of stored rollouts and the policies that drew them."""
        return self.path / schema.ROLLOUTS_DIR

    # whole files

    def write_config(self, cell: Cell) -> None:
        """Write config.json. Raises RunFileError where one of another config is there: nothing is mixed in."""
        known = files.read_json(self.path / schema.CONFIG_FILE)
        if known is not None and known.get("hash") != cell.hash:
            raise RunFileError(
                f"{self.path}: holds a run of another config; {files.way_out(self.path / schema.CONFIG_FILE)}"
            )
        files.write_json(
            self.path / schema.CONFIG_FILE,
            {
                "hash": cell.hash,
                "experiment": cell.config.experiment,
                "cell": {
                    "name": cell.name,
                    "variant": cell.variant,
                    "seed": cell.seed,
                    "point": cell.point,
                    "axes": cell.axes,
                },
                "config": asdict(cell.config),
            },
        )

    def write_env(self, env: Mapping[str, Any]) -> None:
        """Write env.json: provenance, and the hashes that prove the pairing.

        A cell that was resumed has come about in several sessions: `sessions` lists start, commit and command of each.
        """
        before = (self.read_env() or {}).get("sessions", [])
        session = {key: files.plain(env.get(key)) for key in ("started_at", "git", "command")}
        files.write_json(
            self.path / schema.ENV_FILE, {**env, "sessions": [*(s for s in before if s != session), session]}
        )

    def read_config(self) -> dict[str, Any] | None:
        """config.json; None before the first start. Raises RunFileError where it is damaged or was edited."""
        stored = files.read_json(self.path / schema.CONFIG_FILE)
        if stored is None:
            return None
        cell, values = stored.get("cell"), stored.get("config")
        if not isinstance(cell, dict) or not isinstance(values, dict) or "hash" not in stored:
            path = self.path / schema.CONFIG_FILE
            raise RunFileError(f"{path}: keys are missing; {files.way_out(path)}")
        if schema.config_hash(values, cell.get("variant", ""), cell.get("seed", -1)) != stored["hash"]:
            path = self.path / schema.CONFIG_FILE
            raise RunFileError(f"{path}: its hash does not fit its content, it was edited; {files.way_out(path)}")
        return stored

    def read_env(self) -> dict[str, Any] | None:
        """env.json, None where it is not written yet."""
        return files.read_json(self.path / schema.ENV_FILE)

    def read_done(self) -> dict[str, Any] | None:
        """done.json, None while the cell is not finished."""
        return files.read_json(self.path / schema.DONE_FILE)

    def read_failed(self) -> dict[str, Any] | None:
        """failed.json of the last failure, None where there was none."""
        return files.read_json(self.path / schema.FAILED_FILE)

    # lines

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add a step's row to metrics.jsonl, synced. Raises ValueError unless its step follows the last one's."""
        self._append(schema.METRICS_FILE, row, strictly=True)

    def append_eval(self, row: Mapping[str, Any]) -> None:
        """Add an evaluation to eval.jsonl, synced; one of the last step again, after a resume, replaces it."""
        self._append(schema.EVAL_FILE, row, strictly=False)

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl; a line that was cut short is left out."""
        return files.read_lines(self.path / schema.METRICS_FILE)

    def evals(self) -> list[dict[str, Any]]:
        """Rows of eval.jsonl; a line that was cut short is left out."""
        return files.read_lines(self.path / schema.EVAL_FILE)

    def _append(self, name: str, row: Mapping[str, Any], strictly: bool) -> None:
        step = row.get(schema.STEP)
        if isinstance(step, bool) or not isinstance(step, int):
            raise ValueError(f"{name}: a row needs a whole number '{schema.STEP}', not {step!r}")
        path = self.path / name
        self.path.mkdir(parents=True, exist_ok=True)
        size = path.stat().st_size if path.exists() else 0
        length, last = self._ends.get(name, (-1, -1))
        if length != size:  # the first row of this process, or someone else wrote: look at what is there
            rows, length = files.scan(path)
            last = rows[-1].get(schema.STEP, -1) if rows else -1
        if last > step or (last == step and strictly):
            raise ValueError(f"{path}: step {step} does not follow step {last}; rewind({step - 1}) first")
        if last == step:
            files.rewrite(path, files.scan(path)[0][:-1])
            length = path.stat().st_size
        line = (json.dumps(files.plain(row), ensure_ascii=False) + "\n").encode()
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.seek(length)
            file.truncate()  # a last line that was cut short
            if length and not files.ends_line(path, length):
                line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
            self._ends[name] = (file.tell(), step)

    # rollouts and checkpoints

    def write_rollouts(self, step: int, table: Any) -> Path:
        """Write rollouts/step-<step>.parquet, whole or not at all.

        Args:
            table: a pyarrow Table, a pandas DataFrame or a list of dicts, columns `schema.ROLLOUT_COLUMNS`.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        if isinstance(table, list):
            table = pa.Table.from_pylist(table)
        elif not isinstance(table, pa.Table):
            table = pa.Table.from_pandas(table, preserve_index=False)
        path = self.rollouts_dir / f"step-{step:06d}.parquet"
        files.write_atomic(path, lambda file: pq.write_table(table, file))
        return path

    @contextlib.contextmanager
    def save_checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to write a checkpoint into; it takes its place, and older ones go, only once the block is through.

        with directory.save_checkpoint(20) as folder:
            torch.save(state, folder / "state.pt")
        """
        final = self.checkpoint_dir / f"step-{step:06d}"
        self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=self.checkpoint_dir, prefix=".writing-"))
        try:
            yield temporary
            for path in sorted(temporary.rglob("*")):
                if path.is_file():
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
            if final.exists():
                shutil.rmtree(final)
            os.replace(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        files.sync_folder(self.checkpoint_dir)
        for other in self.checkpoint_dir.iterdir():
            if other != final:
                shutil.rmtree(other, ignore_errors=True)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """(step, folder) of the newest whole checkpoint, None where there is none."""
        found = sorted(self.checkpoint_dir.glob("step-*")) if self.checkpoint_dir.is_dir() else []
        return (int(found[-1].name.removeprefix("step-")), found[-1]) if found else None

    def rewind(self, step: int) -> None:
        """Drop metric rows, evaluations and rollouts past `step`, so that a resume from there adds each once."""
        for name in (schema.METRICS_FILE, schema.EVAL_FILE):
            path = self.path / name
            rows, length = files.scan(path)
            kept = [row for row in rows if row.get(schema.STEP, 0) <= step]
            if path.exists() and (len(kept) < len(rows) or path.stat().st_size > length):
                files.rewrite(path, kept)
        if self.rollouts_dir.is_dir():
            for entry in self.rollouts_dir.iterdir():
                number = entry.name.split(".")[0].rpartition("-")[2]
                if number.isdigit() and int(number) > step and entry.is_dir():
                    shutil.rmtree(entry)
                elif number.isdigit() and int(number) > step:
                    entry.unlink()
        for leftover in [*self.path.glob(".*.tmp"), *self.rollouts_dir.glob(".*.tmp")]:
            leftover.unlink()

    def restart(self) -> None:
        """Drop everything that the cell has computed so far; its config stays."""
        self.rewind(-1)
        for name in (schema.METRICS_FILE, schema.EVAL_FILE, schema.ENV_FILE):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.checkpoint_dir, ignore_errors=True)

    # ends

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write done.json, last of all files, and clear an earlier failure."""
        stored = self.read_config()
        if stored is None:
            raise RunFileError(f"{self.path}: finish() before write_config()")
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        files.write_json(self.path / schema.DONE_FILE, {"hash": stored["hash"], **summary, "finished_at": finished})
        (self.path / schema.FAILED_FILE).unlink(missing_ok=True)

    def fail(self, error: BaseException, step: int | None = None) -> dict[str, Any]:
        """Write failed.json and return what it holds. Raises OSError where not even that can be written."""
        report = failure(error, step)
        self.write_failure(report)
        return report

    def write_failure(self, report: Mapping[str, Any]) -> None:
        """Write failed.json of a report made elsewhere, such as by a worker that is gone."""
        stored = files.read_json(self.path / schema.CONFIG_FILE) or {}
        files.write_json(self.path / schema.FAILED_FILE, {"hash": stored.get("hash"), **report})

    def state(self, config_hash: str) -> str:
        """One of STATES for a cell of that hash. Raises RunFileError where a file is damaged or edited."""
        stored = self.read_config()
        if stored is None:
            left = [n for n in (schema.DONE_FILE, schema.METRICS_FILE, schema.ENV_FILE) if (self.path / n).exists()]
            if left:
                path = self.path / schema.CONFIG_FILE
                raise RunFileError(f"{path}: missing, but there is {', '.join(left)}; {files.way_out(path)}")
            return "new"
        done = self.read_done()
        if stored["hash"] != config_hash or (done is not None and done.get("hash") != config_hash):
            return "changed"
        if done is not None:
            self._check_done(done)
            return "done"
        return "failed" if (self.path / schema.FAILED_FILE).exists() else "partial"

    def _check_done(self, done: Mapping[str, Any]) -> None:
        """Raise RunFileError where a finished cell's lines are not all there, or its env.json is damaged."""
        self.read_env()
        for name, rows in ((schema.METRICS_FILE, self.metrics()), (schema.EVAL_FILE, self.evals())):
            last = rows[-1].get(schema.STEP) if rows else 0
            if "steps" in done and last != done["steps"]:
                path = self.path / name
                raise RunFileError(
                    f"{path}: ends at step {last}, but {schema.DONE_FILE} says {done['steps']}; {files.way_out(path)}"
                )

    @contextlib.contextmanager
    def lock(self, wait: float = 10.0) -> Iterator[None]:
        """Hold the cell against other processes; the system frees it when this process ends, however it ends.

        Raises CellBusy where another process holds it for longer than `wait` seconds (one that was killed lets go
        soon).
        """
        self.path.mkdir(parents=True, exist_ok=True)
        guard = FileLock(self.path / LOCK_FILE)
        try:
            guard.acquire(timeout=wait)
        except Timeout as error:
            raise CellBusy(f"{self.path}: another process is running this cell") from error
        try:
            yield
        finally:
            guard.release()


def failure(error: BaseException, step: int | None = None) -> dict[str, Any]:
    """What failed.json holds of an exception: type, message, traceback, step, time."""
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "step": step,
        "failed_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
