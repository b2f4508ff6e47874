"""python -m losses.bench: LM head + loss, forward and backward. Correctness gate first, then time and memory.

Every row computes the same number on the same problem, `full` in plain torch without this library.

Gate: the exact loss and gradients come from float64; a row may be at most its budget times as far off as an independent
computation in the problem's dtype. A row outside is shown with its error and without a time; where that is one of the
library's own, or `full`, the exit code is 1. A peer that is missing, raises or takes longer than --limit is a line too.
Time: each row in turn with what it is measured against, on CUDA the cuBLAS products that no exact method can do without
(`x floor`), elsewhere `full`; medians over the rounds, of the ratios within a round. On CUDA L2 is cold before each.
Memory: peak above inputs and gradients; on the CPU the high-water mark of the resident set of a new process, on CUDA
torch's own count.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from losses import bench_cuda, bench_measure, bench_report
from losses.bench_gate import Gate
from losses.bench_process import attempt, one_by_one
from losses.bench_rows import ROWS, TERMS, VARIANTS, Entry, Problem, Shape, choose_rows, entries, missing
from losses.spec import nearest

MIB = 2**20
PROGRAM = "losses.bench"


# -------------------------------------------------------------------------------------------------------------- memory


def memory_here(entry: Entry, shape: Shape) -> int | None:
    """Peak of a step above the inputs and the gradients that it leaves behind, in this process."""
    if shape.device == "cpu":
        # Thread pools, libraries and their buffers are there from a small problem on. On CUDA they are there by now,
        # and a peer that compiles itself would do it again for another shape.
        entry.step(Problem.make(dataclasses.replace(shape, tokens=shape.batch * 2, vocab=min(shape.vocab, 512))))
    problem = Problem.make(shape)
    kept: list[Any] = []
    peak = bench_measure.peak_extra(lambda: kept.extend(entry.step(problem)[1:]), shape.device)
    return None if peak is None else peak - sum(x.nbytes for x in kept if x is not None)


def memory(entry: Entry, shape: Shape) -> int | None:
    """`memory_here`, on the CPU in a process of its own: what another row has freed is still resident in this one."""
    if shape.device == "cuda":
        return memory_here(entry, shape)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(memory_here, entry, shape).result()


# ----------------------------------------------------------------------------------------------------------------- row


@dataclasses.dataclass(frozen=True)
class Plan:
    """How each row is measured. base: `full`, where rows are measured against it; on CUDA it is the products alone."""

    shape: Shape
    reps: int
    warm_up: int
    steps: int
    memory: bool
    base: Entry | None


def prepare(plan: Plan) -> Callable[[Entry], dict[str, Any]]:
    """Makes the problem and the gate's exact values; the result measures a row."""
    problem = Problem.make(plan.shape)
    one = functools.partial(measure, plan, problem, Gate(problem))
    return lambda entry: installed(entry.row.package, one, entry)


def installed(package: str | None, measure: Callable[[Any], dict[str, Any]], row: Any) -> dict[str, Any]:
    """What `measure` gives for a row, beside the version of the package that it needs, or {"failed": why}."""
    if why := missing(package):
        return {"failed": why}
    return {"version": package and bench_report.version(package)} | attempt(measure, row)


def measure(plan: Plan, problem: Problem, gate: Gate, entry: Entry) -> dict[str, Any]:
    """Gate, time, memory of one row: what the report shows of it."""
    checked, device = gate.check(entry), plan.shape.device
    row: dict[str, Any] = {"errors": checked["errors"]}
    if not checked["ok"]:
        return row | {"failed": "outside its error budget"}
    step = functools.partial(entry.step, problem)
    base: Callable[[], Any] | None = None
    against: str | None = None
    if device == "cuda":
        base, against = bench_cuda.floor(problem), "floor"
    elif plan.base is not None:
        base = None if entry == plan.base else functools.partial(plan.base.step, problem)
        against = "full"
    got = bench_measure.rounds(step, base, device, plan.reps, plan.warm_up, plan.steps)
    row |= {kind: bench_measure.summary(got[kind]) for kind in ("wall", "cpu")}
    if against is not None:
        row["base"] = {"name": against, "wall": bench_measure.summary(got["base_wall"])}
        for kind in ("wall", "cpu"):
            row[f"{kind}_over_{against}"] = bench_measure.over(got[kind], got[f"base_{kind}"])
    return row | {"peak_extra_bytes": memory(entry, plan.shape) if plan.memory else None}


# -------------------------------------------------------------------------------------------------------------- report


def _over_full(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """Against `full` in the same rounds; on CUDA both against the products alone."""
    if "wall_over_full" in row:
        return row["wall_over_full"]
    full = next((r for r in rows if r["row"] == "full" and "wall_over_floor" in r), None)
    return None if full is None or "wall_over_floor" not in row else row["wall_over_floor"] / full["wall_over_floor"]


def _cells(row: dict[str, Any], rows: list[dict[str, Any]], gpu: bool, kept: int) -> list[str]:
    name = " ".join(filter(None, [row["label"], row.get("version") if row["peer"] else None]))
    error = f"{row['errors']['d_hidden'][0]:.1e}" if "errors" in row else ""
    if "failed" in row:
        return [name, row["variant"], f"failed: {row['failed']}", *[""] * (5 if gpu else 4), error]
    digits, unit = (1, 1000) if gpu else (3, 1)
    spread = "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(
        *(row["wall"][k] * unit for k in ("median", "min", "max")), d=digits
    )
    over_full, peak = _over_full(row, rows), row["peak_extra_bytes"]
    cells = [name, row["variant"], spread, "" if over_full is None else f"{over_full:.2f}"]
    if gpu:
        cells += [f"{row['wall_over_floor']:.3f}", f"{row['base']['wall']['median'] * unit:.1f}"]
        cells.append("" if peak is None else f"{(peak + kept) / MIB:,.0f} MiB")
    else:
        cells += [f"{row['cpu']['median']:.3f}", f"{row['cpu_over_full']:.2f}" if "cpu_over_full" in row else ""]
    return [*cells, "not measured" if peak is None else f"{peak / MIB:,.0f} MiB", error]


def _spreads(rows: list[dict[str, Any]]) -> list[str]:
    """For a row of several variants: how far the slowest and the fastest are from the first."""
    lines = []
    for name in dict.fromkeys(row["row"] for row in rows):
        against = [(r["variant"], r["wall_over_floor"]) for r in rows if r["row"] == name and "wall_over_floor" in r]
        if len(against) > 1:
            (first, base), *others = against
            ends = [
                f"{v} {100 * (x / base - 1):+.1f} %" for v, x in (max(others, key=_second), min(others, key=_second))
            ]
            lines.append(f"Variants of `{name}` against {first}, both over the products alone: {' to '.join(ends)}.")
    return [*lines, ""] if lines else []


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


def markdown(result: dict[str, Any]) -> str:
    """The report for people: one table, then where it comes from."""
    shape, rows = Shape(**result["shape"]), result["rows"]
    gpu = shape.device == "cuda"
    kept = shape.tokens * shape.hidden + (shape.vocab * shape.hidden if shape.head == "train" else 0)
    columns = ["LM head + loss, forward + backward", "variant"]
    columns += (
        ["ms [min, max]", "x full", "x floor", "floor, ms", "with gradients"]
        if gpu
        else ["seconds [min, max]", "x full", "CPU seconds", "CPU x full"]
    )
    cells = [_cells(row, rows, gpu, kept * shape.torch_dtype.itemsize) for row in rows]
    size = f"({shape.batch}, {shape.tokens // shape.batch}, {shape.hidden})"
    times = f", {result['steps']} steps back to back in each" if result["steps"] > 1 else ""
    limit = f"; {result['limit']:g} s a row at most" if result["limit"] else ""
    return "\n".join([
        f"hidden {size}, vocab {shape.vocab}, {shape.dtype}, head {shape.head}, {shape.device}; "
        f"{result['reps']} rounds{times}, medians{limit}",
        "",
        *bench_report.table([*columns, "peak extra", "error of d hidden"], cells),
        "",
        *bench_report.waiting_lines(result),
        *_spreads(rows),
        *bench_report.source_lines(result["provenance"], shape.device),
        "",
        *bench_report.gate_lines(rows, lambda row: f"{row['row']}[{row['variant']}]"),
    ]) + "\n"  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- cli


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=str(__doc__).split("\n\n")[0])
    add = made.add_argument
    add("--tokens", type=int, default=8192, help="tokens of the batch (%(default)s)")
    add("--batch", type=int, default=1, help="completions that share the tokens (%(default)s)")
    add("--hidden", type=int, default=576, help="width of the hidden states (%(default)s)")
    add("--vocab", type=int, default=49_152, help="rows of the LM head (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--head", choices=("frozen", "train"), default="frozen", help="whether the LM head's weight gets a gradient")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--rows", help=f"comma-separated, or all; of {', '.join(ROWS)} (default: full and this library's own)")
    add("--variant", default="reference", help=f"comma-separated; founding: {', '.join(TERMS)}; all (%(default)s)")
    add("--reps", type=int, default=5, help="rounds that count (%(default)s)")
    add("--warm-up", type=int, default=1, help="rounds before those (%(default)s)")
    add("--steps", type=int, default=1, help="steps back to back that a round times (%(default)s)")
    add("--no-memory", action="store_true", help="time alone")
    add("--json", action="store_true", help="print JSON instead of markdown")
    add("--out", type=Path, help="also write DIR/<problem>.md and .json, after every row")
    add_supervision(made)
    return made


def add_supervision(made: argparse.ArgumentParser) -> None:
    made.add_argument("--limit", type=float, help="seconds of a row, with what it compiles; then it is ended (none)")
    made.add_argument(
        "--site", action="append", default=[], metavar="ROW=FOLDER",
        help="packages that this row imports first, where peers want different versions of one package",
    )  # fmt: skip


def sites(options: argparse.Namespace, rows: dict[str, Any]) -> dict[str, str]:
    """--site as {row: folder}. Raises ValueError naming the option; likewise for --limit."""
    if options.limit is not None and not options.limit > 0:
        raise ValueError(f"--limit {options.limit} must be above 0")
    found = {}
    for text in options.site:
        name, _, folder = text.partition("=")
        if name not in rows:
            raise ValueError(f"--site {text}: unknown row {name!r}; {nearest(name, rows)}")
        if not Path(folder).is_dir():
            raise ValueError(f"--site {text}: there is no such folder")
        found[name] = str(Path(folder).resolve())
    return found


def _check(options: argparse.Namespace) -> tuple[Shape, list[Entry]]:
    """Raises ValueError naming the option."""
    for name in ("tokens", "batch", "hidden", "vocab", "reps", "steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)} must be at least 1")
    if options.warm_up < 0:
        raise ValueError(f"--warm-up {options.warm_up} is negative")
    if options.tokens % options.batch:
        raise ValueError(f"--tokens {options.tokens} must be a multiple of --batch {options.batch}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device; use --device cpu")
    known = {"all": VARIANTS, "founding": tuple(TERMS)}
    variants = list(known.get(options.variant, options.variant.split(",")))
    for variant in variants:
        if variant not in VARIANTS:
            raise ValueError(f"--variant {variant}: {nearest(variant, VARIANTS)}")
    chosen = entries(choose_rows(options.rows, options.device), variants)
    if not chosen:
        raise ValueError(f"--rows {options.rows} --variant {options.variant}: no such row computes such a variant")
    shape = Shape(
        options.tokens, options.hidden, options.vocab, options.dtype, options.head, options.batch, options.device
    )
    return shape, chosen


def say(name: str, outcome: dict[str, Any]) -> None:
    """A finished row on standard error, for whoever watches."""
    if "failed" in outcome:
        what = f"failed: {outcome['failed']}"
    else:
        over = f", {outcome['wall_over_floor']:.3f} x floor" if "wall_over_floor" in outcome else ""
        what = f"{1000 * outcome['wall']['median']:.1f} ms{over}"
    print(f"{name}: {what}", file=sys.stderr, flush=True)


def run(options: argparse.Namespace, command: list[str]) -> tuple[int, dict[str, Any]]:
    """All rows in order, written after each. Exit code 1 where one of the library's own, or `full`, failed."""
    shape, chosen = _check(options)
    own_sites = sites(options, ROWS)
    base = next((entry for entry in chosen if entry.name == "full"), None)
    plan = Plan(shape, options.reps, options.warm_up, options.steps, not options.no_memory, base)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "shape": dataclasses.asdict(shape), "provenance": bench_report.provenance(PROGRAM, command, shape.device),
        "reps": plan.reps, "steps": plan.steps, "limit": options.limit, "rows": rows,
        "waiting": [str(entry) for entry in chosen],
    }  # fmt: skip
    outcomes = one_by_one(functools.partial(prepare, plan), chosen, options.limit, own_sites)
    for entry, outcome in zip(chosen, outcomes, strict=True):
        known = {"row": entry.name, "label": entry.row.label, "variant": entry.variant, "peer": entry.row.peer}
        rows.append(known | outcome)
        result["waiting"].pop(0)
        say(str(entry), outcome)
        if options.out:
            bench_report.write(options.out / str(shape), result, markdown(result))
    return int(any("failed" in row and not row["peer"] for row in rows)), result


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    made = parser()
    options = made.parse_args(arguments)
    try:
        code, result = run(options, arguments)
    except ValueError as error:
        made.error(str(error))
    print(json.dumps(result, indent=1) if options.json else markdown(result), end="\n" if options.json else "")
    if code:
        print("a row of the library's own failed", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
