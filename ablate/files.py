"""Files that a killed process, a power cut or a full disk cannot leave half written: whole files and JSON lines."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from ablate.errors import RunFileError
from ablate.schema import PACKED


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
        os.chmod(temporary, 0o666 & ~umask())
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


def umask() -> int:
    """The permission bits that new files of this process lack."""
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
    except (ValueError, OSError, RecursionError) as error:
        raise RunFileError(f"{path}: not readable ({error}); {way_out(path)}") from error
    if not isinstance(value, dict):
        raise RunFileError(f"{path}: not a JSON object; {way_out(path)}")
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, or of its packed form; a last line that was cut short is left out.

    Raises RunFileError naming the line where another one is damaged.
    """
    packed = path.with_name(path.name + PACKED)
    if path.exists() or not packed.exists():
        return scan(path)[0]
    try:
        return _rows(path, gzip.decompress(packed.read_bytes()))[0]
    except (OSError, EOFError, zlib.error) as error:
        raise RunFileError(f"{packed}: not readable ({error}); {way_out(packed)}") from error


def scan(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Rows of a JSON-lines file and the length in bytes of its whole lines."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except IsADirectoryError as error:
        raise RunFileError(f"{path}: is a folder; {way_out(path)}") from error
    return _rows(path, data)


def _rows(path: Path, data: bytes) -> tuple[list[dict[str, Any]], int]:
    rows: list[dict[str, Any]] = []
    position = 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        last = position + len(line) == len(data)
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not a JSON object")
        except (ValueError, RecursionError) as error:
            if last:  # a write that a crash cut short
                return rows, position
            raise RunFileError(f"{path}: line {number} is damaged ({error}); {way_out(path)}") from error
        rows.append(row)
        position += len(line)
    return rows, position


def ends_line(path: Path, length: int) -> bool:
    """Whether the first `length` bytes of a file end with a newline."""
    with open(path, "rb") as file:
        file.seek(length - 1)
        return file.read(1) == b"\n"


def way_out(path: Path) -> str:
    """What to do about a damaged run file, for messages."""
    return f"restore it, or delete the folder {path.parent} and run the cell again"


def rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace a JSON-lines file by these rows, whole or not at all."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomic(path, lambda file: file.write(text.encode()))


def check_writable(folder: Path) -> None:
    """Make a folder and a file in it, and take the file away. Raises OSError where that cannot be done."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".write-test-{os.getpid()}-{time.monotonic_ns()}"
    write_atomic(probe, lambda file: file.write(b"x" * 4096))
    probe.unlink()
