"""The LM head's three products in the operands' precision, accumulated in float32 (float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor

from losses.backends.head import Head

VOCAB_BLOCK = (
    8192  # rows of a half-precision head that are held in float32 at a time where products are done in float32
)


class Products:
    """Products of operands of `head.dtype`. Half-precision operands: CUDA's matrix units with a float32 result; elsewhere
    they are exact in float32, so they are multiplied there, a block of the vocabulary at a time."""

    def __init__(self, head: Head) -> None:
        self.half = head.dtype in (torch.float16, torch.bfloat16)
        self.native = self.half and head.hidden.is_cuda
        self.dtype = head.dtype

    def weight(self, weight: Tensor) -> Tensor:
        """The head's weight as the products want it, prepared once per pass."""
        return weight

    def rows(self, weight: Tensor, ids: Tensor) -> Tensor:
        return weight[ids]

    def logits(self, h: Tensor, weight: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """h (rows, H) times weight^T, (rows, V) in `dtype`; differentiable where no `out` is given."""
        if out is None:
            return h.to(dtype) @ weight.to(dtype).t()
        if self.native:
            return torch.mm(h, weight.t(), out_dtype=dtype, out=out)
        if not self.half:
            return torch.mm(h, weight.t(), out=out)
        h = h.to(dtype)
        for start in range(0, weight.shape[0], VOCAB_BLOCK):
            block = weight[start : start + VOCAB_BLOCK].to(dtype)
            out[:, start : start + VOCAB_BLOCK] = h @ block.t()
        return out

    def mix(self, e: Tensor, weight: Tensor) -> Tensor:
        """e (rows, V) times weight, (rows, H) in e's dtype."""
        if self.native:
            return torch.mm(e.to(self.dtype), weight, out_dtype=e.dtype)
        if not self.half:
            return e @ weight
        total = torch.zeros(e.shape[0], weight.shape[1], dtype=e.dtype, device=e.device)
        for start in range(0, weight.shape[0], VOCAB_BLOCK):
            block = weight[start : start + VOCAB_BLOCK].to(e.dtype)
            total.addmm_(e[:, start : start + VOCAB_BLOCK], block)
        return total

    def subtract_outer(self, total: Tensor, e: Tensor, h: Tensor, share: Tensor) -> None:
        """total (V, H) -= e^T (share x h), in total's dtype."""
        if not self.native:
            total.addmm_(e.t(), h * share.unsqueeze(1), alpha=-1)
            return
        # Divided by the largest, so that small shares (1 / tokens / vocabulary) do not underflow in float16.
        largest = share.abs().amax().clamp(min=1e-30)
        rows = (h * (share / largest).unsqueeze(1)).to(self.dtype)
        total.sub_(torch.mm(e.t().to(self.dtype), rows, out_dtype=total.dtype).mul_(largest))


def products(head: Head) -> Products:
    """The products for a head's dtype, device and precision."""
    if head.precision == "fp8":
        raise ValueError("precision='fp8' is not available in this version; use precision='auto'")
    return Products(head)
