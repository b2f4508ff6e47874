"""Where a result comes from: code, versions, machine, command. Written into every cell's env.json."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ablate import keys

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "vllm",
    "bitsandbytes",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "omegaconf",
    "wandb",
)
ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTHONHASHSEED",
    "TRITON_INTERPRET",
    "CUBLAS_WORKSPACE_CONFIG",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "HF_HUB_OFFLINE",
)
SAME_NUMBERS = (
    "python",
    "packages.torch",
    "packages.transformers",
    "packages.trl",
    "packages.peft",
    "device",
    "threads",
)


def collect(seeds: Iterable[int] = ()) -> dict[str, Any]:
    """Everything there is to say about this process, as one JSON-ready dict; None where a thing cannot be known."""
    return {
        "git": git(),
        "command": command(),
        "seeds": list(seeds),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": machine(),
        "packages": versions(),
        "cpu": cpu(),
        "threads": threads(),
        "device": device(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


@functools.cache
def git() -> dict[str, Any]:
    """Commit and whether the checkout differs from it, of the code that runs (not of the current folder).

    A copy without its .git is told its commit by the environment variable ABLATE_COMMIT (hexadecimal digits). Whether
    its files are that commit's nobody has looked then: dirty is None.
    """
    told = os.environ.get("ABLATE_COMMIT", "").strip()
    if re.fullmatch(r"[0-9a-f]{7,64}", told):
        return {"sha": told, "dirty": None}
    root = Path(__file__).resolve().parents[1]

    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    top = ask("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:  # installed somewhere below another project's checkout
        return {"sha": None, "dirty": None}
    changed = ask("status", "--porcelain", "--untracked-files=no")
    return {"sha": ask("rev-parse", "HEAD"), "dirty": None if changed is None else bool(changed)}


def machine() -> str:
    """A short digest of the host's name: which cells ran on one machine, without saying on which."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def command() -> str:
    """The command line of this run, as it could be typed."""
    import shlex

    arguments = list(sys.argv)
    if arguments and Path(arguments[0]).name == "__main__.py":
        arguments = ["python", "-m", Path(arguments[0]).parent.name, *arguments[1:]]
    return shlex.join(arguments)


@functools.cache
def versions() -> dict[str, str]:
    """Installed versions of the packages that can change a number."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def cpu() -> dict[str, Any]:
    """Model name, usable cores and memory in bytes."""
    import psutil

    from ablate.resolve import cores

    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return {"name": name, "cores": cores(), "memory_bytes": psutil.virtual_memory().total}


def threads() -> int | None:
    """Threads that torch computes with; None where torch is not loaded."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else None


def device() -> dict[str, Any] | None:
    """The current CUDA device with driver and capability, or the CPU; None where torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if not torch.cuda.is_available():
        return {"type": "cpu"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "count": torch.cuda.device_count(),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Lines 'what: old -> new' for what makes a resumed cell another run: its numbers could not be those of one run."""
    pairs = [(key, keys.select(before, key), keys.select(after, key)) for key in SAME_NUMBERS]
    return [f"{key}: {old} -> {new}" for key, old, new in pairs if old is not None and new is not None and old != new]
