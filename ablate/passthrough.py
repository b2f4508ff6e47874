"""Names that other modules and libraries fix, held against what is installed, before anything heavy runs.

A group that is empty costs nothing: TRL alone takes many seconds to import.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ablate import construct, keys, resolve, schema, tracking
from ablate.errors import ConfigError, nearest, unknown

if TYPE_CHECKING:
    from ablate.config import Config


def check(config: Config) -> None:
    """Check variants, tasks, the devices and engines asked for, and every pass-through group.

    Raises ConfigError naming the key, with the nearest names or the way out.
    """
    axes = config.grid
    for device in axes.get("device", [config.device]):
        resolve.device(device)
    engines = axes.get("rollout", [config.rollout])
    engines = list(dict.fromkeys(resolve.rollout(engine, config.device).name for engine in engines))
    for backend in axes.get("loss.backend", [config.loss.backend]):
        resolve.backend(backend, config.device)
    _check_variants(config)
    _check_task(config)
    for model in axes.get("model", [config.model]):
        resolve.model(model)
    for group, known in _groups(config, engines):
        names = group_names(config, group)
        if group == "sampling":
            names = [name for name in names if name not in keys.SAMPLING]  # they need no look at the installed class
        if names and "vllm" in engines:
            _refuse_owned(group, names)
        if names:
            _check_names(group, names, known())
        if names and group == "trl":
            _check_loss_options(config, names)
    tracking.check(config)
    construct.check(config)


def group_names(config: Config, group: str) -> list[str]:
    """The option names that a run sets in a pass-through group, by value or by axis."""
    axis = [key.split(".")[1] for key in config.grid if key.startswith(group + ".")]
    return list(dict.fromkeys([*getattr(config, group), *axis]))


def _groups(config: Config, engines: list[str]) -> Iterable[tuple[str, Callable[[], list[str]]]]:
    yield "trl", trl_names
    yield "peft", peft_names
    yield "wandb", wandb_names
    for engine in engines:
        yield "sampling", transformers_sampling_names if engine == "transformers" else vllm_sampling_names
        if engine == "vllm":
            yield "vllm", vllm_engine_names
    if "vllm" not in engines and group_names(config, "vllm"):
        raise ConfigError(
            f"vllm.{group_names(config, 'vllm')[0]} is set but the rollout engine is {engines[0]}: say rollout=vllm "
            "where vLLM is installed, or leave it out"
        )


def _check_names(group: str, names: Iterable[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            raise unknown(f"{group}.{name}", name, known)


def _refuse_owned(group: str, names: Iterable[str]) -> None:
    """Options of vLLM that follow from other keys."""
    from ablate.rollout import vllm_live, vllm_sampling

    owned = {"sampling": vllm_sampling.OWNED, "vllm": vllm_live.REFUSED}.get(group, {})
    for name in names:
        if name in owned:
            raise ConfigError(f"{group}.{name} cannot be set: {owned[name]}")


def _check_loss_options(config: Config, names: Iterable[str]) -> None:
    """Options of TRL's own loss have no effect here; the trainer refuses them, and so does the plan."""
    from ablate.trl_options import REFUSED

    for name in names:
        if name in REFUSED:
            raise ConfigError(f"trl.{name} would be ignored: {REFUSED[name]}; leave it out")


def trl_names() -> list[str]:
    """Fields of the installed GRPOConfig."""
    from trl.trainer.grpo_config import GRPOConfig

    return [entry.name for entry in dataclasses.fields(GRPOConfig) if entry.init]


def peft_names() -> list[str]:
    """Fields of the installed LoraConfig."""
    from peft import LoraConfig

    return [entry.name for entry in dataclasses.fields(LoraConfig) if entry.init]


def transformers_sampling_names() -> list[str]:
    """Options of the installed GenerationConfig."""
    from transformers import GenerationConfig

    return sorted(name for name in GenerationConfig().to_dict() if not name.startswith("_"))


def vllm_sampling_names() -> list[str]:
    """Options of the installed vLLM's SamplingParams."""
    from ablate.rollout import vllm_sampling

    return vllm_sampling.names()


def vllm_engine_names() -> list[str]:
    """Arguments of the installed vLLM's engine, and this project's own beside them."""
    from vllm.engine.arg_utils import EngineArgs

    from ablate.rollout.vllm_live import OWN_OPTIONS

    return [*(entry.name for entry in dataclasses.fields(EngineArgs) if entry.init), *OWN_OPTIONS]


def wandb_names() -> list[str]:
    """Arguments of the installed wandb.init. Raises ConfigError where wandb is not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError("wandb.* is set but wandb is not installed: pip install wandb, or leave wandb.* out")
    import wandb

    return _parameters(wandb.init)


def _parameters(function: Any) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind in named]


def _check_variants(config: Config) -> None:
    """Selected variants are registered, and each of loss.params.* belongs to one of them, with a value it takes."""
    names = [name for name in (*config.variants, *config.variants_all) if name not in ("all", "family")]
    axes = {
        key.removeprefix("loss.params."): values
        for key, values in config.grid.items()
        if key.startswith("loss.params.")
    }
    given = {name: [value] for name, value in config.loss.params.items()} | axes
    if not given and set(names) <= set(schema.FOUNDING):
        return  # the registry need not be loaded for names that are always there
    import losses

    for name in names:
        if name not in losses.names():
            raise unknown("variants", name, losses.names(), "registered")
    from ablate import plan

    chosen = [losses.get(name) for name in plan.select_variants(config)]
    for name, values in given.items():
        takers = {
            variant.name: parameter for variant in chosen for parameter in variant.all_params if parameter.name == name
        }
        if name in ("beta", "epsilon", "epsilon_high"):
            raise ConfigError(f"loss.params.{name} is loss.{name}")
        if not takers:
            every = sorted({parameter.name for variant in chosen for parameter in variant.params})
            close = nearest(name, every)
            has = (
                f"did you mean {' or '.join(close)}?"
                if close
                else f"they have: {', '.join(every) or 'none of their own'}"
            )
            raise ConfigError(
                f"loss.params.{name}: none of the variants {', '.join(v.name for v in chosen)} has it; {has}"
            )
        lacking = [variant.name for variant in chosen if variant.name not in takers]
        if name in axes and lacking:
            raise ConfigError(
                f"grid.loss.params.{name}: {', '.join(lacking)} has no such parameter; leave it out of variants="
            )
        for value in values:
            for parameter in takers.values():
                try:
                    parameter.check(value)
                except ValueError as error:
                    raise ConfigError(f"loss.params.{error}") from error


def _check_task(config: Config) -> None:
    from ablate import tasks

    chosen = config.grid.get("task", [config.task])
    for task in chosen:
        if task not in tasks.names():
            raise unknown("task", task, tasks.names(), "tasks")
    options = group_options(config)
    for task in chosen:
        for point in options:
            try:
                tasks.get(task, **point)
            except ValueError as error:
                raise ConfigError(f"task_options: {error}") from error


def group_options(config: Config) -> list[dict[str, Any]]:
    """Every set of task options that the grid makes."""
    points = [dict(config.task_options)]
    for key, values in config.grid.items():
        if key.startswith("task_options."):
            points = [{**point, key.removeprefix("task_options."): value} for point in points for value in values]
    return points
