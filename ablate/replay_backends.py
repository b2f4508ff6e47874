"""`python -m ablate replay run=... backends=a,b`: the trainer's gradients of one stored batch through loss backends.

Each variant's loss is taken as the trainer takes it, by `losses.linear_policy_loss` on the policy's hidden states, once
for each backend on the same states, and pulled back to everything that the run trained.

A backend is held to its dtype's limit where its error arises, on the gradients of the loss's own inputs: the hidden
states, and the LM head where it is trained. Whatever it gets wrong in a gradient passes through them. The whole model's
gradient is held to the limit in float32 only: in half precision the model's backward rounds at every layer, and two
d hidden that differ by a last bit are rounded differently all the way down, so that a deep model's gradients differ by
several times what d hidden does, whichever backends they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    from ablate.replay_stored import Batch

# Largest difference of two backends' gradients, relative to their norm: what operands of the dtype allow, and d hidden
# rounded to it by each.
LIMIT = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}
SMALL = 1e-3  # of the largest norm of the chosen variants: a smaller gradient is held against that
SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)  # of a float16 loss, the first that overflows nothing
MODEL = "model"  # the whole model's gradient, beside those of the loss's inputs
FILES = ("backends.json", "backends.md")


@dataclass
class _Run:
    """A variant through one backend, on the host: float32 gradients, loss, log-probs.

    gradients: of MODEL, the trained parameters in order, and of what `linear_policy_loss` takes, by its names: hidden,
    a tensor for each micro-batch; lm_head_weight and lm_head_bias where they are trained.
    """

    gradients: dict[str, list[Tensor]]
    loss: float = 0.0
    logps: list[Tensor] = field(default_factory=list)


def compare(request: Request, *, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Returns what backends.json holds. Raises as `replay.replay`, and ConfigError for a backend that cannot run."""
    from ablate import replay

    x = replay.load(request, progress)
    dtype = x.cell.config["train"]["dtype"]
    for name in request.backends:
        try:
            choose(name, x.device, getattr(torch, dtype))
        except ValueError as error:
            raise ConfigError(f"backends: {error}") from error
    rows: list[dict[str, Any]] = []
    for variant, params in zip(x.variants, x.params, strict=True):
        progress(f"gradients of {variant.name}")
        runs = _runs(x, variant, params, request.backends)
        rows.append(
            {
                "name": variant.name,
                "params": params,
                "grad_norm": {name: {k: _norm(g) for k, g in run.gradients.items()} for name, run in runs.items()},
                "loss": {name: run.loss for name, run in runs.items()},
                "pairs": [_pair(a, b, runs, x.batch) for a, b in itertools.combinations(request.backends, 2)],
            }
        )
    _divide(rows)
    held = [name for name in rows[0]["pairs"][0]["relative"] if dtype == "float32" or name != MODEL]
    for row in rows:
        row["within"] = all(
            math.isfinite(value) and (value <= LIMIT[dtype] or name not in held)
            for pair in row["pairs"]
            for name, value in pair["relative"].items()
        )
    return {
        **x.origin(), "backends": list(request.backends), "limit": LIMIT[dtype], "held": held,
        "within": all(row["within"] for row in rows), "checks": x.checks, "variants": rows,
        "provenance": x.provenance(),
    }  # fmt: skip


def _runs(x: Loaded, variant: losses.Variant, params: dict[str, Any], backends: tuple[str, ...]) -> dict[str, _Run]:
    inputs = terms.loss_inputs(variant, x.cell, x.batch, x.scored, params, float(params["beta"]))
    if not x.scored.off_policy:
        inputs = replace(inputs, old_per_token_logps=None)  # then the ratio is 1, whatever a backend rounds
    trained = [p for p in x.models.policy.parameters() if p.requires_grad]
    runs = {name: _Run({MODEL: [torch.zeros(p.shape) for p in trained], "hidden": []}) for name in backends}
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
    of_head = (("lm_head_weight", weight), ("lm_head_bias", bias))
    own = {name: tensor for name, tensor in of_head if tensor is not None and tensor.requires_grad}
    for scale in SCALES if x.cell.config["train"]["dtype"] == "float16" else (1.0,):
        leaf = hidden.detach().requires_grad_(True)
        with x.models.autocast():
            out = losses.linear_policy_loss(
                leaf, weight, inputs, variant, lm_head_bias=bias, **{**x.models.options, "backend": backend}, **params
            )
        of_inputs = torch.autograd.grad(out.loss * scale, [leaf, *own.values()])
        of_model = torch.autograd.grad(
            [hidden, *own.values()], trained, of_inputs, retain_graph=True, materialize_grads=True
        )
        if all(bool(torch.isfinite(g).all()) for g in (*of_inputs, *of_model)):
            break
    d_hidden, *d_own = (g.float().cpu() / scale for g in of_inputs)
    run.gradients["hidden"].append(d_hidden)
    for name, d in zip(own, d_own, strict=True):
        run.gradients.setdefault(name, [torch.zeros(d.shape)])[0] += d
    for total, g in zip(run.gradients[MODEL], of_model, strict=True):
        total += g.float().cpu() / scale
    run.loss += float(out.loss.detach())
    run.logps.append(out.per_token_logps.detach().float().cpu())


def _norm(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))


def _pair(a: str, b: str, runs: dict[str, _Run], batch: Batch) -> dict[str, Any]:
    """Two backends' differences, not yet relative: `_divide` needs every variant."""
    first, second = runs[a].gradients, runs[b].gradients
    difference = {name: _norm([p - q for p, q in zip(first[name], second[name], strict=True)]) for name in first}
    mask = batch.completion_mask.bool().cpu()
    gaps = (torch.cat(runs[a].logps) - torch.cat(runs[b].logps))[mask].abs()
    return {"backends": [a, b], "relative": difference, "log_probs": float(gaps.max()) if len(gaps) else 0.0}


def _divide(rows: list[dict[str, Any]]) -> None:
    """Makes the pairs' differences relative, in place: over the second's norm, or SMALL of the largest."""
    for name in rows[0]["pairs"][0]["relative"]:
        least = SMALL * max(norms[name] for row in rows for norms in row["grad_norm"].values())
        for row in rows:
            for pair in row["pairs"]:
                pair["relative"][name] /= max(row["grad_norm"][pair["backends"][1]][name], least) or 1.0


def table(result: dict[str, Any]) -> Any:
    """An `analysis.formats.Table`: a row per variant, a column per pair of backends."""
    import numpy as np
    import pandas as pd

    from analysis.formats import Table

    pairs = [" - ".join(pair["backends"]) for pair in result["variants"][0]["pairs"]]
    rows, frame = [], []
    for row in result["variants"]:
        norm = row["grad_norm"][result["backends"][-1]][MODEL]
        # numpy's max, since Python's may pass over a NaN
        inputs = [np.max([x for name, x in pair["relative"].items() if name != MODEL]) for pair in row["pairs"]]
        model = np.max([pair["relative"][MODEL] for pair in row["pairs"]])
        gap = np.max([pair["log_probs"] for pair in row["pairs"]])
        rows.append((row["name"], f"{norm:.4g}", *(f"{x:.1e}" for x in (*inputs, model, gap))))
        values = {"gradient": norm, **dict(zip(pairs, inputs, strict=True)), "model": model, "nats": gap}
        frame.append({"variant": row["name"], **values})
    off = f", policy of step {result['policy']['step']}" if result["policy"]["off_policy"] else ""
    return Table(
        name="backends",
        title=f"Gradients through backends: {result['cell']}, step {result['step']}{off}, {result['dtype']} on "
        f"{result['device']}",
        headers=("variant", "gradient", *pairs, "model", "log-probs"),
        rows=tuple(rows),
        align="lr" + "r" * len(pairs) + "rr",
        frame=pd.DataFrame(frame),
        notes=_notes(result),
    )


def _notes(result: dict[str, Any]) -> tuple[str, ...]:
    dtype = result["dtype"]
    inputs = ", ".join(name for name in result["variants"][0]["pairs"][0]["relative"] if name != MODEL)
    held = (
        "held to it too"
        if MODEL in result["held"]
        else f"not held to it: the model's own backward in {dtype} rounds at every layer"
    )
    return (
        f"a pair: the largest difference of their gradients of the loss's inputs ({inputs}), at most "
        f"{result['limit']:g} in {dtype}; gradient: norm of the whole model's; model: its largest difference, {held}",
        "a difference: its norm over that of the pair's second gradient (over "
        f"{SMALL:g} of the largest here where it is smaller); log-probs: largest difference of a token's in nats",
    )


def main(request: Request, console: Console) -> int:
    """Compares, writes backends.json and backends.md, prints the table; exit code 1 where a pair is past the limit
    on a gradient that is held to it (see the module).
    """
    from ablate import replay

    with console.status("reading the run") as status:
        result = compare(request, progress=lambda text: status.update(text))
    folder, shown = replay.folder_of(request, result), table(result)
    write_json(folder / FILES[0], result)
    write_atomic(folder / FILES[1], lambda file: file.write(f"{shown.title}\n\n{shown.markdown()}".encode()))
    console.print(replay.rich_table(shown))
    past = ", ".join(row["name"] for row in result["variants"] if not row["within"])
    verdict = f"NOT within the limit: {past}." if past else "All within the limit."
    for line in (*shown.notes, verdict, f"written to {folder}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if result["within"] else 1
