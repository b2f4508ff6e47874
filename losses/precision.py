"""The LM head's three products: in the operands' precision, accumulated in float32 (or float64), or in float8.

float8 (e4m3, 4 exponent and 3 mantissa bits, up to 448): hidden states are scaled row by row, the weight by its rows
for the logits and by its columns for d hidden, so that the largest of each becomes 448; scales stay in float32. What
need not go through float8 does not: the sampled token's own logit and its half of d hidden are dot products and rows of
the operands as they are, and d weight is a product in half precision. Torch backends emulate it: operands rounded to
float8, products in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from losses.backends.head import Head

BLOCK_BYTES = 8 << 20  # of a half-precision head that are held in float32 at a time where products are done in float32
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0


class Products:
    """Products of operands of `head.dtype`. Half-precision operands: CUDA's matrix units with a float32 result.

    Elsewhere they are exact in float32, so they are multiplied there, a block of the vocabulary at a time.
    """

    def __init__(self, head: Head) -> None:
        self.half = head.dtype in (torch.float16, torch.bfloat16)
        self.native = self.half and head.hidden.is_cuda
        self.dtype = head.dtype

    def weight(self, weight: Tensor) -> Tensor:
        """The head's weight as the products want it, prepared once per pass."""
        return weight

    def rows(self, weight: Tensor, ids: Tensor) -> Tensor:
        return weight[ids]

    def logits(
        self, h: Tensor, weight: Tensor, dtype: torch.dtype, out: Tensor | None = None, *, ids: Tensor | None = None
    ) -> Tensor:
        """h (rows, H) times weight^T, (rows, V) in `dtype`; differentiable where no `out` is given.

        ids (rows,): sampled tokens, whose own logits no rounding of the operands may touch.
        """
        if out is None:
            return h.to(dtype) @ weight.to(dtype).t()
        if self.native:
            return torch.mm(h, weight.t(), out_dtype=dtype, out=out)
        if not self.half:
            return torch.mm(h, weight.t(), out=out)
        h = h.to(dtype)
        for words in blocks(weight):
            out[:, words] = h @ weight[words].to(dtype).t()
        return out

    def mix(self, e: Tensor, weight: Tensor, *, ids: Tensor | None = None) -> Tensor:
        """e (rows, V) times weight, (rows, H) in e's dtype."""
        if self.native:
            return torch.mm(e.to(self.dtype), weight, out_dtype=e.dtype)
        if not self.half:
            return e @ weight
        total = torch.zeros(e.shape[0], weight.shape[1], dtype=e.dtype, device=e.device)
        for words in blocks(weight):
            total.addmm_(e[:, words], weight[words].to(e.dtype))
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


class Float8Products(Products):
    """The products with operands rounded to float8, multiplied in float32."""

    def logits(
        self, h: Tensor, weight: Tensor, dtype: torch.dtype, out: Tensor | None = None, *, ids: Tensor | None = None
    ) -> Tensor:
        result = torch.empty(h.shape[0], weight.shape[0], dtype=dtype, device=h.device) if out is None else out
        with torch.no_grad():
            rounded = rounded_to_float8(h, 1, dtype)
            for words in blocks(weight):
                result[:, words] = rounded @ rounded_to_float8(weight[words], 1, dtype).t()
            if ids is not None:
                own = torch.linalg.vecdot(h.to(dtype), weight[ids].to(dtype))
                result.scatter_(1, ids.unsqueeze(1), own.unsqueeze(1))
        if out is not None:
            return result
        # The rounding passes gradients through as they are.
        exact = h.to(dtype) @ weight.to(dtype).t()
        return exact + (result - exact.detach())

    def mix(self, e: Tensor, weight: Tensor, *, ids: Tensor | None = None) -> Tensor:
        others = e if ids is None else e.scatter(1, ids.unsqueeze(1), 0.0)
        # A power of two that brings the largest to (128, 256]: e is rounded once.
        factor = torch.exp2(8 - others.abs().amax(1, keepdim=True).clamp(min=1e-30).log2().ceil())
        rounded = (others * factor).to(FLOAT8).to(e.dtype)
        scale = scales(weight, 0)
        total = torch.zeros(e.shape[0], weight.shape[1], dtype=e.dtype, device=e.device)
        for words in blocks(weight):
            block = (weight[words].float() / scale).to(FLOAT8).to(e.dtype)
            total.addmm_(rounded[:, words], block)
        total.mul_(scale).div_(factor)
        return total if ids is None else total.addcmul_(e.gather(1, ids.unsqueeze(1)), weight[ids].to(e.dtype))


def blocks(weight: Tensor) -> Iterator[slice]:
    """Blocks of the vocabulary, rows of weight (V, H), of BLOCK_BYTES in float32 each.

    Larger ones are no faster: on a CPU with one thread 512 rows of 4,096 took 0.66 of the time of 8,192 for a product.
    """
    rows = max(64, BLOCK_BYTES // (4 * max(1, weight.shape[1])))
    for start in range(0, weight.shape[0], rows):
        yield slice(start, start + rows)


def scales(x: Tensor, dim: int) -> Tensor:
    """max |x| / 448 along `dim`, kept, in float32; 1 where everything is 0."""
    largest = x.abs().amax(dim, keepdim=True).float()
    return torch.where(largest > 0, largest / FLOAT8_MAX, 1.0)


def rounded_to_float8(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """x (2-d) rounded to float8 with one scale for every index but `dim`'s, back in `dtype`."""
    scale = scales(x, dim)
    # Division can round to a hair above 448, which float8 does not hold.
    return (x.float() / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).to(dtype) * scale.to(dtype)


def products(head: Head) -> Products:
    """The products for a head's dtype, device and precision."""
    return Float8Products(head) if head.precision == "fp8" else Products(head)
