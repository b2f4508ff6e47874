"""What a replay reads: a cell's rollouts as one batch, and the policies stored beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ablate import lm_head, models, schema
from ablate.errors import ConfigError, RunFileError, nearest
from ablate.models.weights import PICKLES, weight_files
from ablate.rundir import CellDir

ADAPTER = "adapter_model.safetensors"
START = 1  # the step whose rollouts the initial model draws


@dataclass(frozen=True)
class Stored:
    """A cell's config (as stored), and where its rollouts and policies are, by the step that they draw for.

    Step 1 needs no file: the initial model draws for it.
    """

    directory: CellDir
    name: str
    variant: str
    seed: int
    point: dict[str, Any]
    config: dict[str, Any]
    rollouts: dict[int, Path]
    policies: dict[int, Path]

    @property
    def lora(self) -> bool:
        return bool(self.config["train"]["lora"])

    @property
    def usable(self) -> list[int]:
        """Steps with rollouts and the policy that drew them."""
        return [step for step in sorted(self.rollouts) if step == START or step in self.policies]

    def policy_name(self, step: int) -> str:
        """The policy's folder below the cell, or what it is."""
        path = self.policies.get(step)
        return path.relative_to(self.directory.path).as_posix() if path else "the initial model"


def find(run: str | Path, step: int | None = None) -> Stored:
    """The cell in folder `run`, or of an experiment the one to replay: reference before others, the lowest seed first.

    step: what will be replayed; None: any.

    Raises ConfigError naming `run` where there is no such folder, no cell in it, none with rollouts or none with a
    policy, RunFileError where a config is damaged.
    """
    folder = Path(run)
    if not folder.is_dir():
        raise ConfigError(f"run={run}: there is no such folder{_siblings(folder)}")
    if (folder / schema.CONFIG_FILE).is_file():
        return _read(folder)
    cells = [_read(path.parent) for path in sorted(folder.glob(f"*/{schema.CONFIG_FILE}"))]
    if not cells:
        raise ConfigError(
            f"run={run}: neither a cell (it has no {schema.CONFIG_FILE}) nor an experiment with cells; give a folder "
            "such as runs/default or runs/default/reference-seed0-beta0.04"
        )
    cells.sort(key=lambda c: (c.variant != "reference", c.seed, c.name))
    for wanted in (
        lambda c: step in c.usable if step is not None else max(c.usable, default=0) > START,
        lambda c: bool(c.usable) and step is None,
        lambda c: bool(c.rollouts),
    ):
        for cell in cells:
            if wanted(cell):
                return cell
    return cells[0]


def choose_step(cell: Stored, step: int | None) -> int:
    """`step`, or the last one that has both rollouts and policy. Raises ConfigError naming run or step."""
    where = cell.directory.path
    if not cell.rollouts:
        raise ConfigError(f"run={where}: no rollouts are stored; run the cell with train.rollouts_every=1")
    if not cell.usable:
        raise ConfigError(
            f"run={where}: rollouts of step {_listed(cell.rollouts)} are stored, but no policy that drew them; run the "
            "cell with train.adapter_every=1 (step 1 needs none)"
        )
    if step is None:
        return cell.usable[-1]
    near = sorted(cell.usable, key=lambda s: (abs(s - step), s))[:4]
    if step not in cell.rollouts:
        raise ConfigError(f"step={step}: no rollouts are stored for it; steps that can be replayed: {_listed(near)}")
    if step not in cell.usable:
        raise ConfigError(
            f"step={step}: the policy that drew its rollouts is not stored (rollouts/policy-{step:06d}); steps with "
            f"one: {_listed(near)}; train.adapter_every sets how often it is kept"
        )
    return step


def choose_policy(cell: Stored, policy: str, step: int) -> int:
    """The step whose policy is differentiated. policy: "drawn", "final" or a step. Raises ConfigError naming policy."""
    if policy == "drawn":
        return step
    there = sorted({*cell.policies, START})
    if policy == "final":
        if there[-1] <= step:
            raise ConfigError(
                f"policy=final: nothing later than step {step} is stored in {cell.directory.path}; run the cell with "
                "train.keep_checkpoint=true or train.adapter_every"
            )
        return there[-1]
    if not policy.isdigit():
        raise ConfigError(f"policy={policy}: give drawn (that of the rollouts), final, or a step: {_listed(there)}")
    if int(policy) not in there:
        near = sorted(there, key=lambda s: (abs(s - int(policy)), s))[:4]
        raise ConfigError(f"policy={policy}: no policy of that step is stored; nearest: {_listed(near)}")
    return int(policy)


def _listed(steps: Iterable[int]) -> str:
    texts = [str(s) for s in sorted(steps)]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:4], "...", *texts[-3:]]) or "none"


def _siblings(folder: Path) -> str:
    if not folder.parent.is_dir():
        return ""
    names = [p.name for p in folder.parent.iterdir() if p.is_dir() and not p.name.startswith(".")]
    close = nearest(folder.name, names) or sorted(names)[:4]
    return f"; beside it there are: {', '.join(close)}" if close else ""


def _read(folder: Path) -> Stored:
    directory = CellDir(folder)
    stored = directory.read_config()
    if stored is None:
        raise RunFileError(f"{folder}: no {schema.CONFIG_FILE}")
    cell = stored["cell"]
    rollouts = {n: p for p in directory.rollouts_dir.glob("step-*.parquet") if (n := _number(p.stem))}
    # A checkpoint after step k is the policy that draws for step k + 1.
    policies = {n + 1: p for p in directory.checkpoint_dir.glob("step-*") if (n := _number(p.name)) and _has_weights(p)}
    policies |= {n: p for p in directory.rollouts_dir.glob("policy-*") if (n := _number(p.name)) and p.is_dir()}
    return Stored(
        directory,
        cell["name"],
        cell["variant"],
        cell["seed"],
        cell.get("point", {}),
        stored["config"],
        rollouts,
        policies,
    )


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))


# ---- models


def load_start(cell: Stored, device: str) -> models.LoadedModel:
    """The model that the cell started from, in its precision: that of training where frozen, else float32."""
    dtype = getattr(torch, cell.config["train"]["dtype"]) if cell.lora else torch.float32
    in_4bit = cell.config["train"].get("load_in_4bit", False)
    return models.load(cell.config["model"], device=device, dtype=dtype, load_in_4bit=in_4bit)


def build_policy(cell: Stored, step: int, start: models.LoadedModel) -> tuple[nn.Module, nn.Module]:
    """(policy of `step`, its causal LM without the adapter's wrapping), in evaluation mode, safetensors only.

    What the run trained asks for gradients, nothing else does.

    Raises ConfigError naming the policy where its folder is not what the cell's config says, holds pickled weights or
    weights that do not fit.
    """
    path = cell.policies.get(step)
    if not cell.lora:
        model = _full(start, path) if path else start.build()
        lm_head.attach(model)
        return model.eval().requires_grad_(True), model
    base = start.build()
    wrapped: Any = _adapter(base, path) if path else _initial_adapter(cell, base, start)
    base = wrapped.get_base_model()
    lm_head.attach(base)
    return wrapped.eval(), base


def _full(start: models.LoadedModel, path: Path) -> Any:
    try:
        weight_files(path)
        return replace(start, path=path, source=str(path)).build()
    except Exception as error:  # safetensors, transformers and torch raise unrelated kinds
        raise ConfigError(f"policy: {path} cannot be loaded: {error}") from error


def _adapter(base: Any, path: Path) -> Any:
    from peft import PeftModel

    kind = type(base).__name__
    if not (path / ADAPTER).is_file():
        pickles = [p.name for pattern in PICKLES for p in path.glob(pattern)]
        what = f"holds pickled weights ({', '.join(pickles)}), which are refused" if pickles else f"holds no {ADAPTER}"
        raise ConfigError(f"policy: {path} {what}; run the cell again with train.adapter_every=1")
    try:
        return PeftModel.from_pretrained(base, path, is_trainable=True)
    except Exception as error:  # peft, safetensors and torch raise unrelated kinds
        raise ConfigError(f"policy: {path} does not load into {kind}: {error}") from error


def _initial_adapter(cell: Stored, base: Any, start: models.LoadedModel) -> Any:
    """The adapter that the trainer began with, drawn again from the cell's seed and held against the cell's hash."""
    from peft import get_peft_model
    from transformers import set_seed

    from ablate.cell import lora_config

    devices = [torch.device(start.device)] if start.device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices):
        set_seed(cell.seed)
        model: Any = get_peft_model(base, lora_config(SimpleNamespace(peft=cell.config["peft"])))  # type: ignore[arg-type]
    if start.load_in_4bit:  # as TRL rounds it
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.bfloat16().float()
    known = (cell.directory.read_env() or {}).get("pairing", {}).get("initial_weights_sha256")
    if start.initial_weights_sha256(model) != known:
        raise ConfigError(
            f"step={START}: the initial adapter of {cell.name} cannot be drawn again here (other versions of torch or "
            "peft, or another model); run the cell with train.adapter_every=1, which stores it"
        )
    return model


# ---- rollouts


@dataclass(frozen=True)
class Batch:
    """The completions of one step, B rows in the order of generation; prompts padded on the left, completions (B, T) on
    the right. total_rewards (B,): the weighted sum, NaN where no function gave one; old, ref, sampling (B, T):
    log-probs as stored, or None.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    advantages: Tensor
    total_rewards: Tensor
    group_ids: Tensor
    old: Tensor | None
    ref: Tensor | None
    sampling: Tensor | None

    def rows(self, start: int, stop: int) -> Batch:
        taken: dict[str, Any] = {name: x if x is None else x[start:stop] for name, x in vars(self).items()}
        return Batch(**taken)

    def __len__(self) -> int:
        return len(self.group_ids)


def read_batch(cell: Stored, step: int, device: str, pad: int) -> Batch:
    """The stored rollouts of a step. Raises RunFileError where the file is damaged, lacks a column or is empty."""
    import pyarrow.parquet as pq

    path = cell.rollouts[step]
    try:
        table = pq.read_table(path)
    except Exception as error:  # pyarrow raises half a dozen unrelated types for a damaged file
        raise RunFileError(f"{path}: not a readable parquet file ({error}); run the cell again") from error
    missing = [name for name in schema.ROLLOUT_COLUMNS if name not in table.column_names]
    if missing or not table.num_rows:
        raise RunFileError(f"{path}: {'lacks ' + ', '.join(missing) if missing else 'holds no completion'}")
    rows = table.sort_by([("group", "ascending"), ("sample", "ascending")]).to_pydict()

    def padded(name: str, dtype: torch.dtype, fill: float = 0, left: bool = False) -> Tensor | None:
        values = rows[name]
        if any(row is None for row in values):
            return None
        width = max(map(len, values))
        fills = [[fill] * (width - len(row)) for row in values]
        whole = [f + row if left else row + f for row, f in zip(values, fills, strict=True)]
        return torch.tensor(whole, dtype=dtype, device=device)

    prompts = padded("prompt_ids", torch.long, pad, left=True)
    ids, mask = padded("completion_ids", torch.long, pad), padded("completion_mask", torch.long)
    if prompts is None or ids is None or mask is None or ids.shape != mask.shape:
        raise RunFileError(f"{path}: prompt_ids, completion_ids and completion_mask must be lists of one length a row")
    real = [[0] * (prompts.shape[1] - len(row)) + [1] * len(row) for row in rows["prompt_ids"]]
    return Batch(
        prompt_ids=prompts,
        prompt_mask=torch.tensor(real, device=device),
        completion_ids=ids,
        completion_mask=mask,
        advantages=torch.tensor(rows["advantage"], dtype=torch.float32, device=device),
        total_rewards=_total(rows["rewards"], cell.config["trl"].get("reward_weights"), path).to(device),
        group_ids=torch.tensor(rows["group"], device=device),
        old=padded("old_per_token_logps", torch.float32),
        ref=padded("ref_per_token_logps", torch.float32),
        sampling=padded("sampling_per_token_logps", torch.float32),
    )


def _total(rewards: list[dict[str, float | None]], weights: list[float] | None, path: Path) -> Tensor:
    names = list(rewards[0])
    if weights is not None and len(weights) != len(names):
        raise RunFileError(f"{path}: {len(names)} reward functions, but trl.reward_weights has {len(weights)} values")
    values = torch.tensor([[float("nan") if row[n] is None else row[n] for n in names] for row in rewards])
    total = (values * torch.tensor(weights or [1.0] * len(names))).nansum(1)
    return total.masked_fill(values.isnan().all(1), torch.nan)
