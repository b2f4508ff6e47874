"""Reading and writing single files: JSON with the place of a fault, and atomic writes."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import re
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ablate.schema import PACKED

MOST_BYTES = 2**30  # that a packed file is unpacked to


class RunFileError(ValueError):
    """A run file that cannot be used; the message starts with `file:line`.

    Attributes: path (Path), line (int, counted from 1, or None where the whole file is meant), reason (str).
    """

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
        self.path, self.line, self.reason = path, line, reason
        super().__init__(f"{path}{f':{line}' if line else ''}: {reason}")


@dataclass(frozen=True)
class Problem:
    """Something the reader of a report must know: an "error" leaves results out, a "warning" does not."""

    severity: Literal["error", "warning"]
    message: str
    path: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        place = f"{self.path}{f':{self.line}' if self.line else ''}: " if self.path else ""
        return f"{self.severity}: {place}{self.message}"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises RunFileError naming file and line where it is cut short or unreadable."""
    try:
        value = _parse(_whole(path))
    except RunFileError:
        raise
    except json.JSONDecodeError as error:
        reason = "the file is cut short" if _ends_early(error) else "not valid JSON"
        raise RunFileError(path, error.lineno, f"{reason} ({error.msg}, column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise RunFileError(path, None, f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise RunFileError(path, None, f"cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:  # an endless number, brackets without end
        raise RunFileError(path, None, f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise RunFileError(path, 1, f"expected a JSON object, found {type(value).__name__}")
    return value


def _whole(path: Path) -> bytes:
    """Content of a regular file, or of what a link to one leads to: a pipe or a device would never end."""
    if path.exists() and not path.is_file():
        raise RunFileError(path, None, "not a regular file")
    return path.read_bytes()


def _parse(text: bytes) -> Any:
    """JSON in UTF-8. Raises ValueError also for what no table or page can show: half a character, endless integers."""
    value = json.loads(text.decode("utf-8"), parse_int=_integer)
    if b"\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _integer(text: str) -> int:
    if len(text) > 300:  # no float holds it
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)


def _ends_early(error: json.JSONDecodeError) -> bool:
    """Whether the text would have been valid JSON had it gone on."""
    rest = error.doc[error.pos :].strip()
    if error.msg.startswith(("Unterminated string", "Invalid \\")):
        return len(rest) < 6 or error.msg.startswith("Unterminated")
    unfinished_word = any(word.startswith(rest) for word in ("true", "false", "null", "NaN", "-Infinity"))
    return unfinished_word or bool(re.fullmatch(r"\.|[eE][+-]?", rest))


def read_bytes(path: Path) -> bytes:
    """Content of a file, or of its compressed form where only that is there. Raises RunFileError where neither is."""
    try:
        if path.exists():
            return _whole(path)
        path = path.with_name(path.name + PACKED)
        with gzip.open(io.BytesIO(_whole(path))) as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise RunFileError(path, None, f"more than {MOST_BYTES >> 20} MiB when unpacked")
        return data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RunFileError(path, None, f"not a whole gzip file ({error})") from error
    except OSError as error:
        raise RunFileError(path, None, f"cannot be read ({error.strerror or error})") from error


def read_jsonl(path: Path, step_key: str) -> tuple[list[dict[str, float]], bool]:
    """Rows of a JSON-lines file of numbers (null reads as NaN), and whether a torn last line was dropped.

    A last line without its newline that does not parse is what a killed writer leaves: it is dropped. Anything else
    that is no object of numbers, a missing or negative `step_key`, steps that repeat or go back raise RunFileError.
    """
    lines = read_bytes(path).split(b"\n")
    rows: list[dict[str, float]] = []
    last_step, last_line = -1, 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _parse(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return rows, True
            raise RunFileError(path, number, f"not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise RunFileError(path, number, f"expected a JSON object, found {type(row).__name__}")
        for key, value in row.items():
            if value is None:
                row[key] = math.nan
            elif isinstance(value, bool) or not isinstance(value, int | float):
                raise RunFileError(path, number, f"{key!r} should be a number, found {value!r}")
            elif abs(value) >= 2**63:  # no column of whole numbers holds it
                row[key] = float(value)
        step = row.get(step_key)
        if step is None or not 0 <= step < 2**31 or step != int(step):
            raise RunFileError(path, number, f"{step_key!r} should be a whole number from 0 up, found {step!r}")
        if step <= last_step:
            what = "is there twice" if step == last_step else f"comes after step {last_step}"
            raise RunFileError(path, number, f"step {int(step)} {what} (see line {last_line})")
        last_step, last_line = int(step), number
        rows.append(row)
    return rows, False


def write_atomic(path: Path, data: bytes | str) -> Path:
    """Write a file so that a reader sees the old or the new content, never a part. Returns the path.

    Raises ValueError naming the folder when it cannot be written (read-only, full, a file in the way).
    """
    content = data.encode("utf-8") if isinstance(data, str) else data
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp gives 0600, which would hide a report from its other readers
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        raise ValueError(
            f"cannot write the report file {path}: {error.strerror or error}; "
            "free the folder or give another one (write_report's argument out)"
        ) from error
    return path
