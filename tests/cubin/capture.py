"""Compiles what a call would launch, for a GPU that is not there: tensors on the meta device, a driver in name only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver


class _Driver:
    """As much of a driver as `JITFunction.run(warmup=True)` asks for."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # kernels are cached by device

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def _mm(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, out_dtype: Any = None) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype) if out is None else out


@contextmanager
def compiling_for(capability: int) -> Iterator[list[tuple[str, Any]]]:
    """Yields the list of (kernel name, compiled kernel) that calls within the block fill."""
    from losses.backends import triton_launch, triton_tiles

    compiled: list[tuple[str, Any]] = []

    def run(self: Any, *args: Any, grid: Any, **kwargs: Any) -> Any:
        kernel = original(self, *args, grid=grid, **(kwargs | {"warmup": True}))
        compiled.append((self.fn.__name__, kernel))
        return kernel

    original = triton.runtime.jit.JITFunction.run

    def tiles(_: Any, width: int, float8: bool) -> Any:
        if capability < 90:
            return triton_tiles.AMPERE
        return (
            triton_tiles.HOPPER_FLOAT8
            if float8
            else (triton_tiles.HOPPER_NARROW if width < triton_tiles.NARROW else triton_tiles.HOPPER)
        )

    previous = driver._active if hasattr(driver, "_active") else None
    driver.set_active(_Driver(capability))
    try:
        with (
            mock.patch.object(triton.runtime.jit.JITFunction, "run", run),
            mock.patch.object(triton_launch, "tiles_for", tiles),
            mock.patch.object(triton_tiles, "_multiprocessors", lambda _: 132),
            mock.patch.object(triton_launch, "_mm", lambda a, b, out: None),
            mock.patch.object(triton_launch, "_add_product", lambda *_: None),
            mock.patch.object(torch, "mm", _mm),
        ):
            yield compiled
    finally:
        if previous is not None:
            driver.set_active(previous)
        else:
            driver._active = None


def call(
    variant: str, tokens: int, width: int, vocab: int, dtype: torch.dtype, *, trained: bool = False, **head: Any
) -> None:
    """The Triton backend's forward on tensors without memory."""
    import losses
    from losses import policy
    from losses.backends import triton_launch
    from losses.backends.head import Head

    def per_token(kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(2, tokens // 2, dtype=kind, device="meta")

    chosen = losses.get(variant)
    inputs = losses.LossInputs(
        completion_ids=per_token(torch.int64),
        completion_mask=per_token(torch.bool),
        advantages=torch.empty(2, device="meta"),
        old_per_token_logps=per_token(),
        ref_per_token_logps=per_token(),
    )
    hidden = torch.empty(2, tokens // 2, width, dtype=dtype, device="meta")
    weight = torch.empty(vocab, width, dtype=dtype, device="meta")
    options = {"bias": None, "temperature": 1.0, "softcap": None, "scale": 1.0, "precision": "auto", "chunk_size": None}
    problem = Head(hidden=hidden, weight=weight, dtype=dtype, **(options | head))
    term = policy.token_gradient(chosen, inputs, chosen.resolve({"epsilon": 0.2}), torch.float32) if trained else None
    bias = problem.bias is not None
    triton_launch.forward(
        problem, inputs.completion_ids.view(-1), None, entropy=True, keep_u=True, token_gradient=term,
        needs=(True, trained, trained and bias),
    )  # fmt: skip
