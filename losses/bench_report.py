"""What `losses.bench` and `losses.bench_kl` write: where figures come from, and files that are whole at any time."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "numpy", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "unsloth_zoo")


def write(path: Path, result: dict[str, Any], text: str) -> None:
    """PATH.json and PATH.md, each replaced as a whole: a run that is cut short leaves the rows it has finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for ending, content in ((".json", json.dumps(result, indent=1) + "\n"), (".md", text)):
        target = path.with_name(path.name + ending)
        partial = path.with_name(f".{target.name}.{os.getpid()}")
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, target)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.rstrip()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {os.cpu_count()} cores" if names else platform.machine()


def provenance(program: str, arguments: list[str], device: str) -> dict[str, Any]:
    """Code, versions, machine, command, date. `changed`: files of this package that differ from the commit."""
    told = os.environ.get("ABLATE_COMMIT", "").strip()  # of a copy without its .git
    told = told if re.fullmatch(r"[0-9a-f]{7,64}", told) else ""
    status = None if told else _git("status", "--porcelain", "--", ".")
    return {
        "commit": told or _git("rev-parse", "HEAD"),
        "changed": None if status is None else [line[3:] for line in status.splitlines() if line.endswith(".py")],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([f"python -m {program}", *arguments]),
        "python": platform.python_version(),
        "packages": {name: v for name in PACKAGES if (v := version(name))},
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",
        "load_average": list(os.getloadavg()),
    }


def source_lines(source: dict[str, Any], device: str) -> list[str]:
    """The command, and a paragraph of where it ran."""
    commit = f"`{source['commit'] or 'unknown'}`"
    if source["changed"]:
        commit += f" with changes in {source['changed']}"
    packages = ", ".join(f"{name} {number}" for name, number in source["packages"].items())
    load = ", ".join(f"{x:.1f}" for x in source["load_average"])
    where = source["device"] if device == "cuda" else f"{source['device']}, {source['threads']} threads"
    return [
        f"`{source['command']}`",
        "",
        f"Commit {commit}, {source['date']}. {where}, load average {load}. Python {source['python']}, {packages}.",
    ]


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def waiting_lines(result: dict[str, Any]) -> list[str]:
    """The rows that have not run, and a blank line; nothing once all have."""
    return [f"Not run yet: {', '.join(result['waiting'])}.", ""] if result["waiting"] else []


def gate_lines(rows: list[dict[str, Any]], name: Callable[[dict[str, Any]], str]) -> list[str]:
    """Errors of the rows that were checked, each beside what it may be."""
    lines = ["Correctness gate, against float64:", ""]
    for row in (row for row in rows if "errors" in row):
        errors = [f"{what} {error:.1e} (at most {limit:.1e})" for what, (error, limit) in row["errors"].items()]
        lines.append(f"    {'RED' if 'failed' in row else 'ok '} {name(row)}: {'  '.join(errors)}")
    return lines
