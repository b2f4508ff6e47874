"""What every backend takes and gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """An LM head applied to hidden states: z = softcap((hidden W^T + b) x scale) / temperature.

    hidden (B, T, H), weight (V, H), bias (V,) or None. `dtype`: of the products' operands (accumulated in float32, or
    float64); chunk_size: tokens whose logits are alive at a time, None for the backend's own choice.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperature: float
    softcap: float | None
    scale: float
    dtype: torch.dtype
    precision: str
    chunk_size: int | None

    @property
    def logps_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def tokens(self) -> int:
        return self.hidden.shape[0] * self.hidden.shape[1]

    def rows(self, index: Tensor | slice) -> Tensor:
        """Hidden states (rows, H) at flat positions, in the operands' dtype; copies those rows at most."""
        h = self.hidden.detach()
        if isinstance(index, slice):
            if h.is_contiguous():
                return h.view(-1, h.shape[-1])[index].to(self.dtype)
            index = torch.arange(index.start, index.stop, device=h.device)
        length = h.shape[1]
        return h[index // length, index % length].to(self.dtype)


@dataclass
class Pass:
    """One pass over the tokens. logps, entropy (B, T) in float32 or float64, 0 where masked.

    u: (B, T, H) in hidden's dtype, d logp / d hidden. d_weight (V, H), d_bias (V,): in float32 or float64, with the
    token gradient's g already in them.
    """

    logps: Tensor
    entropy: Tensor | None = None
    u: Tensor | None = None
    d_weight: Tensor | None = None
    d_bias: Tensor | None = None
    folded: bool = False  # u holds the token gradient's g as well


@contextmanager
def launching_on(device: torch.device) -> Iterator[None]:
    """Triton launches on the current device, which need not be the tensors'; no autocast of products in the block."""
    kind = device.type
    with (
        torch.cuda.device(device) if kind == "cuda" else nullcontext(),
        torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext(),
    ):
        yield
