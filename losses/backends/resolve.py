"""The one place where `auto` becomes a backend."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from types import ModuleType

import torch

from losses.spec import nearest

logger = logging.getLogger(__name__)

BACKENDS = {
    "reference": "losses.backends.reference",
    "chunked": "losses.backends.chunked",
    "triton": "losses.backends.triton_launch",
}
PRECISIONS = ("auto", "fp8")


def choose(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The backend's name for `name`, and why. An explicit request is kept or refused with ValueError, not replaced."""
    if name == "auto":
        if device.type != "cuda":
            return "chunked", f"tensors are on {device.type}"
        if dtype == torch.float64:
            return "chunked", "float64 has no matrix units for Triton to use"
        missing = _triton_missing()
        return ("chunked", missing) if missing else ("triton", "tensors are on cuda and triton is installed")
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; {nearest(name, (*BACKENDS, 'auto'))}")
    if name == "triton" and (missing := _triton_missing()):
        raise ValueError(f"backend='triton' cannot run: {missing}; use backend='chunked'")
    if name == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"backend='triton' needs a CUDA device, tensors are on {device.type}: use backend='chunked'")
    if name == "triton" and dtype == torch.float64:
        raise ValueError("backend='triton' computes in float32, but hidden or weight is float64: use backend='chunked'")
    return name, "asked for"


@functools.cache
def _triton_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if importlib.util.find_spec(BACKENDS["triton"]) is None:
        return "this build has no Triton kernels"
    return None


@functools.cache
def _announce(name: str, reason: str) -> None:
    logger.info("loss backend %s: %s", name, reason)


def backend(name: str, device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The module behind `name`. Says once which one `auto` took."""
    chosen, reason = choose(name, device, dtype)
    _announce(chosen, reason)
    return importlib.import_module(BACKENDS[chosen])


def precision(name: str) -> str:
    if name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; {nearest(name, PRECISIONS)}")
    return name
