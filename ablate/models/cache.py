"""A folder cache for models that take time to make: keyed by content, written atomically, safe between processes."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import platformdirs

log = logging.getLogger(__name__)

MARKER = "complete.json"  # written last: {"files": {name: size}}


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`, or $ABLATE_CACHE, or the user's cache folder (~/.cache/grpo-ablation on Linux)."""
    chosen = (
        cache_dir or os.environ.get("ABLATE_CACHE") or platformdirs.user_cache_dir("grpo-ablation", appauthor=False)
    )
    return Path(chosen).expanduser()


def key_of(*parts: Any) -> str:
    """A short name for content: the first 16 hex digits of the sha256 of JSON-serialisable parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached(name: str, build: Callable[[Path], None], cache_dir: str | Path | None = None) -> Path:
    """The folder called `name` in the cache; made by `build(folder)` where it is missing or damaged.

    Built in a temporary folder beside the final one and renamed once everything is on disk, under a file lock: of two
    processes that ask at once one builds and the other waits; a build cut off half-way leaves nothing under the name.
    Raises ValueError where the cache cannot be written.
    """
    root = cache_root(cache_dir)
    folder = root / name
    if _is_complete(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f"{name}.lock"):
            if _is_complete(folder):
                return folder
            if folder.exists():
                log.warning("%s is incomplete; building it again", folder)
                shutil.rmtree(folder)
            _build(folder, build)
    except OSError as error:
        raise ValueError(
            f"cannot write the model cache {root} ({error}); set ABLATE_CACHE to a folder with room that can be written"
        ) from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        build(partial)
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
        (partial / MARKER).write_text(json.dumps({"files": sizes}, indent=1))
        for path in [*files, partial / MARKER, partial]:
            _sync(path)
        partial.chmod(0o755)
        partial.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / MARKER).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems know no fsync on folders.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
