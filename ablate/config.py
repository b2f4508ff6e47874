"""The typed configuration of a run: what every key means, and how a preset and `key=value` overrides become a `Config`.

A value is looked for in three places, later ones win: the defaults below, the preset (`experiments/<name>.yaml`), the
command line. Keys are nested (`train.learning_rate=1e-5`); a bare name is enough where it is unique
(`learning_rate=1e-5`, `grid.beta=0.04,1.0`). `ablate.keys` turns names into keys of this schema, `ablate.passthrough`
checks the groups that are handed on to TRL, PEFT, the rollout engine and wandb.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ablate import keys, points, schema
from ablate.errors import ConfigError, unknown

__all__ = ["Config", "ConfigError", "config_hash", "differences", "load", "preset_names", "set_values", "to_dict"]

DEFAULT_PRESET = "default"
BACKENDS = ("auto", "reference", "chunked", "triton")
PRECISIONS = ("auto", "fp8")
ROLLOUTS = ("auto", "transformers", "vllm")
DTYPES = ("float32", "bfloat16", "float16")


def _key(default: Any, text: str) -> Any:
    """A dataclass field with its line of help; mutable defaults are copied for every instance."""
    if isinstance(default, dict | list):
        return field(default_factory=lambda: copy.copy(default), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass
class LossConfig:
    """How the policy loss is computed; `params` holds what only some variants know."""

    backend: str = _key("auto", "reference, chunked, triton, or auto: the best one for the device")
    precision: str = _key("auto", "auto (that of the inputs) or fp8 for the LM-head product")
    beta: float = _key(0.04, "weight of the KL term")
    epsilon: float | None = _key(None, "lower clip range of the ratio; null = no clipping")
    epsilon_high: float | None = _key(None, "upper clip range; null = epsilon")
    params: dict[str, Any] = _key({}, "a variant's own parameters, by name")


@dataclass
class TrainConfig:
    """The optimisation of one cell. A step draws prompts_per_step x num_generations completions."""

    steps: int = _key(80, "optimizer steps")
    learning_rate: float = _key(7e-4, "peak learning rate, constant after the warm-up")
    warmup_steps: int = _key(10, "linear warm-up, in steps")
    prompts_per_step: int = _key(16, "prompts (groups) in a step")
    num_generations: int = _key(8, "completions per prompt, at least 2")
    micro_batch_size: int | None = _key(None, "completions per forward and backward pass; null = all at once")
    num_iterations: int = _key(1, "optimizer steps on each batch of rollouts")
    max_completion_length: int | None = _key(None, "tokens; null = the task's own limit")
    max_grad_norm: float = _key(1.0, "gradient clipping")
    mask_truncated_completions: bool = _key(False, "leave completions that hit the length limit out of the loss")
    gradient_checkpointing: bool = _key(False, "recompute activations in the backward pass")
    dtype: str = _key("float32", "float32, bfloat16 or float16 (autocast and GradScaler)")
    lora: bool = _key(False, "train a LoRA adapter (peft.* are its settings) instead of all weights")
    load_in_4bit: bool = _key(False, "the frozen base in 4 bits (QLoRA: bitsandbytes, nf4), with train.lora=true")
    checkpoint_every: int = _key(20, "steps between checkpoints, what a killed run resumes from; 0 = none")
    keep_checkpoint: bool = _key(False, "keep the last checkpoint of a finished cell")
    rollouts_every: int = _key(1, "steps between stored rollouts; 0 = none")
    adapter_every: int = _key(0, "steps between stored policies beside the rollouts; 0 = none")
    exact_kl_every: int = _key(0, "steps between measurements of the KL over the whole vocabulary; 0 = none")


@dataclass
class EvalConfig:
    """Evaluation on held-out prompts; it always runs before the first and after the last step."""

    every: int = _key(0, "steps between evaluations; 0 = start and end only")
    prompts: int | None = _key(None, "held-out prompts to use; null = all")


@dataclass
class RewardsConfig:
    """Reward functions, plain or async; each gets the whole batch of completions at once."""

    timeout: float | None = _key(None, "seconds a reward function gets for a batch, then its rewards are None")


@dataclass
class Config:
    """One experiment: a grid of cells (variants x seeds x grid points) and what they share."""

    experiment: str = _key(DEFAULT_PRESET, "preset: a name in experiments/ or the path of a YAML file")
    variants: list[str] = _key(["all"], "all (the preset's set), family (everything registered), or names: a,b")
    variants_all: list[str] = _key(list(schema.FOUNDING), "what variants=all means; set by presets")
    seeds: list[int] = _key([0, 1, 2], "a count (3 = seeds 0, 1, 2) or a list (0,1,7; one seed: 7,)")
    grid: dict[str, Any] = _key({}, "grid.KEY=a,b adds an axis over KEY; grid=none drops the preset's axes")
    points: dict[str, Any] = _key({}, "a preset's named points; points=a,b selects among them, points=none drops them")
    model: str = _key("tiny", "tiny, smollm2, a folder, a .gguf file or a hub id")
    task: str = _key("arithmetic", "name of a task")
    task_options: dict[str, Any] = _key({}, "options of the task; TASK.option= works too")
    device: str = _key("auto", "auto, cpu, cuda or cuda:N")
    rollout: str = _key("auto", "transformers, vllm, or auto: vllm on CUDA where it is installed")
    out: str = _key("runs", "folder of run directories")
    jobs: int | str = _key("auto", "cells side by side: a number, auto, or 0 = in this process (to debug)")
    threads: int | None = _key(None, "CPU threads per cell; null = 1 for the tiny model and for jobs above 1")
    retries: int = _key(1, "how often a cell whose worker the system killed is tried again")
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    trl: dict[str, Any] = _key({}, "fields of TRL's GRPOConfig")
    peft: dict[str, Any] = _key({}, "fields of PEFT's LoraConfig")
    sampling: dict[str, Any] = _key({}, "GenerationConfig fields, or vLLM's SamplingParams with rollout=vllm")
    vllm: dict[str, Any] = _key({}, "vLLM engine arguments")
    wandb: dict[str, Any] = _key({}, "arguments of wandb.init; any of them turns wandb on")


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dict of a config, ready for JSON or YAML."""
    return asdict(config)


def config_hash(config: Config, variant: str, seed: int) -> str:
    """`schema.config_hash` of a cell with this config."""
    return schema.config_hash(to_dict(config), variant, seed)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Lines 'key: old -> new' for every key that decides numbers and in which two config dicts differ."""
    old, new = schema.deciding(before), schema.deciding(after)
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key, ...) != new.get(key, ...)]
    return [f"{key}: {_shown(old, key)} -> {_shown(new, key)}" for key in changed]


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not set"


def set_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of `config` with schema keys set, each converted to the key's type.

    Raises ConfigError naming the key whose value has the wrong type.
    """
    node = OmegaConf.structured(config)
    for key, value in values.items():
        try:
            OmegaConf.update(node, key, value, merge=False, force_add=keys.in_open_group(key))
        except (OmegaConfBaseException, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{key}={value}: {reason}; {key} is {keys.help_of(key, Config)}") from error
    try:
        result = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:  # e.g. an interpolation that leads nowhere
        raise ConfigError(f"the configuration does not resolve: {str(error).splitlines()[0]}") from error
    assert isinstance(result, Config)
    return result


# presets


def preset_folders() -> list[Path]:
    """Where presets are looked for: `experiments/` of the current folder, then that of this checkout."""
    folders = [Path.cwd() / "experiments", Path(__file__).resolve().parents[1] / "experiments"]
    return list(dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()))


def preset_names() -> list[str]:
    """Names that `experiment=` knows."""
    return sorted({path.stem for folder in preset_folders() for path in folder.glob("*.yaml")})


def find_preset(name: str) -> Path:
    """The file of a preset; a path to a YAML file stands for itself. Raises ConfigError with the nearest names."""
    if name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"experiment={name}: there is no such file")
        if path.stem.startswith(".") or not path.stem.isprintable():  # a folder below out= is called so
            raise ConfigError(
                f"experiment={name}: runs are kept under the file's name: give it one without a first dot"
            )
        return path
    for folder in preset_folders():
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise unknown("experiment", name, preset_names(), "presets")


def read_preset(path: Path) -> dict[str, Any]:
    """The keys of a preset file, unresolved. Raises ConfigError where the file is no mapping."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:  # YAML and OmegaConf errors have no common base
        raise ConfigError(f"{path}: not a readable preset: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a preset is a mapping of keys to values")
    if "experiment" in tree:
        raise ConfigError(f"{path}: a preset is named by its file, not by a key 'experiment'")
    return {str(key): value for key, value in tree.items()}


def load(overrides: Sequence[str] = (), *, check: bool = True) -> Config:
    """The config of a preset and `key=value` overrides.

    With `check`, names are also held against what is installed (variants, tasks, TRL, PEFT, ... fields): that imports
    only what an override or the preset mentions. Raises ConfigError (a ValueError) that names the key, with the
    nearest names for a typo.
    """
    tree = keys.Schema(Config)
    command = [keys.split_override(text) for text in overrides]
    named = [value for key, value in command if key == "experiment"]
    if len(set(named)) > 1:
        raise ConfigError(f"experiment is set twice: {named[0]} and {named[-1]}")
    path = find_preset(named[-1] if named else DEFAULT_PRESET)

    preset = keys.collect(tree, tree.flatten(read_preset(path)), source=path.name)
    given = keys.collect(
        tree, [pair for pair in command if pair[0] != "experiment"], source="the command line", texts=True
    )
    named_points = points.read(tree, preset.pop("points", None), given.pop("points", None))
    values = keys.merge(preset, given)
    points.refuse_twice(named_points, values, given)
    for settings in named_points.values() or [{}]:
        own = {key: setting.value for key, setting in settings.items()}
        keys.check_task_options({**values, **own}, preset, given, settings, Config().task)

    grid = {key.removeprefix("grid."): value for key, value in values.items() if key.startswith("grid.")}
    config = set_values(Config(experiment=path.stem), {k: v for k, v in values.items() if not k.startswith("grid.")})
    config.grid = {key: _axis(config, key, value) for key, value in grid.items()}
    config.points = {name: _point(config, name, settings) for name, settings in named_points.items()}
    cells = len(config.seeds) * math.prod(map(len, config.grid.values())) * max(len(config.points), 1)
    if cells > keys.MOST_CELLS:
        raise ConfigError(f"seeds, points and grid: {cells} cells of each variant; at most {keys.MOST_CELLS}")
    check_values(config, installed=check)
    return config


def check_values(config: Config, installed: bool = True) -> None:
    """Check a config at each of its named points and axis values; `installed`: also against what is installed.

    Raises ConfigError, with the name of the point where there are points.
    """
    shared_by_name = at_points(config)
    for name, shared in shared_by_name.items():
        same = next(other for other, config_there in shared_by_name.items() if config_there == shared)
        if same != name:
            raise ConfigError(f"points: {same} and {name} come to the same values")
        try:
            _check(shared, installed)
        except ConfigError as error:
            raise ConfigError(f"points.{name}: {error}" if name else str(error)) from error


def at_points(config: Config) -> dict[str, Config]:
    """For each of the config's named points, by name, a config with its values set; {"": config} without points."""
    if not config.points:
        return {"": config}
    bare = dataclasses.replace(config, points={})
    return {name: set_values(bare, values) for name, values in config.points.items()}


def _check(config: Config, installed: bool) -> None:
    validate(config)
    for key, axis in config.grid.items():
        for value in axis:
            validate(set_values(config, {key: value}))
    if installed:
        from ablate import passthrough

        passthrough.check(config)


def _axis(config: Config, key: str, values: Any) -> list[Any]:
    """The values of one grid axis in the type of its key; refuses lists in lists and values that come twice."""
    values = keys.split_list(values)
    if not values:
        raise ConfigError(f"grid.{key}: no values; write grid.{key}=a,b, or grid=none for no grid at all")
    if any(isinstance(value, list | dict) for value in values):
        raise ConfigError(f"grid.{key}: an axis is over single values (numbers, words, true, false, null)")
    if len(values) > keys.MOST_CELLS:
        raise ConfigError(f"grid.{key}: {len(values)} values; at most {keys.MOST_CELLS}")
    typed = [keys.select(to_dict(set_values(config, {key: value})), key) for value in values]
    twice = [value for index, value in enumerate(typed) if value in typed[:index]]
    if twice:
        raise ConfigError(f"grid.{key}: {twice[0]} is there twice")
    return typed


def _point(config: Config, name: str, settings: Mapping[str, keys.Setting]) -> dict[str, Any]:
    """The values of a named point by schema key, each in the key's type."""
    try:
        typed = to_dict(set_values(config, {key: setting.value for key, setting in settings.items()}))
    except ConfigError as error:
        raise ConfigError(f"points.{name}: {error}") from error
    return {key: keys.select(typed, key) for key in settings}


# checks that need nothing but the values


def validate(config: Config) -> None:
    """Refuse values that no run can use. Raises ConfigError naming the key and what it may be."""
    train, loss = config.train, config.loss
    for key, names in (("variants", config.variants), ("variants_all", config.variants_all)):
        if not names:
            raise ConfigError(f"{key}: none given; say {'all, family, or ' if key == 'variants' else ''}names")
    if not config.seeds:
        raise ConfigError("seeds: none given; a count (3) or a list (0,1,7)")
    if len(set(config.seeds)) < len(config.seeds) or min(config.seeds) < 0 or max(config.seeds) >= 2**32:
        raise ConfigError(f"seeds={config.seeds}: seeds are different whole numbers from 0 to {2**32 - 1}")
    temperature = config.sampling.get("temperature", 1.0)
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not (number and 0 < temperature < math.inf):
        raise ConfigError(f"sampling.temperature={temperature}: must be a finite number above 0")
    top_p = config.sampling.get("top_p")
    if isinstance(top_p, int | float) and not 0 < top_p <= 1:  # transformers would ignore one above 1
        raise ConfigError(f"sampling.top_p={top_p}: must be above 0 and at most 1")
    for key, value, least in (
        ("train.steps", train.steps, 1),
        ("train.prompts_per_step", train.prompts_per_step, 1),
        ("train.num_generations", train.num_generations, 2),
        ("train.num_iterations", train.num_iterations, 1),
        ("train.warmup_steps", train.warmup_steps, 0),
        ("train.micro_batch_size", train.micro_batch_size, 1),
        ("train.max_completion_length", train.max_completion_length, 1),
        ("train.checkpoint_every", train.checkpoint_every, 0),
        ("train.rollouts_every", train.rollouts_every, 0),
        ("train.adapter_every", train.adapter_every, 0),
        ("train.exact_kl_every", train.exact_kl_every, 0),
        ("eval.every", config.eval.every, 0),
        ("eval.prompts", config.eval.prompts, 1),
        ("threads", config.threads, 1),
        ("retries", config.retries, 0),
        ("train.learning_rate", train.learning_rate, 0),
        ("train.max_grad_norm", train.max_grad_norm, 0),
        ("loss.beta", loss.beta, 0),
        ("loss.epsilon", loss.epsilon, 0),
        ("loss.epsilon_high", loss.epsilon_high, 0),
    ):
        if value is not None and not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{key}={value}: must be a finite number, {least} or more")
    if config.rewards.timeout is not None and not 0 < config.rewards.timeout < math.inf:
        raise ConfigError(f"rewards.timeout={config.rewards.timeout}: give seconds above 0, or null for no limit")
    if loss.epsilon_high is not None and loss.epsilon is None:
        raise ConfigError(
            "loss.epsilon_high is set but loss.epsilon is null, so nothing is clipped: set loss.epsilon too"
        )
    if train.exact_kl_every and loss.beta == 0 and not train.lora and config.grid.get("train.lora") is None:
        raise ConfigError(
            f"train.exact_kl_every={train.exact_kl_every}: with loss.beta=0 and no adapter there is no reference "
            "to measure the KL to: set train.exact_kl_every=0, or train.lora=true"
        )
    completions = train.prompts_per_step * train.num_generations
    if train.micro_batch_size is not None and completions % train.micro_batch_size:
        raise ConfigError(
            f"train.micro_batch_size={train.micro_batch_size} does not divide the {completions} completions of a step "
            "(train.prompts_per_step x train.num_generations)"
        )
    for key, word, words in (
        ("loss.backend", loss.backend, BACKENDS),
        ("loss.precision", loss.precision, PRECISIONS),
        ("rollout", config.rollout, ROLLOUTS),
        ("train.dtype", train.dtype, DTYPES),
    ):
        if word not in words:
            raise unknown(key, word, words)
    keys.check_device(config.device)
    if isinstance(config.jobs, str) and config.jobs != "auto" or isinstance(config.jobs, int) and config.jobs < 0:
        raise ConfigError(f"jobs={config.jobs}: a number of cells side by side, auto, or 0 for this process")
    if train.load_in_4bit and not train.lora and config.grid.get("train.lora") is None:
        raise ConfigError("train.load_in_4bit: 4-bit weights stay frozen, an adapter is trained: say train.lora=true")
    if config.peft and not config.train.lora and config.grid.get("train.lora") is None:
        raise ConfigError(f"peft.{next(iter(config.peft))} is set but no adapter is trained: say train.lora=true")
