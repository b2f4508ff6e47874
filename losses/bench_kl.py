"""python -m losses.bench_kl: the exact KL over the vocabulary, forward and backward. Correctness gate first, then time.

Every row computes sum_t w_t KL_t from the same hidden states and heads; `floor` is the products alone (z, z of the
reference, d hidden, with a trained head d weight), which no exact method can do without.

Gate: v_t = d KL_t / d hidden_t of sampled tokens against float64; the library's own rows may be twice as far off as
plain torch is on full logits in the problem's dtype, others' ten times. One row outside, and nothing is reported.
Time: rows interleaved, medians over the rounds; `x floor` is the median of the ratios within a round. Memory: torch's
own count of the peak above what was there before the call, the gradient included (CUDA only).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import losses
from losses import bench
from losses.bench_rows import Shape
from losses.spec import nearest

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


@functools.cache
def _buffers(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator(shape.device).manual_seed(1)
    rows, like = min(FLOOR_ROWS, shape.tokens), {"device": shape.device, "dtype": shape.torch_dtype}
    z = torch.randn(rows, shape.vocab, generator=rng, **like)  # type: ignore[call-overload]
    return z, torch.empty_like(z), torch.empty(rows, shape.hidden, **like)  # type: ignore[call-overload]


def _floor(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
    slope, z, rows = _buffers(problem.shape)
    d_weight = torch.empty_like(weight) if weight.requires_grad else None
    with torch.no_grad():
        for h, ref in zip(_rows(hidden).split(len(z)), _rows(problem.ref_hidden).split(len(z)), strict=True):
            torch.mm(h, weight.t(), out=z[: len(h)])
            torch.mm(ref, problem.ref_weight.t(), out=z[: len(h)])
            torch.mm(slope[: len(h)], weight, out=rows[: len(h)])
            if d_weight is not None:
                torch.mm(slope[: len(h)].t(), h, out=d_weight)
    return z


@dataclass(frozen=True)
class Row:
    """`run` gives KL (tokens), its mean (`mean`), or nothing to compare (`gradient` False and budget None)."""

    name: str
    label: str
    run: Callable[[Problem, Tensor, Tensor], Tensor]
    budget: float | None = 2.0
    gradient: bool = True
    mean: bool = False
    package: str | None = None
    cuda_only: bool = False

    def missing(self, device: str) -> str | None:
        if self.cuda_only and device != "cuda":
            return "it runs on cuda only"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return None

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
        Row("floor", "the products alone", _floor, budget=None, gradient=False),
        Row("full", "full logits (torch)", _full),
        Row("chunked", "ours: chunked (torch)", functools.partial(_ours, backend="chunked")),
        Row("triton", "ours: triton", functools.partial(_ours, backend="triton"), package="triton", cuda_only=True),
        Row("value", "ours: triton, value alone", functools.partial(_value, backend="triton"), gradient=False,
            package="triton", cuda_only=True),
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
            name: _error(got, want)
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
        if row.budget is None:
            return {"errors": {}, "ok": True}
        rounding, errors = 16 * torch.finfo(torch.float32).eps, {}
        if d_hidden is not None:
            w = self.problem.w.view(-1, 1)[self.tokens].double()
            v = _rows(d_hidden)[self.tokens].double() / (1 / self.problem.shape.tokens if row.mean else w)
            errors["v"] = [_error(v, self.v), row.budget * self.allowed["v"] + rounding]
        if not row.mean:
            error = _error(kl.reshape(-1)[self.tokens], self.kl)
            errors["kl"] = [error, row.budget * self.allowed["kl"] + rounding]
        return {"errors": errors, "ok": all(e <= limit for e, limit in errors.values())}


def _error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-300))


def measure(problem: Problem, rows: list[Row], reps: int, warm_up: int) -> dict[str, Any]:
    """Gate, times and memory of the rows for one direction. A peer that cannot run is left out, with its reason."""
    gate, gates, left_out, cuda = Gate(problem), {}, {}, problem.shape.device == "cuda"
    for row in list(rows):
        try:
            gates[row.name] = gate.check(row)
        except Exception as error:
            if row.budget != 10.0:
                raise
            left_out[row.name] = f"{type(error).__name__}: {str(error)[:200]}"
            rows.remove(row)
    del gate
    if not all(g["ok"] for g in gates.values()):
        return {"gates": gates, "ok": False}
    times: dict[str, list[float]] = {row.name: [] for row in rows}
    gc.collect()
    gc.freeze()  # what packages have made stays: a collection need not walk it every time
    for i in range(warm_up + reps):
        gc.collect()
        for row in rows:
            wall, _ = bench.seconds(lambda row=row: row.step(problem), problem.shape.device)  # type: ignore[misc]
            if i >= warm_up:
                times[row.name].append(wall)
    table = []
    for row in rows:
        peak = bench.peak_extra(lambda row=row: row.step(problem), "cuda") if cuda else None  # type: ignore[misc]
        ratios = [a / b for a, b in zip(times[row.name], times["floor"], strict=True)] if "floor" in times else []
        table.append({
            "row": row.name, "label": row.label, "direction": problem.direction, "seconds": times[row.name],
            "median": statistics.median(times[row.name]), "over_floor": statistics.median(ratios) if ratios else None,
            "peak_extra_bytes": peak, "errors": gates[row.name]["errors"],
        })  # fmt: skip
    return {"gates": gates, "ok": True, "rows": table, "left_out": left_out}


def markdown(result: dict[str, Any]) -> str:
    shape, source = Shape(**result["shape"]), result["provenance"]
    size = f"({shape.batch}, {shape.tokens // shape.batch}, {shape.hidden})"
    heads = "both heads frozen" if shape.head == "frozen" else "the policy's head trained"
    lines = [
        f"Exact KL over the vocabulary, forward and backward: hidden {size}, vocab {shape.vocab}, {shape.dtype}, "
        f"{heads}, {source['device']}; {result['reps']} interleaved rounds, medians",
        "",
        "| | direction | ms [min, max] | x floor | peak extra | error of d KL / d hidden | error of KL |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in result["rows"]:
        ms = [1000 * x for x in row["seconds"]]
        peak, over = row["peak_extra_bytes"], row["over_floor"]
        errors = [f"{row['errors'][name][0]:.1e}" if name in row["errors"] else "" for name in ("v", "kl")]
        cells = [
            row["label"], row["direction"], f"{1000 * row['median']:.1f} [{min(ms):.1f}, {max(ms):.1f}]",
            "" if over is None else f"{over:.2f}", "not measured" if peak is None else f"{peak / 2**30:.2f} GiB",
            *errors,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"Left out: {name}, {why}" for name, why in result["left_out"].items())]
    packages = ", ".join(f"{name} {version}" for name, version in source["packages"].items())
    lines += ["", f"`{source['command']}`", ""]
    lines += [f"Commit `{source['commit'] or 'unknown'}`, {source['date']}. Python {source['python']}, {packages}."]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m losses.bench_kl", description=str(__doc__).split("\n\n")[0])
    add = parser.add_argument
    add("--tokens", type=int, default=2048)
    add("--batch", type=int, default=1)
    add("--hidden", type=int, default=576)
    add("--vocab", type=int, default=49_152)
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--head", choices=("frozen", "train"), default="frozen", help="whether the policy's head gets a gradient")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--rows", help=f"comma-separated, of {', '.join(ROWS)} (default: those that run here)")
    add("--directions", default="reverse,forward", help="comma-separated (%(default)s)")
    add("--reps", type=int, default=5, help="rounds that count (%(default)s)")
    add("--warm-up", type=int, default=1, help="rounds before those (%(default)s)")
    add("--out", type=Path, help="also write PATH.md and PATH.json")
    options = parser.parse_args(arguments)
    names = list(ROWS) if options.rows is None else options.rows.split(",")
    for name in names:
        if name not in ROWS:
            parser.error(f"unknown row {name!r}; {nearest(name, ROWS)}")
        if options.rows and (why := ROWS[name].missing(options.device)):
            parser.error(f"row {name!r} cannot run: {why}")
    directions = options.directions.split(",")
    if unknown := set(directions) - {"reverse", "forward"}:
        parser.error(f"--directions {', '.join(sorted(unknown))}: reverse and forward are known")
    if min(options.tokens, options.hidden, options.vocab, options.reps) < 1 or options.tokens % options.batch:
        parser.error("--tokens must be a multiple of --batch, and every size at least 1")
    shape = Shape(
        options.tokens, options.hidden, options.vocab, options.dtype, options.head, options.batch, options.device
    )
    source = bench.provenance(shape, arguments)
    source["command"] = " ".join(["python -m losses.bench_kl", *arguments])
    result: dict[str, Any] = {"shape": dataclasses.asdict(shape), "provenance": source, "reps": options.reps,
                              "rows": [], "left_out": {}, "gates": {}}  # fmt: skip
    for direction in directions:
        chosen = [ROWS[name] for name in names if not ROWS[name].missing(options.device)]
        done = measure(Problem.make(shape, direction), chosen, options.reps, options.warm_up)
        result["gates"][direction] = done["gates"]
        if not done["ok"]:
            print("correctness gate is red, nothing is reported:", json.dumps(done["gates"]), file=sys.stderr)
            return 1
        result["rows"] += done["rows"]
        result["left_out"] |= done["left_out"]
        text = markdown(result)
        if options.out:  # after each direction: a run that is cut short leaves the first
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.with_suffix(".md").write_text(text, encoding="utf-8")
            options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
