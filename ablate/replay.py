"""`python -m ablate replay run=...`: one batch of stored rollouts, and the policy that drew it, through every variant.

The comparison that costs one backward pass a variant instead of a training run: same weights, same tokens, same
rewards, and gradients that differ in the loss alone. With `policy=` of a later step the same rollouts are off-policy.

First the recomputed log-probs are held against what the run stored, so that a wrong model or policy is an error and
not a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import Tensor

import losses
from ablate import lm_head, provenance, resolve, schema, tasks
from ablate import replay_gradients as gradients
from ablate import replay_stored as stored
from ablate import replay_terms as terms
from ablate.check import select
from ablate.errors import ConfigError
from ablate.files import write_json
from ablate.replay_gradients import Models
from ablate.replay_request import Request, parse
from ablate.replay_stored import Batch, Stored
from ablate.replay_terms import Scored, VariantTerms

FORMAT = 1
# Largest difference of a float32 log-prob, and mean one of a bfloat16 or float16 log-prob, in nats.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
# Means over the batch: kl and entropy of metrics.jsonl, relative to their size or to 1e-3 nats.
MEAN_TOLERANCE = {"float32": 0.01, "bfloat16": 0.2, "float16": 0.1}


@dataclass(frozen=True)
class Loaded:
    """What a request asks for, read and verified: one step's rollouts, the models, and every variant's parameters."""

    cell: Stored
    step: int
    policy: int
    variants: list[losses.Variant]
    params: list[dict[str, Any]]
    batch: Batch
    models: Models
    scored: Scored
    entropy: Tensor
    checks: list[dict[str, Any]]

    @property
    def device(self) -> torch.device:
        return self.batch.group_ids.device

    def origin(self) -> dict[str, Any]:
        """What was replayed, as every file of a replay says it."""
        cell = self.cell
        return {
            "format": FORMAT,
            "experiment": cell.directory.path.resolve().parent.name,
            "cell": cell.name,
            "trained_variant": cell.variant,
            "seed": cell.seed,
            "point": cell.point,
            "step": self.step,
            "policy": {
                "step": self.policy, "source": cell.policy_name(self.policy), "off_policy": self.scored.off_policy
            },
            "model": cell.config["model"],
            "device": str(self.device),
            "dtype": cell.config["train"]["dtype"],
            "lora": cell.lora,
            "completions": len(self.batch),
            "groups": len(self.batch.group_ids.unique()),
            "tokens": int(self.batch.completion_mask.sum()),
        }  # fmt: skip

    def provenance(self) -> dict[str, Any]:
        found = provenance.collect([self.cell.seed])
        return {key: found[key] for key in ("git", "command", "packages") if key in found}


def load(request: Request, progress: Callable[[str], None]) -> Loaded:
    """Raises as `replay` does."""
    cell = stored.find(request.run, request.step)
    step = stored.choose_step(cell, request.step)
    policy = stored.choose_policy(cell, request.policy, step)
    variants = select(request.variants, cell.config["variants_all"])
    length = _length(cell)
    params = [terms.parameters(v, cell, request.params, length) for v in variants]
    for name in request.params:
        if not any(name in p for p in params):
            raise ConfigError(f"{name}: none of the chosen variants takes it")
    device = resolve.device(request.device).name

    progress("loading the model")
    start = stored.load_start(cell, device)
    batch = stored.read_batch(cell, step, device, start.tokenizer.pad_token_id)
    models = _models(cell, policy, start, device, request.micro_batch_size or _rows(cell, batch))
    progress("log-probs")
    scored, entropy = _score(cell, step, policy, batch, models, start)
    checks = verify(cell, step, batch, scored, entropy, request.tolerance)
    return Loaded(cell, step, policy, variants, params, batch, models, scored, entropy, checks)


def replay(request: Request, *, progress: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Replays a step and returns what replay.json holds.

    Raises ConfigError naming the argument: no such run, no rollouts, no policy for the step, an unknown variant,
    log-probs that are not the stored ones. RunFileError where a file of the run is damaged.
    """
    x = load(request, progress)
    found = [terms.terms(v, x.cell, x.batch, x.scored, p) for v, p in zip(x.variants, x.params, strict=True)]
    parts = terms.components(found)
    gram = gradients.gram(x.models, x.batch, parts, progress=progress)
    return {
        **x.origin(),
        "parameters": sum(gram.sizes.values()),
        "backward_passes": len(parts.parts),
        "kl": _k3(x.scored, x.batch),
        "entropy": float(x.entropy[x.batch.completion_mask.bool()].mean()),
        "checks": x.checks,
        "training": _training(x.cell, x.step, x.scored, request, found, parts, gram),
        **_results(x.batch, found, parts, gram),
        "provenance": x.provenance(),
    }


def _length(cell: Stored) -> int | None:
    """The run's generation limit in tokens."""
    if cell.config["train"]["max_completion_length"]:
        return int(cell.config["train"]["max_completion_length"])
    try:
        return tasks.get(cell.config["task"], **cell.config["task_options"]).max_completion_length
    except ValueError:  # a task of another version; variants that need the limit then say so
        return None


def _rows(cell: Stored, batch: Batch) -> int:
    return int(cell.config["train"]["micro_batch_size"] or len(batch))


def _models(cell: Stored, policy: int, start: Any, device: str, rows: int) -> Models:
    model: Any
    base: Any
    model, base = stored.build_policy(cell, policy, start)
    dtype = getattr(torch, cell.config["train"]["dtype"])
    kept: dict[str, Any] = {}

    @contextmanager
    def reference() -> Iterator[Any]:
        if cell.lora:
            with model.disable_adapter():
                yield model
            return
        if "model" not in kept:
            kept["model"] = start.build().eval().requires_grad_(False)
            lm_head.attach(kept["model"])
        yield kept["model"]

    def autocast() -> Any:
        return nullcontext() if dtype == torch.float32 else torch.autocast(torch.device(device).type, dtype)

    backend = cell.config["loss"]["backend"]
    options = {
        **lm_head.logit_options(base.config),
        "temperature": float(cell.config["sampling"].get("temperature", 1.0)),
        "backend": backend if backend in ("reference", "chunked") else "auto",
        "precision": cell.config["loss"]["precision"],
    }
    return Models(model, base, reference, options, autocast, rows)


def _score(cell: Stored, step: int, policy: int, batch: Batch, models: Models, start: Any) -> tuple[Scored, Tensor]:
    """Log-probs of all who take part, by one path, so that those of equal weights are equal; and the policy's
    entropy.
    """
    n, entropy = models.log_probs(models.policy, batch)
    with models.reference() as reference:
        p, _ = models.log_probs(reference, batch)
    o = n
    if policy != step:
        o, _ = models.log_probs(stored.build_policy(cell, step, start)[0], batch)
    mask = batch.completion_mask
    for name, x in (("policy", n), ("model", p)):
        if not bool(torch.isfinite(x[mask.bool()]).all()):
            raise ConfigError(f"{name}: its log-probs of the stored rollouts are not finite; the weights are damaged")
    scored = Scored(n, o, p, None, policy != step)
    if cell.config["trl"].get("vllm_importance_sampling_correction", True):
        scored = terms.with_sampling(scored, terms.masked(batch.sampling, mask))
    return scored, entropy


def _k3(scored: Scored, batch: Batch, of: Tensor | None = None) -> float:
    gap = (scored.p - (scored.n if of is None else of)).double()[batch.completion_mask.bool()]
    return float((gap.exp() - gap - 1).mean())


def verify(
    cell: Stored, step: int, batch: Batch, scored: Scored, entropy: Tensor, tolerance: float | None = None
) -> list[dict[str, Any]]:
    """Recomputed against stored: reference and old log-probs; where old ones are not stored, kl and entropy of the
    step.

    Raises ConfigError naming `model` or `policy` where they differ by more than the tolerance.
    """
    dtype = cell.config["train"]["dtype"]
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    mask, found = batch.completion_mask.bool(), []

    def check(name: str, against: str, difference: float, limit: float, blame: str) -> None:
        found.append({"what": name, "against": against, "difference": difference, "tolerance": limit})
        if not difference <= limit:
            raise ConfigError(f"{blame}; the difference is {difference:.3g}, {limit:g} is allowed ({against})")

    exact = dtype == "float32"
    how = f"{'largest' if exact else 'mean'} difference of a token's log-prob in nats"
    for name, now, kept, blame in (
        ("reference", scored.p, batch.ref, f"model: {cell.config['model']} does not give the reference log-probs that "
         f"{cell.name} stored, so it is not the model that this run started from"),
        ("old", scored.o, batch.old, f"policy: {cell.policy_name(step)} does not give the log-probs that {cell.name} "
         f"stored, so it is not the policy that drew the rollouts of step {step}"),
    ):  # fmt: skip
        if kept is not None and bool(mask.any()):
            gaps = (now - kept)[mask].abs()
            check(f"{name} log-probs", how, float(gaps.max() if exact else gaps.mean()), limit, blame)
    row = next((r for r in cell.directory.metrics() if r[schema.STEP] == step), {})
    if batch.old is None:
        blame = (
            f"policy: {cell.policy_name(step)} does not give the {{}} that {cell.name} logged at step {step}, so it is "
            "not the policy that drew its rollouts"
        )
        values = {"kl": _k3(scored, batch, scored.o)}
        if not scored.off_policy:
            values["entropy"] = float(entropy[mask].mean())
        for name, value in values.items():
            if row.get(name) is not None:
                size = max(abs(row[name]), 1e-3)
                allowed = max(MEAN_TOLERANCE[dtype], 0.0 if tolerance is None else tolerance)
                check(
                    name,
                    f"relative to {schema.METRICS_FILE}",
                    abs(value - row[name]) / size,
                    allowed,
                    blame.format(name),
                )
    return found


def _training(
    cell: Stored, step: int, scored: Scored, request: Request, found: list[VariantTerms], parts: terms.Components,
    gram: gradients.Gram,
) -> dict[str, Any] | None:  # fmt: skip
    """The gradient norm that training logged for this step beside the replayed one, where the two are the same
    thing.
    """
    names = [t.variant.name for t in found]
    row = next((r for r in cell.directory.metrics() if r[schema.STEP] == step), {})
    if cell.variant not in names or scored.off_policy or request.params or row.get("grad_norm") is None:
        return None
    at = parts.combinations()[names.index(cell.variant)]
    replayed = float((at @ gram.whole @ at).clamp(min=0).sqrt())
    difference = abs(replayed - row["grad_norm"]) / row["grad_norm"] if row["grad_norm"] > 0 else replayed
    return {"grad_norm": row["grad_norm"], "replayed": replayed, "relative_difference": difference}


def _results(batch: Batch, found: list[VariantTerms], parts: terms.Components, gram: gradients.Gram) -> dict[str, Any]:
    """Norms, cosines and token weights of every variant, from the dot products of the parts."""
    rows = {what: parts.combinations(what) for what in ("total", "surrogate", "kl")}

    def norms(what: str, products: Tensor) -> list[float]:
        return torch.einsum("vi,ij,vj->v", rows[what], products, rows[what]).clamp(min=0).sqrt().tolist()

    whole = gram.whole
    norm, first, second = (norms(what, whole) for what in ("total", "surrogate", "kl"))
    by_group = {group: norms("total", products) for group, products in gram.by_group.items()}
    between = (rows["surrogate"] @ whole @ rows["kl"].T).diagonal().tolist()
    variants = []
    for i, t in enumerate(found):
        both = first[i] + second[i]
        clip = t.metrics.get("clip_ratio/region_mean")
        variants.append(
            {
                "name": t.variant.name,
                "params": t.params,
                "loss": t.loss,
                "grad_norm": norm[i],
                "surrogate_norm": first[i],
                "kl_norm": second[i],
                "surrogate_share": first[i] / both if both > 0 else None,
                "kl_share": second[i] / both if both > 0 else None,
                "cosine_surrogate_kl": _cosine(between[i], first[i] * second[i]),
                "clip_fraction": clip,
                "kl_own": t.metrics.get("kl_own"),
                "exact_kl": t.direction,
                "norm_by_group": {group: values[i] for group, values in by_group.items()},
                "token_weight": terms.token_weights(t, batch),
            }
        )
    layers = [{"name": g, "kind": gradients.kind_of(g), "parameters": n} for g, n in gram.sizes.items()]
    return {
        "position_bins": terms.position_bins(batch),
        "layers": layers,
        "variants": variants,
        "cosine": _cosines(rows["total"] @ whole @ rows["total"].T),
        "cosine_kl": _cosines(rows["kl"] @ whole @ rows["kl"].T),
    }


def _cosines(products: Tensor) -> list[list[float | None]]:
    """From dot products; 1 to the last bit for equal gradients, None where one is 0."""
    values = ((products + products.T) / 2).tolist()
    count = range(len(values))
    return [[_cosine(values[i][j], math.sqrt(max(0.0, values[i][i] * values[j][j]))) for j in count] for i in count]


def _cosine(product: float, size: float) -> float | None:
    return max(-1.0, min(1.0, product / size)) if size > 0 else None


def folder_of(request: Request, result: Mapping[str, Any]) -> Path:
    """Where a replay is written: below the folder that was named; an off-policy one beside the on-policy one."""
    policy = result["policy"]
    suffix = f"-policy-{policy['step']:06d}" if policy["off_policy"] else ""
    return request.run / schema.REPLAY_DIR / f"step-{result['step']:06d}{suffix}"


def main(overrides: Sequence[str], console: Console | None = None) -> int:
    """Replays, writes replay.json, table.md, table.csv, cosine.png and cosine.svg, prints the table; exit code 0.

    With `backends=` as `replay_backends.main` says.
    """
    from ablate import replay_backends, runner
    from analysis import replay as shown

    console = console or runner.make_console()
    request = parse(overrides)
    transformers.utils.logging.disable_progress_bar()
    if request.backends:
        return replay_backends.main(request, console)
    with console.status("reading the run") as status:
        result = replay(request, progress=lambda text: status.update(text))
    folder = folder_of(request, result)
    write_json(folder / schema.REPLAY_FILE, result)
    item = shown.read(folder / schema.REPLAY_FILE)
    shown.write(item, folder)
    console.print(rich_table(shown.summary_table(item)))
    for line in shown.sentences(item):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"\nwritten to {folder}", markup=False, highlight=False, soft_wrap=True)
    return 0


def rich_table(table: Any) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(
        title=Text(table.title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left"
    )
    for header, align in zip(table.headers, table.align, strict=True):
        shown.add_column(Text(header), justify={"l": "left", "r": "right", "c": "center"}[align])  # type: ignore[arg-type]
    for row in table.rows:
        shown.add_row(*(Text(text) for text in row))
    return shown
