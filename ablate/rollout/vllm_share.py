"""One copy of the base weights: a transformers model whose parameters are views of a vLLM engine's.

vLLM fuses q, k, v and gate, up into one matrix each and pads the vocabulary: row slices of its parameters are the
tensors that transformers wants. For dense, unquantised models on one device; `build` refuses the rest with the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class CannotShare(ValueError):
    """Why a model's weights cannot be views of the engine's."""


def build(folder: Path, engine_model: Any, dtype: torch.dtype) -> Any:
    """The transformers causal LM of a folder's config, on the engine's weights, which must not be moved, cast or put to
    sleep afterwards.

    Raises CannotShare where a tensor is missing in the engine, or is there in another shape, layout or dtype.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    found = views(model, engine_model, dtype)
    model.load_state_dict(found, strict=False, assign=True)
    model.tie_weights()
    device = next(iter(found.values())).device
    _rebuild_buffers(model, device)
    left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if left:
        raise CannotShare(f"{left[0]} has no counterpart in the engine")
    model.config._name_or_path = model.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


def views(model: Any, engine_model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """The engine's tensors under the names of a transformers model's parameters, which may live on the meta device."""
    engine = {
        name.replace(".base_layer.", "."): p.data for name, p in engine_model.named_parameters(remove_duplicate=False)
    }
    packed = {
        part: (fused, parts)
        for fused, parts in getattr(engine_model, "packed_modules_mapping", {}).items()
        for part in parts
        if len(parts) > 1
    }
    wanted = dict(model.named_parameters(remove_duplicate=False))
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    out = {}
    for name, p in wanted.items():
        whole, start = name, 0
        if name not in engine:
            whole, start = _in_fused(name, wanted, packed)
        if whole not in engine:
            if name in tied:
                continue
            raise CannotShare(f"the engine has no {whole}")
        source = engine[whole]
        if source.dtype != dtype or source.dim() != p.dim() or source.shape[1:] != p.shape[1:]:
            raise CannotShare(
                f"the engine holds {whole} as {tuple(source.shape)} {source.dtype}, not as {tuple(p.shape)} {dtype}"
            )
        if start + len(p) > len(source) or (whole == name and len(source) > len(p) and not _is_vocabulary(model, p)):
            raise CannotShare(f"the engine holds {whole} in another shape, {tuple(source.shape)}")
        out[name] = source[start : start + len(p)]
    return out


def _in_fused(name: str, wanted: dict[str, Any], packed: dict[str, Any]) -> tuple[str, int]:
    """(name of the fused parameter, first row of this part in it)."""
    prefix, _, rest = name.rpartition(".")
    parent, _, part = prefix.rpartition(".")
    if part not in packed:
        return name, 0
    fused, parts = packed[part]
    start = sum(len(wanted[f"{parent}.{p}.{rest}"]) for p in parts[: parts.index(part)])
    return f"{parent}.{fused}.{rest}", start


def _is_vocabulary(model: Any, p: Tensor) -> bool:
    return len(p) == model.config.get_text_config().vocab_size


def _rebuild_buffers(model: Any, device: torch.device) -> None:
    """Rotary tables are computed from the config and stand in no state dict."""
    for name, module in list(model.named_modules()):
        if not any(b.is_meta for b in module.buffers(recurse=False)):
            continue
        if not hasattr(module, "config"):
            raise CannotShare(f"{type(module).__name__} has buffers that only its weights' file could give")
        model.set_submodule(name, type(module)(config=module.config).to(device))
