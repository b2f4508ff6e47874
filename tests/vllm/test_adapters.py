"""vLLM's classes are as the fused adapters expect them, and an engine on the CPU does without."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from ablate.rollout import vllm_adapters as adapters
from tests.vllm.engines import engine


def copy(owner: type) -> type:
    return type(owner.__name__, owner.__bases__, {k: v for k, v in owner.__dict__.items() if k != "__dict__"})


def test_vllms_classes_are_as_expected() -> None:
    from vllm.lora.layers import column_parallel_linear
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    wrapper, logits = copy(PunicaWrapperGPU), copy(LogitsProcessorWithLoRA)
    columns = SimpleNamespace(**vars(column_parallel_linear))
    assert adapters.install(wrapper, logits, columns)
    for owner, name in (
        (wrapper, "add_lora_linear"), (wrapper, "add_lora_logits"), (logits, "set_lora"), (logits, "reset_lora"),
        (columns, "_mcp_apply"),
    ):  # fmt: skip
        assert getattr(owner, name)._vllm_own is not None
    assert not hasattr(PunicaWrapperGPU.add_lora_linear, "_vllm_own")
    merged = column_parallel_linear.MergedColumnParallelLinearWithLoRA
    assert list(inspect.signature(merged._apply_sync).parameters) == ["self", "x", "bias"]


def test_a_cpu_engine_has_vllms_kernels(lora: tuple[Any, Any]) -> None:
    assert engine(lora[0]).describe()["adapters"] == "vLLM's kernels"
    assert not adapters.in_use()
