"""Values of the groups that are handed on, given to the libraries once before a sweep instead of in every cell of it.

Names are checked by `ablate.passthrough`. Here each group that is set becomes what a cell would make of it: GRPOConfig
with its optimizer and scheduler, a LoRA layer, tokens of a stand-in model, vLLM's SamplingParams and EngineArgs. What
depends on the model's weights (names of target modules, memory) only a cell can tell.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate import resolve
from ablate.errors import ConfigError

if TYPE_CHECKING:
    from ablate.config import Config
    from ablate.plan import Cell

VOCABULARY = 1 << 19  # of the stand-in model: beyond any token id that an option may name
ELSEWHERE = (  # which of the model's parts get an adapter is not for a stand-in to say
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
    "target_parameters",
    "exclude_modules",
    "trainable_token_indices",
    "layer_replication",
)
MESSAGE = 300  # characters of a library's message


def check(config: Config) -> None:
    """Raise ConfigError naming the key where a library refuses a value, on any point of the grid."""
    from ablate import plan

    if not _groups(config):
        return
    one = dataclasses.replace(config, variants=plan.select_variants(config)[:1], seeds=config.seeds[:1])
    seen: set[str] = set()
    for cell in plan.cells(one):
        for group, build in _groups(cell.config).items():
            content = [group, dataclasses.asdict(dataclasses.replace(cell.config, loss=type(cell.config.loss)()))]
            if (text := json.dumps(content, sort_keys=True, default=str)) in seen:
                continue
            seen.add(text)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the cell itself will say so
                    build(cell)
            except ConfigError:
                raise
            except Exception as error:  # each library has kinds of its own
                raise ConfigError(f"{_blamed(cell, group, build)}: {_message(error)}") from error


def _groups(config: Config) -> dict[str, Callable[[Cell], Any]]:
    """The groups that are set, with what makes of them what a cell would."""
    engine = resolve.rollout(config.rollout, config.device).name
    draw = {"vllm": _sampling_params}.get(engine, _draw)
    found: dict[str, Callable[[Cell], Any]] = {}
    axes = {key.split(".")[0] for key in config.grid}
    if config.trl.keys() - {"report_to"} or "trl" in axes:
        found["trl"] = _grpo
    if config.peft or "peft" in axes:
        found["peft"] = _lora
    if config.sampling.keys() - {"temperature"} or "sampling" in axes:
        found["sampling"] = draw
    if config.train.lora or config.train.load_in_4bit or {"train.lora", "train.load_in_4bit"} & config.grid.keys():
        found["train"] = _frozen_base
    if engine == "vllm" and (config.vllm or "vllm" in axes):
        found["vllm"] = _engine_args
    return found


def _blamed(cell: Cell, group: str, build: Callable[[Cell], Any]) -> str:
    """The keys at fault, with their values: those without which it works, or all of the group."""
    options = getattr(cell.config, group)

    def works(kept: Mapping[str, Any]) -> bool:
        try:
            changed = copy.copy(cell.config)
            setattr(changed, group, dict(kept))
            build(dataclasses.replace(cell, config=changed))
        except Exception:
            return False
        return True

    if not works({}):
        return f"{group}.* and the keys that it is used with"
    single = [name for name in options if works({k: v for k, v in options.items() if k != name})]
    return ", ".join(f"{group}.{name}={options[name]}" for name in single or options)


def _message(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MESSAGE else text[:MESSAGE] + " ..."


# what a cell makes of each group


def _grpo(cell: Cell) -> None:
    from torch import nn
    from transformers import Trainer, get_scheduler
    from trl import GRPOConfig

    from ablate import cell as cells

    _check_types("trl", cell.config.trl, GRPOConfig)
    device = resolve.device(cell.config.device).name
    args = cells.grpo_config(cell, Path("unused"), device, task_length=16)
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    optimizer = kind(nn.Linear(1, 1).parameters(), **options)
    get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(args.max_steps),
        num_training_steps=args.max_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )


def _lora(cell: Cell) -> None:
    """A LoRA layer with these settings on one linear layer, wide enough for its rank."""
    if not cell.config.train.lora:
        return
    from peft import LoraConfig, inject_adapter_in_model
    from torch import nn

    from ablate import cell as cells

    _check_types("peft", cell.config.peft, LoraConfig)
    settings = cells.lora_config(cell.config)
    settings = dataclasses.replace(settings, target_modules=["layer"], **dict.fromkeys(ELSEWHERE))
    width = max(settings.r, 8)
    inject_adapter_in_model(settings, nn.Sequential(nn.ModuleDict({"layer": nn.Linear(width, width)})))


def _frozen_base(cell: Cell) -> None:
    """An adapter that the engine can apply, and of 4-bit weights a forward and a backward pass on the cell's device."""
    from ablate import engines

    config, train = cell.config, cell.config.train
    engines.check_dtype(config)
    if not train.load_in_4bit:
        return
    if not train.lora:
        raise ConfigError("train.load_in_4bit: 4-bit weights stay frozen, an adapter is trained: say train.lora=true")
    if resolve.rollout(config.rollout, config.device).name == "vllm" and not config.vllm.get("quantization"):
        raise ConfigError(
            "train.load_in_4bit: vLLM would draw from the unquantised base, which is not the policy that is trained: "
            "say vllm.quantization=bitsandbytes, or rollout=transformers"
        )
    device = resolve.device(config.device).name
    try:
        import torch
        from bitsandbytes.nn import Linear4bit

        dtype = getattr(torch, train.dtype)
        layer = Linear4bit(64, 64, compute_dtype=dtype, quant_type="nf4").to(device)
        inputs = torch.ones(1, 64, dtype=dtype, device=device, requires_grad=True)
        layer(inputs).sum().backward()
        works = inputs.grad is not None and bool(inputs.grad.isfinite().all())
    except Exception as error:  # no such kernel, no such library: all end here
        raise ConfigError(f"train.load_in_4bit: bitsandbytes cannot do it on {device}: {_message(error)}") from error
    if not works:
        raise ConfigError(f"train.load_in_4bit: no gradient passes bitsandbytes' 4-bit layers on {device}")


def _draw(cell: Cell) -> None:
    """Two tokens of a stand-in model, drawn as transformers' engine draws."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ablate.rollout.transformers import TransformersEngine

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).eval()
    sampling = {name: value for name, value in cell.config.sampling.items() if name != "stop_strings"}
    ids = types.SimpleNamespace(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    engine = TransformersEngine(ids, eos_token_ids=[2], max_completion_length=2, sampling=sampling)
    engine.generate(model, [[1, 3]], seed=0, step=0, num_generations=1)


def _sampling_params(cell: Cell) -> None:
    from ablate.rollout import vllm_sampling

    vllm_sampling.checked(cell.config.sampling)


def _engine_args(cell: Cell) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from ablate import engines
    from ablate.rollout.vllm_live import vllm_options

    options = vllm_options(cell.config.vllm)
    _check_types("vllm", options, EngineArgs)
    engines.check_quantization(cell.config)
    EngineArgs(model=".", **options)  # a folder: the name of a model would be looked up on the hub


# types


def _check_types(group: str, options: Mapping[str, Any], dataclass: type) -> None:
    """Raise ConfigError for a value that is none of its field's types: most libraries find out late, or never."""
    for field in dataclasses.fields(dataclass):
        if field.name not in options:
            continue
        value, hint = options[field.name], _hint(dataclass, field)
        if not fits(value, hint):
            shown = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise ConfigError(
                f"{group}.{field.name}={value}: {dataclass.__name__} takes {shown} here, not a {type(value).__name__}"
            )


def _hint(dataclass: type, field: dataclasses.Field[Any]) -> Any:
    """A field's type; Any where its annotation names what is imported for type checkers only."""
    if not isinstance(field.type, str):
        return field.type
    for owner in dataclass.__mro__:
        alone = {"__annotations__": {field.name: field.type}, "__module__": owner.__module__}
        with contextlib.suppress(NameError):
            return typing.get_type_hints(type("Alone", (), alone))[field.name]
    return Any


def fits(value: Any, hint: Any) -> bool:
    """Whether a value that YAML can write may stand for a type; types that only a library can make from it say yes."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts or any("[" in str(part) for part in parts)  # 'pissa_niter_[number of iters]'
    if origin is typing.Annotated:
        return fits(value, parts[0])
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    if hint in (bool, str, dict, list, type(None)):
        return isinstance(value, hint)
    if origin is list:
        return isinstance(value, list) and all(fits(item, parts[0]) for item in value)
    return isinstance(value, dict) if origin is dict else True
