"""What `losses.bench` adds on a GPU: the products that no exact method can do without, and an L2 cache that is cold."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from losses.bench_rows import Problem

ROWS = 4096
FLUSHED = 256 << 20  # bytes; several times any GPU's L2


def floor(problem: Problem) -> Callable[[], None]:
    """Two products (three with a trained head) of the problem's size and dtype, by cuBLAS, in chunks of 4,096 rows."""
    hidden, weight = problem.hidden.flatten(0, 1), problem.weight
    rows = min(ROWS, len(hidden))
    x = hidden[:rows]
    z = torch.randn(rows, len(weight), device=x.device, dtype=x.dtype)
    d_hidden = torch.empty_like(x)
    d_weight = torch.empty_like(weight) if problem.shape.head == "train" else None

    def products() -> None:
        for start in range(0, len(hidden), rows):
            n = min(rows, len(hidden) - start)
            torch.mm(x[:n], weight.t(), out=z[:n])
            torch.mm(z[:n], weight, out=d_hidden[:n])
            if d_weight is not None:
                torch.mm(z[:n].t(), x[:n], out=d_weight)

    return products


@functools.cache
def _scratch() -> torch.Tensor:
    return torch.empty(FLUSHED, dtype=torch.int8, device="cuda")


def cool_down() -> None:
    """Whatever is in L2 leaves it, so that no row finds its inputs there."""
    _scratch().zero_()
    torch.cuda.synchronize()
