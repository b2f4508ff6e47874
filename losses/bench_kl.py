"""python -m losses.bench_kl: the exact KL over the vocabulary, forward and backward. Correctness gate first, then time.

Every row computes sum_t w_t KL_t from the same hidden states and heads, and is timed in turn with the products alone
(z, z of the reference, d hidden, with a trained head d weight), which no exact method can do without: `x floor` is the
median of the ratios within a round.

Gate: v_t = d KL_t / d hidden_t of sampled tokens against float64; the library's own rows may be twice as far off as
plain torch is on full logits in the problem's dtype, others' ten times. A row outside is shown with its error and
without a time; where it is the library's own, the exit code is 1. A peer that is missing, raises or takes longer than
--limit is a line too. Memory: torch's own count of the peak above what was there before the call, the gradient included
(CUDA only).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import losses
from losses import bench, bench_measure, bench_report
from losses.bench_gate import relative_error
from losses.bench_process import one_by_one
from losses.bench_rows import Shape
from losses.spec import nearest

PROGRAM = "losses.bench_kl"
FLOOR_ROWS = 4096
GATE_ROWS = 64


@dataclass(frozen=True)
class Problem:
    """Two models of one width and vocabulary, logits with a deviation of about 2; w: the share of each token's KL."""

    shape: Shape
    direction: str
    hidden: Tensor  # (B, T, H)
    weight: Tensor  # (V, H)
    ref_hidden: Tensor  # (B, T, H)
    ref_weight: Tensor  # (V, H)
    w: Tensor  # (B, T)

    @classmethod
    def make(cls, shape: Shape, direction: str) -> Problem:
        rng = torch.Generator(shape.device).manual_seed(shape.seed)
        size, dtype = (shape.batch, shape.tokens // shape.batch), shape.torch_dtype

        def normal(*dims: int) -> Tensor:
            return torch.randn(*dims, generator=rng, device=shape.device, dtype=dtype)

        hidden, weight = (
            normal(*size, shape.hidden),
            normal(shape.vocab, shape.hidden).mul_(2 / math.sqrt(shape.hidden)),
        )
        ref_hidden = hidden + normal(*size, shape.hidden).mul_(0.3)
        ref_weight = normal(shape.vocab, shape.hidden).mul_(0.2 / math.sqrt(shape.hidden)).add_(weight)
        w = (torch.rand(size, generator=rng, device=shape.device) + 0.5) / shape.tokens
        return cls(shape, direction, hidden, weight, ref_hidden, ref_weight, w)

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden.detach().requires_grad_(), self.weight.detach().requires_grad_(self.shape.head == "train")


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _divergence(z: Tensor, ref: Tensor, direction: str) -> Tensor:
    own, other = torch.log_softmax(z, -1), torch.log_softmax(ref, -1)
    if direction == "forward":
        own, other = other, own
    return (own.exp() * (own - other)).sum(-1)


def _full(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
    z, ref = _rows(hidden) @ weight.t(), _rows(problem.ref_hidden) @ problem.ref_weight.t()
    return _divergence(z.float(), ref.float(), problem.direction)


def _ours(problem: Problem, hidden: Tensor, weight: Tensor, *, backend: str) -> Tensor:
    return losses.exact_kl(
        hidden, weight, problem.ref_hidden, problem.ref_weight, backend=backend,
        direction="reverse" if problem.direction == "reverse" else "forward",
    )  # fmt: skip


def _value(problem: Problem, hidden: Tensor, weight: Tensor, *, backend: str) -> Tensor:
    with torch.no_grad():
        return _ours(problem, hidden, weight, backend=backend)


def _trl(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    beta = 1.0 if problem.direction == "reverse" else 0.0
    return ChunkedDivergenceFunction.apply(
        _rows(hidden), weight, None, _rows(problem.ref_hidden), problem.ref_weight, None, beta
    )[0]


def _liger(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    divergence = LigerFusedLinearJSD(jsd_beta=1.0 if problem.direction == "reverse" else 0.0)
    return divergence(_rows(hidden), weight, _rows(problem.ref_hidden), problem.ref_weight, None)


def floor(problem: Problem) -> Callable[[], None]:
    """The products alone, by cuBLAS on a GPU, in chunks of FLOOR_ROWS rows."""
    rng = torch.Generator(problem.shape.device).manual_seed(1)
    hidden, ref_hidden, weight = _rows(problem.hidden), _rows(problem.ref_hidden), problem.weight
    rows, like = min(FLOOR_ROWS, len(hidden)), {"device": weight.device, "dtype": weight.dtype}
    slope = torch.randn(rows, len(weight), generator=rng, **like)  # type: ignore[call-overload]
    z, d_hidden = torch.empty_like(slope), torch.empty(rows, hidden.shape[1], **like)  # type: ignore[call-overload]
    d_weight = torch.empty_like(weight) if problem.shape.head == "train" else None

    def products() -> None:
        for h, ref in zip(hidden.split(rows), ref_hidden.split(rows), strict=True):
            torch.mm(h, weight.t(), out=z[: len(h)])
            torch.mm(ref, problem.ref_weight.t(), out=z[: len(h)])
            torch.mm(slope[: len(h)], weight, out=d_hidden[: len(h)])
            if d_weight is not None:
                torch.mm(slope[: len(h)].t(), h, out=d_weight)

    return products


@dataclass(frozen=True)
class Row:
    """`run` gives KL (tokens), or its mean (`mean`), with or without a gradient."""

    name: str
    label: str
    run: Callable[[Problem, Tensor, Tensor], Tensor]
    budget: float = 2.0
    gradient: bool = True
    mean: bool = False
    package: str | None = None
    cuda_only: bool = False

    @property
    def peer(self) -> bool:
        """Whether it is others' code, which may fail without this library being wrong."""
        return self.budget > 2.0

    def step(self, problem: Problem) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Forward and backward: KL or its mean, d hidden, d weight."""
        hidden, weight = problem.leaves()
        kl = self.run(problem, hidden, weight)
        if self.gradient:
            (kl if self.mean else (kl.view_as(problem.w) * problem.w).sum()).backward()
        return kl.detach(), hidden.grad, weight.grad


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row("triton", "ours: triton", functools.partial(_ours, backend="triton"), package="triton", cuda_only=True),
        Row("value", "ours: triton, value alone", functools.partial(_value, backend="triton"), gradient=False,
            package="triton", cuda_only=True),
        Row("chunked", "ours: chunked (torch)", functools.partial(_ours, backend="chunked")),
        Row("full", "full logits (torch)", _full),
        Row("trl", "TRL chunked divergence", _trl, budget=10.0, package="trl"),
        Row("liger", "Liger fused JSD", _liger, budget=10.0, mean=True, package="liger_kernel", cuda_only=True),
    )
}  # fmt: skip


class Gate:
    """Float64 of sampled tokens, and plain torch's error there."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        rng = torch.Generator().manual_seed(problem.shape.seed + 1)
        self.tokens = torch.randperm(problem.shape.tokens, generator=rng)[:GATE_ROWS].to(problem.hidden.device)
        self.kl, self.v = self._by_torch(torch.float64)
        self.allowed = {
            name: relative_error(got, want)
            for name, got, want in zip(("v", "kl"), self._by_torch(problem.shape.torch_dtype)[::-1], (self.v, self.kl),
                                       strict=True)
        }  # fmt: skip

    def _by_torch(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        p = self.problem
        h = _rows(p.hidden)[self.tokens].to(dtype).requires_grad_()
        z = h @ p.weight.to(dtype).t()
        ref = _rows(p.ref_hidden)[self.tokens].to(dtype) @ p.ref_weight.to(dtype).t()
        wide = torch.promote_types(dtype, torch.float32)
        kl = _divergence(z.to(wide), ref.to(wide), p.direction)
        return kl.detach(), torch.autograd.grad(kl.sum(), h)[0]

    def check(self, row: Row) -> dict[str, Any]:
        """{"errors": {"v" and "kl": [error, limit]}, "ok": bool} of one forward and backward."""
        kl, d_hidden, _ = row.step(self.problem)
        rounding, errors = 16 * torch.finfo(torch.float32).eps, {}
        if d_hidden is not None:
            w = self.problem.w.view(-1, 1)[self.tokens].double()
            v = _rows(d_hidden)[self.tokens].double() / (1 / self.problem.shape.tokens if row.mean else w)
            errors["v"] = [relative_error(v, self.v), row.budget * self.allowed["v"] + rounding]
        if not row.mean:
            error = relative_error(kl.reshape(-1)[self.tokens], self.kl)
            errors["kl"] = [error, row.budget * self.allowed["kl"] + rounding]
        return {"errors": errors, "ok": all(e <= limit for e, limit in errors.values())}


@dataclass(frozen=True)
class Job:
    row: Row
    direction: str

    @property
    def name(self) -> str:
        return self.row.name


@dataclass(frozen=True)
class Plan:
    shape: Shape
    reps: int
    warm_up: int
    steps: int


def prepare(plan: Plan) -> Callable[[Job], dict[str, Any]]:
    """The result measures a row; problem and gate of the last direction are kept."""
    kept: dict[str, tuple[Problem, Gate]] = {}

    def measured(job: Job) -> dict[str, Any]:
        if job.direction not in kept:
            kept.clear()
            problem = Problem.make(plan.shape, job.direction)
            kept[job.direction] = (problem, Gate(problem))
        return bench.installed(job.row.package, functools.partial(measure, plan, *kept[job.direction]), job.row)

    return measured


def measure(plan: Plan, problem: Problem, gate: Gate, row: Row) -> dict[str, Any]:
    """Gate, times and memory of one row: what the report shows of it."""
    checked, device = gate.check(row), plan.shape.device
    found: dict[str, Any] = {"errors": checked["errors"]}
    if not checked["ok"]:
        return found | {"failed": "outside its error budget"}
    step = functools.partial(row.step, problem)
    got = bench_measure.rounds(step, floor(problem), device, plan.reps, plan.warm_up, plan.steps)
    return found | {
        "wall": bench_measure.summary(got["wall"]),
        "base": {"name": "floor", "wall": bench_measure.summary(got["base_wall"])},
        "wall_over_floor": bench_measure.over(got["wall"], got["base_wall"]),
        "peak_extra_bytes": bench_measure.peak_extra(step, "cuda") if device == "cuda" else None,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    name = " ".join(filter(None, [row["label"], row.get("version") if row["peer"] else None]))
    errors = [f"{row['errors'][what][0]:.1e}" if what in row.get("errors", {}) else "" for what in ("v", "kl")]
    if "failed" in row:
        return [name, row["direction"], f"failed: {row['failed']}", "", "", "", *errors]
    median, least, most = (1000 * row["wall"][k] for k in ("median", "min", "max"))
    peak = row["peak_extra_bytes"]
    return [
        name, row["direction"], f"{median:.1f} [{least:.1f}, {most:.1f}]", f"{row['wall_over_floor']:.3f}",
        f"{1000 * row['base']['wall']['median']:.1f}",
        "not measured" if peak is None else f"{peak / 2**30:.2f} GiB", *errors,
    ]  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    shape = Shape(**result["shape"])
    size = f"({shape.batch}, {shape.tokens // shape.batch}, {shape.hidden})"
    heads = "both heads frozen" if shape.head == "frozen" else "the policy's head trained"
    times = f", {result['steps']} steps back to back in each" if result["steps"] > 1 else ""
    columns = ["", "direction", "ms [min, max]", "x floor", "floor, ms", "peak extra", "error of d KL / d hidden"]
    limit = f"; {result['limit']:g} s a row at most" if result["limit"] else ""
    return "\n".join([
        f"Exact KL over the vocabulary, forward and backward: hidden {size}, vocab {shape.vocab}, {shape.dtype}, "
        f"{heads}; {result['reps']} rounds{times}, medians{limit}",
        "",
        *bench_report.table([*columns, "error of KL"], [_cells(row) for row in result["rows"]]),
        "",
        *bench_report.waiting_lines(result),
        *bench_report.source_lines(result["provenance"], shape.device),
        "",
        *bench_report.gate_lines(result["rows"], lambda row: f"{row['row']}, {row['direction']}"),
    ]) + "\n"  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=str(__doc__).split("\n\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, default=2048)
    add("--batch", type=int, default=1)
    add("--hidden", type=int, default=576)
    add("--vocab", type=int, default=49_152)
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--head", choices=("frozen", "train"), default="frozen", help="whether the policy's head gets a gradient")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--rows", help=f"comma-separated, of {', '.join(ROWS)} (default: those of this device)")
    add("--directions", default="reverse,forward", help="comma-separated (%(default)s)")
    add("--reps", type=int, default=5, help="rounds that count (%(default)s)")
    add("--warm-up", type=int, default=1, help="rounds before those (%(default)s)")
    add("--steps", type=int, default=1, help="steps back to back that a round times (%(default)s)")
    add("--out", type=Path, help="also write PATH.md and PATH.json, after every row")
    bench.add_supervision(parser)
    options = parser.parse_args(arguments)
    here = [row.name for row in ROWS.values() if options.device == "cuda" or not row.cuda_only]
    names = here if options.rows is None else options.rows.split(",")
    for name in names:
        if name not in ROWS:
            parser.error(f"unknown row {name!r}; {nearest(name, ROWS)}")
        if name not in here:
            parser.error(f"row {name!r} cannot run: it runs on cuda only")
    directions = options.directions.split(",")
    if unknown := set(directions) - {"reverse", "forward"}:
        parser.error(f"--directions {', '.join(sorted(unknown))}: reverse and forward are known")
    if min(options.tokens, options.hidden, options.vocab, options.reps, options.steps) < 1 or (
        options.tokens % options.batch
    ):
        parser.error("--tokens must be a multiple of --batch, and every size at least 1")
    try:
        sites = bench.sites(options, ROWS)
    except ValueError as error:
        parser.error(str(error))
    shape = Shape(
        options.tokens, options.hidden, options.vocab, options.dtype, options.head, options.batch, options.device
    )
    jobs = [Job(ROWS[name], direction) for direction in directions for name in names]
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "shape": dataclasses.asdict(shape), "provenance": bench_report.provenance(PROGRAM, arguments, shape.device),
        "reps": options.reps, "steps": options.steps, "limit": options.limit, "rows": rows,
        "waiting": [f"{job.name} ({job.direction})" for job in jobs],
    }  # fmt: skip
    plan = Plan(shape, options.reps, options.warm_up, options.steps)
    outcomes = one_by_one(functools.partial(prepare, plan), jobs, options.limit, sites)
    for job, outcome in zip(jobs, outcomes, strict=True):
        known = {"row": job.name, "label": job.row.label, "direction": job.direction, "peer": job.row.peer}
        rows.append(known | outcome)
        result["waiting"].pop(0)
        bench.say(f"{job.name}, {job.direction}", outcome)
        if options.out:
            bench_report.write(options.out, result, markdown(result))
    print(markdown(result), end="")
    if own := [row for row in rows if "failed" in row and not row["peer"]]:
        print(f"a row of the library's own failed: {own[0]['label']}", file=sys.stderr)
    return int(bool(own))


if __name__ == "__main__":
    sys.exit(main())
