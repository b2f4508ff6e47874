"""Run directories: files that a killed process, a power cut or a full disk cannot leave half written.

Whole files are written beside their place, synced and renamed. Lines are appended and synced; a last line that was
cut short is dropped before the next is added. `done.json` is written last, so a cell is finished or it is not. File
names and columns: `ablate.schema`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from ablate import schema
from ablate.errors import RunFileError

if TYPE_CHECKING:
    from ablate.plan import Cell

STATES = ("new", "partial", "done", "failed", "changed")
LOG_FILE = "output.log"  # what the cell's process printed
LOCK_FILE = ".lock"


class CellBusy(RuntimeError):
    """Another process is running this cell."""


def write_atomic(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a whole file so that a reader finds the old or the new content, never a part; synced before it shows.

    Raises OSError (a full disk, no permission); the old file is then untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """`write_atomic` of a JSON object, indented; numbers of numpy and torch become Python's."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n"
    write_atomic(path, lambda file: file.write(text.encode()))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def plain(value: Any) -> Any:
    """JSON-ready copy: mappings, sequences, numbers with `.item()`; numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, None where there is no file. Raises RunFileError where it is cut short or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        raise RunFileError(f"{path}: not readable ({error}); {_way_out(path)}") from error
    if not isinstance(value, dict):
        raise RunFileError(f"{path}: not a JSON object; {_way_out(path)}")
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that was cut short is left out.

    Raises RunFileError naming the line where another one is damaged.
    """
    rows, _ = _scan(path)
    return rows


def _scan(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Rows of a JSON-lines file and the length in bytes of its whole lines."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    rows: list[dict[str, Any]] = []
    position = 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        last = position + len(line) == len(data)
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
        except ValueError as error:
            if last:  # a write that a crash cut short
                return rows, position
            raise RunFileError(f"{path}: line {number} is damaged ({error}); {_way_out(path)}") from error
        rows.append(row)
        position += len(line)
    return rows, position


def _ends_line(path: Path, length: int) -> bool:
    with open(path, "rb") as file:
        file.seek(length - 1)
        return file.read(1) == b"\n"


def _way_out(path: Path) -> str:
    return f"restore it, or delete the folder {path.parent} and run the cell again"


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
        known = read_json(self.path / schema.CONFIG_FILE)
        if known is not None and known.get("hash") != cell.hash:
            raise RunFileError(
                f"{self.path}: holds a run of another config; {_way_out(self.path / schema.CONFIG_FILE)}"
            )
        write_json(
            self.path / schema.CONFIG_FILE,
            {
                "hash": cell.hash,
                "experiment": cell.config.experiment,
                "cell": {"name": cell.name, "variant": cell.variant, "seed": cell.seed, "point": cell.point},
                "config": asdict(cell.config),
            },
        )

    def write_env(self, env: Mapping[str, Any]) -> None:
        """Write env.json: provenance, and the hashes that prove the pairing.

        A cell that was resumed has come about in several sessions: `sessions` lists start, commit and command of each.
        """
        before = (self.read_env() or {}).get("sessions", [])
        session = {key: plain(env.get(key)) for key in ("started_at", "git", "command")}
        write_json(self.path / schema.ENV_FILE, {**env, "sessions": [*(s for s in before if s != session), session]})

    def read_config(self) -> dict[str, Any] | None:
        """config.json; None before the first start. Raises RunFileError where it is damaged or was edited."""
        from ablate.config import hash_of

        stored = read_json(self.path / schema.CONFIG_FILE)
        if stored is None:
            return None
        cell, values = stored.get("cell"), stored.get("config")
        if not isinstance(cell, dict) or not isinstance(values, dict) or "hash" not in stored:
            path = self.path / schema.CONFIG_FILE
            raise RunFileError(f"{path}: keys are missing; {_way_out(path)}")
        if hash_of(values, cell.get("variant", ""), cell.get("seed", -1)) != stored["hash"]:
            path = self.path / schema.CONFIG_FILE
            raise RunFileError(f"{path}: its hash does not fit its content, it was edited; {_way_out(path)}")
        return stored

    def read_env(self) -> dict[str, Any] | None:
        """env.json, None where it is not written yet."""
        return read_json(self.path / schema.ENV_FILE)

    def read_done(self) -> dict[str, Any] | None:
        """done.json, None while the cell is not finished."""
        return read_json(self.path / schema.DONE_FILE)

    def read_failed(self) -> dict[str, Any] | None:
        """failed.json of the last failure, None where there was none."""
        return read_json(self.path / schema.FAILED_FILE)

    # lines

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add a step's row to metrics.jsonl, synced. Raises ValueError unless its step follows the last one's."""
        self._append(schema.METRICS_FILE, row, strictly=True)

    def append_eval(self, row: Mapping[str, Any]) -> None:
        """Add an evaluation to eval.jsonl, synced; one of the last step again, after a resume, replaces it."""
        self._append(schema.EVAL_FILE, row, strictly=False)

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl; a line that was cut short is left out."""
        return read_lines(self.path / schema.METRICS_FILE)

    def evals(self) -> list[dict[str, Any]]:
        """Rows of eval.jsonl; a line that was cut short is left out."""
        return read_lines(self.path / schema.EVAL_FILE)

    def _append(self, name: str, row: Mapping[str, Any], strictly: bool) -> None:
        step = row.get(schema.STEP)
        if isinstance(step, bool) or not isinstance(step, int):
            raise ValueError(f"{name}: a row needs a whole number '{schema.STEP}', not {step!r}")
        path = self.path / name
        self.path.mkdir(parents=True, exist_ok=True)
        size = path.stat().st_size if path.exists() else 0
        length, last = self._ends.get(name, (-1, -1))
        if length != size:  # the first row of this process, or someone else wrote: look at what is there
            rows, length = _scan(path)
            last = rows[-1].get(schema.STEP, -1) if rows else -1
        if last > step or (last == step and strictly):
            raise ValueError(f"{path}: step {step} does not follow step {last}; rewind({step - 1}) first")
        if last == step:
            _rewrite(path, _scan(path)[0][:-1])
            length = path.stat().st_size
        line = (json.dumps(plain(row), ensure_ascii=False) + "\n").encode()
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.seek(length)
            file.truncate()  # a last line that was cut short
            if length and not _ends_line(path, length):
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
        write_atomic(path, lambda file: pq.write_table(table, file))
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
        sync_folder(self.checkpoint_dir)
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
            rows, length = _scan(path)
            kept = [row for row in rows if row.get(schema.STEP, 0) <= step]
            if path.exists() and (len(kept) < len(rows) or path.stat().st_size > length):
                _rewrite(path, kept)
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
        write_json(self.path / schema.DONE_FILE, {"hash": stored["hash"], **summary, "finished_at": finished})
        (self.path / schema.FAILED_FILE).unlink(missing_ok=True)

    def fail(self, error: BaseException, step: int | None = None) -> dict[str, Any]:
        """Write failed.json and return what it holds. Raises OSError where not even that can be written."""
        report = failure(error, step)
        self.write_failure(report)
        return report

    def write_failure(self, report: Mapping[str, Any]) -> None:
        """Write failed.json of a report made elsewhere, such as by a worker that is gone."""
        stored = read_json(self.path / schema.CONFIG_FILE) or {}
        write_json(self.path / schema.FAILED_FILE, {"hash": stored.get("hash"), **report})

    def state(self, config_hash: str) -> str:
        """One of STATES for a cell of that hash. Raises RunFileError where a file is damaged or edited."""
        stored = self.read_config()
        if stored is None:
            return "new"
        done = self.read_done()
        if stored["hash"] != config_hash or (done is not None and done.get("hash") != config_hash):
            return "changed"
        if done is not None:
            return "done"
        return "failed" if (self.path / schema.FAILED_FILE).exists() else "partial"

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


def _rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomic(path, lambda file: file.write(text.encode()))


def failure(error: BaseException, step: int | None = None) -> dict[str, Any]:
    """What failed.json holds of an exception: type, message, traceback, step, time."""
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "step": step,
        "failed_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def check_writable(folder: Path) -> None:
    """Make a folder and a file in it, and take the file away. Raises OSError where that cannot be done."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".write-test-{os.getpid()}-{time.monotonic_ns()}"
    write_atomic(probe, lambda file: file.write(b"x" * 4096))
    probe.unlink()
