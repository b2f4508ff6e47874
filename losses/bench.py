"""python -m losses.bench: LM head + loss, forward and backward. Correctness gate first, then time and memory.

Every row computes the same number on the same problem, `full` in plain torch without this library.

Gate: the exact loss and gradients come from float64; a row may be at most its budget times as far off as an independent
computation in the problem's dtype is. One row outside, and nothing is reported (exit 1).
Time: rows interleaved, medians over the rounds; `x full` is the median of the ratios within a round, so that a machine
that slows down for a while favours no row.
On CUDA also `x floor`, over the cuBLAS products that no exact method can do without; L2 is cold before each time.
Memory: peak above inputs and gradients; on the CPU the high-water mark of the resident set of a new process, on CUDA
torch's own count.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from losses import bench_cuda
from losses.bench_gate import Gate
from losses.bench_rows import ROWS, TERMS, Entry, Problem, Shape, choose_rows, entries

CLEAR_REFS = Path("/proc/self/clear_refs")
PACKAGES = (
    "torch", "triton", "numpy", "transformers", "trl", "liger-kernel", "unsloth", "unsloth_zoo", "cut-cross-entropy"
)  # fmt: skip
MIB = 2**20
FLOOR = "floor"


# ---------------------------------------------------------------------------------------------------------------- time


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], device: str) -> tuple[float, float]:
    """Wall seconds of `work`, and the processor seconds of all its threads."""
    _synchronize(device)
    wall, processor = time.perf_counter(), time.process_time()
    work()
    _synchronize(device)
    return time.perf_counter() - wall, time.process_time() - processor


def times(chosen: list[Entry], problem: Problem, reps: int, warm_up: int, say: Callable[[str], None]) -> dict[str, Any]:
    """{row: {"wall": [...], "cpu": [...]}} in seconds, one figure a round."""
    device = problem.shape.device
    work: dict[str, Callable[[], Any]] = {str(e): functools.partial(e.step, problem) for e in chosen}
    if device == "cuda":
        work = {FLOOR: bench_cuda.floor(problem)} | work
    out: dict[str, Any] = {name: {"wall": [], "cpu": []} for name in work}
    for i in range(warm_up + reps):
        for name, step in work.items():
            say(f"round {i + 1} of {warm_up + reps}: {name}")
            gc.collect()
            if device == "cuda":
                bench_cuda.cool_down()
            wall, processor = seconds(step, device)
            if i >= warm_up:
                out[name]["wall"].append(wall)
                out[name]["cpu"].append(processor)
    return out


# -------------------------------------------------------------------------------------------------------------- memory


def _status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def peak_extra(work: Callable[[], Any], device: str) -> int | None:
    """Bytes in use at most during `work`, above those before it; None where the system does not tell."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        before = _status("VmRSS")
        CLEAR_REFS.write_text("5")  # resets the high-water mark (man 5 proc)
    except OSError:
        return None
    work()
    return _status("VmHWM") - before


def memory_here(entry: Entry, shape: Shape) -> int | None:
    """Peak of a step above the inputs and the gradients that it leaves behind, in this process."""
    if shape.device == "cpu":
        # Thread pools, libraries and their buffers are there from a small problem on. On CUDA they are there by now,
        # and a peer that compiles itself would do it again for another shape.
        entry.step(Problem.make(dataclasses.replace(shape, tokens=shape.batch * 2, vocab=min(shape.vocab, 512))))
    problem = Problem.make(shape)
    kept: list[Any] = []
    peak = peak_extra(lambda: kept.extend(entry.step(problem)[1:]), shape.device)
    return None if peak is None else peak - sum(x.nbytes for x in kept if x is not None)


def memory(entry: Entry, problem: Problem) -> int | None:
    """`memory_here`, on the CPU in a process of its own: what another row has freed is still resident in this one."""
    if problem.shape.device == "cuda":
        return memory_here(entry, problem.shape)
    job = {"row": entry.row.name, "variant": entry.variant, "shape": dataclasses.asdict(problem.shape)}
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "losses.bench", "--memory-job", json.dumps(job)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"measuring the memory of {entry} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _memory_job(text: str) -> int:
    job = json.loads(text)
    print(json.dumps(memory_here(Entry(ROWS[job["row"]], job["variant"]), Shape(**job["shape"]))))
    return 0


# ---------------------------------------------------------------------------------------------------------- provenance


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.rstrip()


def _version(package: str) -> str | None:
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


def provenance(shape: Shape, command: list[str]) -> dict[str, Any]:
    """Code, versions, machine, command, date. `changed`: files of this package that differ from the commit."""
    status = _git("status", "--porcelain", "--", ".")
    return {
        "commit": os.environ.get("LOSSES_COMMIT") or _git("rev-parse", "HEAD"),  # where the code runs without its .git
        "changed": None if status is None else [line[3:] for line in status.splitlines() if line.endswith(".py")],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m losses.bench", *command]),
        "python": platform.python_version(),
        "packages": {name: v for name in PACKAGES if (v := _version(name))},
        "device": _device_name(shape.device),
        "threads": torch.get_num_threads(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",
        "load_average": list(os.getloadavg()),
    }


# -------------------------------------------------------------------------------------------------------------- report


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarise(
    chosen: list[Entry], measured: dict[str, Any], gates: dict[str, Any], peaks: dict[str, Any]
) -> list[dict]:
    """One dict a row: label, variant, wall and cpu seconds, ratios to `full`, peak extra bytes, errors."""
    base = next((measured[str(e)] for e in chosen if e.row.name == "full"), None)
    floor = measured.get(FLOOR)
    rows = []
    for entry in chosen:
        got = measured[str(entry)]
        row: dict[str, Any] = {"row": entry.row.name, "label": entry.row.label, "variant": entry.variant}
        for kind in ("wall", "cpu"):
            row[kind] = _summary(got[kind]) | {"rounds": got[kind]}
            if base is not None:
                row[f"{kind}_over_full"] = _summary([a / b for a, b in zip(got[kind], base[kind], strict=True)])
        if floor is not None:
            row["wall_over_floor"] = _summary([a / b for a, b in zip(got["wall"], floor["wall"], strict=True)])
        rows.append(row | {"peak_extra_bytes": peaks[str(entry)], "errors": gates[str(entry)]["errors"]})
    return rows


def _gate_lines(gates: dict[str, Any]) -> list[str]:
    lines = []
    for name, gate in gates.items():
        errors = "  ".join(f"{what} {e:.1e} (at most {limit:.1e})" for what, (e, limit) in gate["errors"].items())
        lines.append(f"{'ok ' if gate['ok'] else 'RED'} {name}: {errors}")
    return lines


def markdown(result: dict[str, Any]) -> str:
    """The report for people: one table, then where it comes from."""
    shape, source = Shape(**result["shape"]), result["provenance"]
    gpu = shape.device == "cuda"
    size = f"({shape.batch}, {shape.tokens // shape.batch}, {shape.hidden})"
    columns = [
        "LM head + loss, forward + backward",
        "variant",
        "ms [min, max]" if gpu else "seconds [min, max]",
        "x full",
        "x floor" if gpu else "CPU seconds",
        "with gradients" if gpu else "CPU x full",
    ]
    kept = shape.tokens * shape.hidden + (shape.vocab * shape.hidden if shape.head == "train" else 0)
    kept *= shape.torch_dtype.itemsize
    lines = [
        f"hidden {size}, vocab {shape.vocab}, {shape.dtype}, head {shape.head}, {shape.device}; "
        f"{result['reps']} interleaved rounds, medians",
        "",
        f"| {' | '.join([*columns, 'peak extra', 'error of d hidden'])} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        ratio, cpu_ratio, over_floor = (
            row.get(name, {}).get("median") for name in ("wall_over_full", "cpu_over_full", "wall_over_floor")
        )
        digits, unit = (1, 1000) if gpu else (3, 1)
        peak, wall = row["peak_extra_bytes"], row["wall"]
        cells = [
            row["label"],
            row["variant"],
            "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(*(wall[k] * unit for k in ("median", "min", "max")), d=digits),
            "" if ratio is None else f"{ratio:.2f}",
            (f"{over_floor:.3f}" if over_floor else "") if gpu else f"{row['cpu']['median']:.3f}",
            (f"{(peak + kept) / MIB:,.0f} MiB" if peak is not None else "")
            if gpu
            else ("" if cpu_ratio is None else f"{cpu_ratio:.2f}"),
            "not measured" if peak is None else f"{peak / MIB:,.0f} MiB",
            f"{row['errors']['d_hidden'][0]:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    commit = f"`{source['commit'] or 'unknown'}`" + (
        f" with changes in {source['changed']}" if source["changed"] else ""
    )
    packages = ", ".join(f"{name} {version}" for name, version in source["packages"].items())
    load = ", ".join(f"{x:.1f}" for x in source["load_average"])
    lines += [
        "",
        f"`{source['command']}`",
        "",
        f"Commit {commit}, {source['date']}. {source['device']}, {source['threads']} threads, load average {load}. "
        f"Python {source['python']}, {packages}.",
        "",
        "Correctness gate, against float64:",
        "",
        *(f"    {line}" for line in result["gate"]),
    ]
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------------------------------------- cli


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m losses.bench", description=str(__doc__).split("\n\n")[0])
    add = made.add_argument
    add("--tokens", type=int, default=8192, help="tokens of the batch (%(default)s)")
    add("--batch", type=int, default=1, help="completions that share the tokens (%(default)s)")
    add("--hidden", type=int, default=576, help="width of the hidden states (%(default)s)")
    add("--vocab", type=int, default=49_152, help="rows of the LM head (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--head", choices=("frozen", "train"), default="frozen", help="whether the LM head's weight gets a gradient")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--rows", help=f"comma-separated, or all; of {', '.join(ROWS)} (default: full and this library's own)")
    add("--variant", default="reference", help=f"comma-separated, or all; of {', '.join(TERMS)} (%(default)s)")
    add("--reps", type=int, default=5, help="rounds that count (%(default)s)")
    add("--warm-up", type=int, default=1, help="rounds before those (%(default)s)")
    add("--no-memory", action="store_true", help="time alone")
    add("--json", action="store_true", help="print JSON instead of markdown")
    add("--out", type=Path, help="also write DIR/<problem>.md and .json")
    add("--memory-job", help=argparse.SUPPRESS)
    return made


def _check(options: argparse.Namespace) -> tuple[Shape, list[Entry]]:
    """Raises ValueError naming the option."""
    for name in ("tokens", "batch", "hidden", "vocab", "reps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)} must be at least 1")
    if options.warm_up < 0:
        raise ValueError(f"--warm-up {options.warm_up} is negative")
    if options.tokens % options.batch:
        raise ValueError(f"--tokens {options.tokens} must be a multiple of --batch {options.batch}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device; use --device cpu")
    variants = list(TERMS) if options.variant == "all" else options.variant.split(",")
    for variant in variants:
        if variant not in TERMS:
            raise ValueError(f"--variant {variant}: the benchmark knows {', '.join(TERMS)}")
    chosen = entries(choose_rows(options.rows, options.device), variants)
    if not chosen:
        raise ValueError(f"--rows {options.rows} --variant {options.variant}: no such row computes such a variant")
    shape = Shape(
        options.tokens, options.hidden, options.vocab, options.dtype, options.head, options.batch, options.device
    )
    return shape, chosen


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def run(options: argparse.Namespace, command: list[str]) -> tuple[int, dict[str, Any]]:
    """Gate, time, memory. Exit code 1, and only the gate in the result, where a row is wrong."""
    shape, chosen = _check(options)
    source = provenance(shape, command)
    problem = Problem.make(shape)
    _say("float64")
    gate = Gate(problem)
    gates = {}
    for entry in chosen:
        _say(f"gate: {entry}")
        gates[str(entry)] = gate.check(entry)
    result: dict[str, Any] = {
        "shape": dataclasses.asdict(shape), "provenance": source, "gate": _gate_lines(gates)
    }  # fmt: skip
    del gate
    if not all(g["ok"] for g in gates.values()):
        return 1, result
    measured = times(chosen, problem, options.reps, options.warm_up, _say)
    peaks = {}
    for entry in chosen:
        _say(f"memory: {entry}")
        peaks[str(entry)] = None if options.no_memory else memory(entry, problem)
    _say("")
    result |= {"reps": options.reps, "rows": summarise(chosen, measured, gates, peaks)}
    if FLOOR in measured:
        result["floor"] = _summary(measured[FLOOR]["wall"]) | {"rounds": measured[FLOOR]["wall"]}
    return 0, result


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    made = parser()
    options = made.parse_args(arguments)
    if options.memory_job:
        return _memory_job(options.memory_job)
    try:
        code, result = run(options, arguments)
    except ValueError as error:
        made.error(str(error))
    if code:
        print("correctness gate is red, nothing is reported:", *result["gate"], sep="\n", file=sys.stderr)
        return code
    text, encoded = markdown(result), json.dumps(result, indent=1) + "\n"
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        name = str(Shape(**result["shape"]))
        (options.out / f"{name}.md").write_text(text, encoding="utf-8")
        (options.out / f"{name}.json").write_text(encoded, encoding="utf-8")
    print(encoded if options.json else text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
