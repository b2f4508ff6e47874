"""LoRA in vLLM's decode steps by one kernel per layer (`losses.backends.triton_lora`) in place of vLLM's three.

Off unless `vllm.fused_adapters=true`, as it has not been timed on a GPU yet.

The engine has one adapter slot, so vLLM's sorting of rows by adapter is not needed; rows without the adapter are left
as they are, also in CUDA graphs, which read the slots from the same tensors as vLLM's kernels. Whatever does not fit
goes through vLLM's own method, above all prefill.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

ROWS, INNER, RANK, SLICES = 256, 2048, 64, 3  # the most that the kernel is used for
DTYPES = (torch.bfloat16, torch.float16)
PARAMETERS = ("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices", "buffer", "kwargs")
LOGITS_PARAMETERS = ("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "buffer", "kwargs")

_enabled = False  # read by the methods that are put on vLLM's classes: an engine may have said no


def use(wanted: bool) -> bool:
    """Sets whether the engine that is started next has the kernel. Returns whether it does: `wanted`, and vLLM's
    classes are as expected."""
    global _enabled
    _enabled = wanted and _install_in_vllm()
    return _enabled


def in_use() -> bool:
    return _enabled


def _install_in_vllm() -> bool:
    try:
        from vllm.lora.layers import column_parallel_linear as columns
        from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
        from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU
    except ImportError:
        return False
    return install(PunicaWrapperGPU, LogitsProcessorWithLoRA, columns)


def install(wrapper: type, logits: type, columns: Any) -> bool:
    """Puts the functions below on classes like vLLM's PunicaWrapperGPU and LogitsProcessorWithLoRA and on a module like
    its column_parallel_linear, once; whether `add_lora_linear` is there afterwards. `add_lora_logits` comes only with
    both methods that keep its mark true."""
    marked = _replace(logits, "set_lora", ("self", "index", "lora_a", "lora_b"), set_lora)
    marked = marked and _replace(logits, "reset_lora", ("self", "index"), reset_lora)
    if marked:
        _replace(wrapper, "add_lora_logits", LOGITS_PARAMETERS, add_lora_logits)
    _replace(columns, "_mcp_apply", ("x", "bias", "layer"), apply_columns)
    return _replace(wrapper, "add_lora_linear", PARAMETERS, add_lora_linear)


def _replace(owner: Any, name: str, parameters: tuple[str, ...], function: Any) -> bool:
    """Puts `function(original, ...)` on a class or module, if the original takes these parameters."""
    original = owner.__dict__.get(name)
    if hasattr(original, "_vllm_own"):
        return True
    if not callable(original) or tuple(inspect.signature(original).parameters) != parameters:
        return False

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    method._vllm_own = original  # type: ignore[attr-defined]
    setattr(owner, name, method)
    return True


def set_lora(own: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """LogitsProcessorWithLoRA.set_lora, which calls reset_lora first."""
    try:
        own(layer, *args, **kwargs)
    finally:
        layer.lora_a_stacked.adapts_nothing = False


def reset_lora(own: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """LogitsProcessorWithLoRA.reset_lora: what vLLM calls for an adapter that does not name the layer."""
    own(layer, *args, **kwargs)
    layer.lora_a_stacked.adapts_nothing = len(layer.lora_a_stacked) == 1


def add_lora_logits(own: Any, wrapper: Any, y: Tensor, x: Tensor, lora_a_stacked: Tensor, *args: Any, **kw: Any) -> Any:
    """PunicaWrapperGPU.add_lora_logits, left out where the one adapter does not adapt the head: it would add zeros."""
    if _enabled and getattr(lora_a_stacked, "adapts_nothing", False):
        return None
    return own(wrapper, y, x, lora_a_stacked, *args, **kw)


def apply_columns(own: Any, x: Tensor, bias: Tensor | None, layer: Any) -> Tensor:
    """`_mcp_apply`, a layer's output with the adapter's part: what vLLM 0.24 calls for query, key and value side by
    side, and for gate and up. It is for adapters that are sharded over devices; where they are not, the way of vLLM's
    other layers gives the same, and it calls `add_lora_linear`. vLLM 0.31 takes that way itself."""
    if _enabled and layer.tp_size == 1 and not layer.lora_config.fully_sharded_loras:
        return layer._apply_sync(x, bias)
    return own(x, bias, layer)


def add_lora_linear(
    own: Any,
    wrapper: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: tuple[Tensor, ...],
    lora_b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    *,
    buffer: Tensor | None = None,
    **kwargs: Any,
) -> None:
    """PunicaWrapperGPU.add_lora_linear: y (rows, out) += the adapter's part of x (rows, in), by slices, in place.

    own: vLLM's method, for what the kernel does not do.
    """
    if not fits(wrapper, y, x, lora_a_stacked, lora_b_stacked, output_slices, buffer, kwargs):
        return own(
            wrapper, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, buffer=buffer, **kwargs
        )  # fmt: skip
    meta = wrapper.token_mapping_meta
    if meta.no_lora_flag_cpu.item():
        return None
    from losses.backends.triton_lora import add_lora

    add_lora(y, x, lora_a_stacked, lora_b_stacked, scale, mapping=meta.token_lora_mapping, active=meta.active_lora_ids)
    return None


def fits(
    wrapper: Any,
    y: Tensor,
    x: Tensor,
    a: tuple[Tensor, ...],
    b: tuple[Tensor, ...],
    widths: tuple[int, ...],
    buffer: Tensor | None,
    kwargs: dict[str, Any],
) -> bool:
    """Whether the kernel does this call: a few rows with one adapter slot, in the layout that it reads."""
    if not (_enabled and x.is_cuda and x.dtype in DTYPES and y.dtype == x.dtype and buffer is None):
        return False
    if wrapper.max_loras != 1 or set(kwargs) - {"add_inputs"} or not kwargs.get("add_inputs", True):
        return False
    if x.dim() != 2 or y.dim() != 2 or not 1 <= len(x) <= ROWS or x.shape[1] > INNER or len(y) != len(x):
        return False
    if not (x.stride(1) == y.stride(1) == 1 and 1 <= len(a) <= SLICES and len(a) == len(b) == len(widths)):
        return False
    rank, inner, meta = a[0].shape[-2], x.shape[1], wrapper.token_mapping_meta
    return (
        rank <= RANK
        and y.shape[1] == sum(widths)
        and len(meta.token_lora_mapping) >= len(x)
        and len(meta.active_lora_ids) == 2
        and all(w.shape == (1, 1, rank, inner) and w.dtype == x.dtype and w.is_contiguous() for w in a)
        and all(
            w.shape == (1, 1, n, rank) and w.dtype == x.dtype and w.is_contiguous()
            for w, n in zip(b, widths, strict=True)
        )
    )
