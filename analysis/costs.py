"""What a result cost and what it takes to repeat it: step times and memory, command, versions, hashes, minutes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import pandas as pd

from ablate import schema
from analysis import stats
from analysis.checks import git_sha
from analysis.formats import MISSING, Table, number
from analysis.load import Runs
from analysis.style import PARTS
from analysis.tables import breaks, coordinates, grid, hash_name

PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "vllm", "numpy")
MIB = 2**20


def parts(runs: Runs) -> dict[str, str]:
    """Column -> name of the parts of a step that these runs timed, in the order of a step.

    The exact KL is left out where it is measured every few steps only: medians do not see it.
    """
    timed = {f"time/{name}": name for name in PARTS if f"time/{name}" in runs.metrics}
    if "time/exact_kl" in timed and not runs.metrics["time/exact_kl"].median() > 0:
        del timed["time/exact_kl"]
    return timed


def medians(runs: Runs, columns: Iterable[str]) -> pd.DataFrame:
    """Median of metrics over the `stats.rounds` of all finished seeds; by (variant, point)."""
    columns = list(columns)
    rows = {}
    for point, variant in grid(runs):
        done = runs.done[(runs.done["point"] == point) & (runs.done["variant"] == variant)]
        part = [stats.rounds(runs, cell, columns) for cell in done["cell"]]
        rows[variant, point] = pd.concat(part).median() if part else pd.Series(math.nan, index=columns)
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def timing_table(runs: Runs) -> Table:
    """Where a step's time goes, how busy the GPU was, memory, and seconds of a whole run."""
    timed = parts(runs)
    more: dict[str, tuple[str, Callable[[float], str]]] = {
        schema.GPU_BUSY: ("GPU busy", lambda x: MISSING if math.isnan(x) else f"{100 * x:.0f} %"),
        "tokens_per_second": ("tokens/s", lambda x: number(x, 0)),
        "peak_memory_bytes": ("peak MiB", lambda x: number(x / MIB, 0)),
        "memory/step_bytes": ("card MiB", lambda x: number(x / MIB, 0)),
    }
    optional = (schema.GPU_BUSY, "memory/step_bytes")
    more = {c: shown for c, shown in more.items() if c not in optional or c in runs.metrics}
    found = medians(runs, ["step_time", *timed, *more])
    lasted = runs.done.assign(seconds=(runs.done["ended"] - runs.done["began"]).dt.total_seconds())
    lasting = lasted.groupby(["variant", "point"])["seconds"].mean()
    rows, records = [], []
    for point, variant in grid(runs):
        values = found.loc[[(variant, point)]].iloc[0].to_dict()
        whole = float(lasting.get((variant, point), math.nan))
        times = [number(values[c]) for c in ("step_time", *timed)]
        rest = [show(values[c]) for c, (_, show) in more.items()]
        rows.append((variant, *coordinates(runs, point), *times, *rest, number(whole, 1)))
        records.append({"variant": variant, **runs.points[point], **values, "run_seconds": whole})
    headers = ("variant", *runs.axes, "step", *timed.values(), *(title for title, _ in more.values()), "s/run")
    notes = [
        "seconds of a step and of its parts: medians over steps and seeds without each run's first step (of the "
        "num_iterations steps on a batch of rollouts the mean, without the first batch's); cells that "
        "ran side by side share the machine; s/run: mean over seeds, with loading and evaluations",
    ]
    if "time/logps" in timed:
        notes.append("logps: old and reference log-probs together")
    if schema.GPU_BUSY in more:
        notes.append("GPU busy: share of the step in which the GPU computed")
    peak = "the device's allocator" if _types(runs) == {"cuda"} else "the process"
    notes.append(
        f"peak MiB: most memory of {peak} within a step"
        + (
            "; card MiB: taken on the card at the end of a step, by all processes"
            if "memory/step_bytes" in more
            else ""
        )
    )
    return Table(
        name="timing",
        title="Step time in seconds, memory",
        headers=headers,
        rows=tuple(rows),
        align="l" + "r" * (len(headers) - 1),
        frame=pd.DataFrame(records),
        breaks=breaks([point for point, _ in grid(runs)]) if len(runs.variants) > 1 else (),
        notes=tuple(notes),
    )


def repeat_table(runs: Runs) -> Table:
    """What to repeat the finished runs with: command, commit, versions, device, hashes of model and data, minutes."""
    environments = [runs.environments[cell] for cell in runs.done["cell"]]
    rows = [(what, text) for what, text in _repeat(runs, environments) if text]
    return Table(
        name="repeat",
        title="To repeat",
        headers=("what", "value"),
        rows=tuple(rows),
        align="ll",
        frame=pd.DataFrame(rows, columns=["what", "value"]),
        notes=("of the finished runs; where they differ, each value is given",),
    )


def _repeat(runs: Runs, environments: list[dict[str, Any]]) -> Iterable[tuple[str, str]]:
    sessions = [s for e in environments for s in (e.get("sessions") or [e]) if isinstance(s, dict)]
    yield "command", _each(s.get("command") for s in sessions)
    yield "commit", _each(_commit(e) for e in environments)
    yield "Python", _each(e.get("python") for e in environments)
    yield "packages", _each(_packages(e) for e in environments)
    yield "device", _each(_device(e) for e in environments)
    yield "loss backend, rollouts", _each(_chosen(e) for e in environments)
    yield "model", _each((e.get("model") or {}).get("source") for e in environments)
    yield "model, SHA-256", _each((e.get("model") or {}).get("sha256") for e in environments)
    for key in schema.PAIRING[:2]:
        values = list(dict.fromkeys(runs.done[key].dropna()))
        shown = values if len(values) < 2 else [value[:12] for value in values]
        yield f"{hash_name(key)}, SHA-256", _each(shown)
    wall, gpu = minutes(runs)
    if wall:
        yield "runs, minutes", f"{len(runs.done)} runs, {number(wall, 1)} minutes of wall time"
    if gpu:
        yield "GPU minutes", number(gpu, 1)


def minutes(runs: Runs) -> tuple[float, float]:
    """Minutes of wall time and of GPU time that the finished cells took, loading and evaluations included.

    Time in which cells ran side by side counts once, for GPUs once for each that was in use.
    """
    everything: list[tuple[datetime, datetime]] = []
    cards: dict[str, list[tuple[datetime, datetime]]] = {}
    for cell in runs.done.dropna(subset=["began", "ended"]).itertuples():
        everything.append((cell.began, cell.ended))
        environment = runs.environments[cell.cell]
        if _type(environment) == "cuda":
            visible = (environment.get("environment") or {}).get("CUDA_VISIBLE_DEVICES")
            cards.setdefault(f"{environment.get('machine')} {visible}", []).append((cell.began, cell.ended))
    return _covered(everything) / 60, sum(_covered(spans) for spans in cards.values()) / 60


def _covered(spans: list[tuple[datetime, datetime]]) -> float:
    """Seconds that lie in at least one span."""
    total, end = 0.0, None
    for begin, stop in sorted(spans):
        start = begin if end is None else max(begin, end)
        total += max(0.0, (stop - start).total_seconds())
        end = stop if end is None else max(end, stop)
    return total


def _each(values: Iterable[Any], most: int = 8) -> str:
    """Different values, each once, with semicolons."""
    texts = list(dict.fromkeys(str(value) for value in values if value))
    more = [f"{len(texts) - most} more"] if len(texts) > most else []
    return "; ".join([*texts[:most], *more])


def _type(environment: dict[str, Any]) -> str:
    return str((environment.get("device") or {}).get("type") or "")


def _types(runs: Runs) -> set[str]:
    return {_type(runs.environments[cell]) for cell in runs.done["cell"]}


def _commit(environment: dict[str, Any]) -> str | None:
    sha, git = git_sha(environment), environment.get("git")
    dirty = isinstance(git, dict) and git.get("dirty", False)
    if not sha or dirty is False:
        return sha
    return f"{sha}, with changes that are in no commit" if dirty else f"{sha}, as the copy that ran was told"


def _packages(environment: dict[str, Any]) -> str:
    found = environment.get("packages") or {}
    return ", ".join(f"{name} {found[name]}" for name in PACKAGES if name in found)


def _device(environment: dict[str, Any]) -> str:
    device, cpu = environment.get("device") or {}, environment.get("cpu") or {}
    if device.get("type") == "cuda":
        return f"{device.get('name')}, CUDA {device.get('cuda')}"
    threads = environment.get("threads")
    each = f", {threads} thread{'s' if threads != 1 else ''} a run" if threads else ""
    return (
        f"CPU {cpu['name']}, {cpu.get('cores')} cores{each}" if cpu.get("name") else f"{device.get('type', '')}{each}"
    )


def _chosen(environment: dict[str, Any]) -> str:
    resolved = environment.get("resolved") or {}
    names = [resolved.get("loss_backend"), resolved.get("rollout")]
    return ", ".join(name if isinstance(name, str) else json.dumps(name) for name in names if name)
