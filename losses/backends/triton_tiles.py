"""Block shapes, and which operands the tensor copy engine (TMA) can take."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Tiles:
    """Of the product: an m x n tile of logits per step, k columns of the operands at a time."""

    m: int
    n: int
    k: int
    group: int  # row tiles that share a pass over the weight
    warps: int
    stages: int
    tma: bool
    per_sm: int = 0  # programs per multiprocessor that share the tiles; 0: one program per tile

    flatten: bool = False  # prefetch the next tile's operands during the epilogue

    def programs(self, device: torch.device) -> int:
        return self.per_sm * _multiprocessors(device) if self.per_sm else 0


INTERPRETER = Tiles(m=16, n=16, k=16, group=2, warps=4, stages=1, tma=True)
AMPERE = Tiles(m=128, n=128, k=64, group=8, warps=4, stages=3, tma=False)
HOPPER_FLOAT8 = Tiles(m=128, n=256, k=128, group=8, warps=8, stages=3, tma=True, per_sm=1)
HOPPER = Tiles(m=128, n=256, k=64, group=8, warps=8, stages=3, tma=True, per_sm=1)
# Short products are half epilogue: two programs on a multiprocessor, so that one's runs beside the other's product.
HOPPER_NARROW = Tiles(m=128, n=128, k=64, group=8, warps=4, stages=3, tma=True)
NARROW = 2048


def tiles_for(device: torch.device, width: int, float8: bool) -> Tiles:
    if device.type != "cuda":
        return INTERPRETER
    if float8:
        return HOPPER_FLOAT8
    if torch.cuda.get_device_capability(device)[0] < 9:
        return AMPERE
    return HOPPER_NARROW if width < NARROW else HOPPER


def tma_ready(x: Tensor) -> bool:
    """Whether rows of x (2-d) start at multiples of 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def descriptor(x: Tensor, block: tuple[int, int]) -> Any:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
