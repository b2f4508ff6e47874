"""`python -m ablate replay run=... backends=a,b`: the trainer's gradients of one stored batch through loss backends.

Each variant's loss is taken as the trainer takes it, by `losses.linear_policy_loss` on the policy's hidden states, once
for each backend on the same states, and pulled back to everything that the run trained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import losses
from ablate import replay_terms as terms
from ablate.errors import ConfigError
from ablate.files import write_atomic, write_json
from ablate.replay_request import Request
from losses.backends.resolve import choose

if TYPE_CHECKING:
    from rich.console import Console

    from ablate.replay import Loaded

# Largest difference of two backends' gradients, relative to their norm: what operands of the dtype allow, d hidden
# rounded to it by each, and the model's own backward in it.
LIMIT = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}
SMALL = 1e-3  # of the largest norm of the chosen variants: a smaller gradient is held against that
SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)  # of a float16 loss, the first that overflows nothing
FILES = ("backends.json", "backends.md")


@dataclass
class _Run:
    """A variant through one backend: gradients on the host in the order of the trained parameters, loss, log-probs."""

    gradients: list[Tensor]
    loss: float
    logps: list[Tensor]


def compare(request: Request, *, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Returns what backends.json holds. Raises as `replay.replay`, and ConfigError for a backend that cannot run."""
    from ablate import replay

    x = replay.load(request, progress)
    dtype = getattr(torch, x.cell.config["train"]["dtype"])
    for name in request.backends:
        try:
            choose(name, x.device, dtype)
        except ValueError as error:
            raise ConfigError(f"backends: {error}") from error
    mask = x.batch.completion_mask.bool()
    rows: list[dict[str, Any]] = []
    for variant, params in zip(x.variants, x.params, strict=True):
        progress(f"gradients of {variant.name}")
        runs = _runs(x, variant, params, request.backends)
        rows.append(
            {
                "name": variant.name,
                "params": params,
                "grad_norm": {name: _norm(run.gradients) for name, run in runs.items()},
                "loss": {name: run.loss for name, run in runs.items()},
                "pairs": [_pair(a, b, runs, mask) for a, b in itertools.combinations(request.backends, 2)],
            }
        )
    limit, largest = LIMIT[x.cell.config["train"]["dtype"]], max(max(row["grad_norm"].values()) for row in rows)
    for row in rows:
        for pair in row["pairs"]:
            size = max(row["grad_norm"][pair["backends"][1]], SMALL * largest)
            pair["relative"] = pair["difference"] / size if size > 0 else pair["difference"]
    within = all(pair["relative"] <= limit for row in rows for pair in row["pairs"])
    return {
        **x.origin(), "backends": list(request.backends), "limit": limit, "within": within, "checks": x.checks,
        "variants": rows, "provenance": x.provenance(),
    }  # fmt: skip


def _runs(x: Loaded, variant: losses.Variant, params: dict[str, Any], backends: tuple[str, ...]) -> dict[str, _Run]:
    inputs = terms.loss_inputs(variant, x.cell, x.batch, x.scored, params, float(params["beta"]))
    if not x.scored.off_policy:
        inputs = replace(inputs, old_per_token_logps=None)  # then the ratio is 1, whatever a backend rounds
    trained = [p for p in x.models.policy.parameters() if p.requires_grad]
    runs = {name: _Run([torch.zeros(p.numel()) for p in trained], 0.0, []) for name in backends}
    for rows, part in x.models.parts(x.batch):
        here = _rows(inputs, rows)
        if variant.vocabulary is not None and params["beta"] > 0:
            with x.models.reference() as model, torch.no_grad():
                hidden, weight, bias = x.models.head(model, part)
            here = replace(here, ref_hidden=hidden, ref_lm_head_weight=weight, ref_lm_head_bias=bias)
        head = x.models.head(x.models.policy, part)
        for name, run in runs.items():
            try:
                _add(x, variant, params, here, name, head, trained, run)
            except ValueError as error:
                raise ConfigError(f"{variant.name} through {name}: {error}") from error
    return runs


def _rows(inputs: losses.LossInputs, rows: slice) -> losses.LossInputs:
    """The completions of a micro-batch; what counts the whole batch stays."""
    taken = {name: v[rows] if isinstance(v, Tensor) and v.dim() else v for name, v in vars(inputs).items()}
    return losses.LossInputs(**taken)


def _add(
    x: Loaded, variant: losses.Variant, params: dict[str, Any], inputs: losses.LossInputs, backend: str,
    head: tuple[Tensor, Tensor, Tensor | None], trained: list[Any], run: _Run,
) -> None:  # fmt: skip
    """Adds a micro-batch to `run`."""
    hidden, weight, bias = head
    own = [p for p in (weight, bias) if p is not None and p.requires_grad]
    found: list[Tensor | None] = []
    for scale in SCALES if hidden.dtype == torch.float16 else (1.0,):
        leaf = hidden.detach().requires_grad_(True)
        with x.models.autocast():
            out = losses.linear_policy_loss(
                leaf, weight, inputs, variant, lm_head_bias=bias, **{**x.models.options, "backend": backend}, **params
            )
        d_hidden, *d_own = torch.autograd.grad(out.loss * scale, [leaf, *own])
        found = list(torch.autograd.grad(hidden, trained, d_hidden, retain_graph=True, allow_unused=True))
        if all(bool(torch.isfinite(g).all()) for g in (*d_own, *found) if g is not None):
            break
    for total, p, grad in zip(run.gradients, trained, found, strict=True):
        for g in (grad, next((d for q, d in zip(own, d_own, strict=True) if q is p), None)):
            if g is not None:
                total += g.reshape(-1).float().cpu() / scale
    run.loss += float(out.loss.detach())
    run.logps.append(out.per_token_logps.detach().float().cpu())


def _norm(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))


def _pair(a: str, b: str, runs: dict[str, _Run], mask: Tensor) -> dict[str, Any]:
    difference = _norm([p - q for p, q in zip(runs[a].gradients, runs[b].gradients, strict=True)])
    gaps = (torch.cat(runs[a].logps) - torch.cat(runs[b].logps))[mask.cpu()].abs()
    return {"backends": [a, b], "difference": difference, "log_probs": float(gaps.max()) if len(gaps) else 0.0}


def table(result: dict[str, Any]) -> Any:
    """An `analysis.formats.Table`: a row per variant, a column per pair of backends."""
    import pandas as pd

    from analysis.formats import Table

    pairs = [" - ".join(pair["backends"]) for pair in result["variants"][0]["pairs"]]
    rows, frame = [], []
    for row in result["variants"]:
        norm = row["grad_norm"][result["backends"][-1]]
        gap = max(pair["log_probs"] for pair in row["pairs"])
        relative = [pair["relative"] for pair in row["pairs"]]
        rows.append((row["name"], f"{norm:.4g}", *(f"{x:.1e}" for x in relative), f"{gap:.1e}"))
        frame.append({"variant": row["name"], "gradient": norm, **dict(zip(pairs, relative, strict=True)), "nats": gap})
    off = f", policy of step {result['policy']['step']}" if result["policy"]["off_policy"] else ""
    return Table(
        name="backends",
        title=f"Gradients through backends: {result['cell']}, step {result['step']}{off}, {result['dtype']} on "
        f"{result['device']}",
        headers=("variant", "gradient", *pairs, "log-probs"),
        rows=tuple(rows),
        align="lr" + "r" * len(pairs) + "r",
        frame=pd.DataFrame(frame),
        notes=(
            "gradient: its norm; a pair: the norm of their gradients' difference over that of the second (over "
            f"{SMALL:g} of the largest gradient here where it is smaller), at most {result['limit']:g} in "
            f"{result['dtype']}; log-probs: largest difference of a token's in nats",
        ),
    )


def main(request: Request, console: Console) -> int:
    """Compares, writes backends.json and backends.md, prints the table; exit code 1 where a pair is past the limit."""
    from ablate import replay

    with console.status("reading the run") as status:
        result = compare(request, progress=lambda text: status.update(text))
    folder, shown = replay.folder_of(request, result), table(result)
    write_json(folder / FILES[0], result)
    write_atomic(folder / FILES[1], lambda file: file.write(f"{shown.title}\n\n{shown.markdown()}".encode()))
    console.print(replay.rich_table(shown))
    verdict = "within" if result["within"] else "NOT within"
    for line in (*shown.notes, f"All {verdict} the limit.", f"written to {folder}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if result["within"] else 1
