"""Cases on the device that the kernels run on: a GPU, or the CPU under Triton's interpreter."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

import losses
from tests.losses.common import Got, call
from tests.strategies import Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The exact KL over the vocabulary has no Triton kernel; everything else is a function of log-probs.
VARIANTS = tuple(name for name in losses.names() if losses.get(name).vocabulary is None)
HALF = (torch.bfloat16, torch.float16)


def place(case: Case) -> Case:
    moved = {f.name: getattr(case, f.name) for f in fields(case)}
    return replace(case, **{k: v.to(DEVICE) for k, v in moved.items() if isinstance(v, torch.Tensor)})


def run(variant: str, case: Case, backend: str = "triton", **options) -> Got:
    """The library on `case`, moved to the device; results back on the CPU."""
    got = call(variant, place(case), backend, **options)

    def back(x):
        return None if x is None else x.cpu()

    return Got(
        got.loss.cpu(), back(got.hidden), back(got.weight), back(got.bias), got.per_token_logps.cpu(),
        {k: losses.Metric(m.sum.cpu(), m.count.cpu()) for k, m in got.metrics.items()},
    )  # fmt: skip
