"""A variant's token term as device functions: the same code objects over `triton.language`, not its torch twin."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from losses import elementwise
from losses.spec import body_params


@triton.jit
def _identity(x):
    return x


@functools.cache
def device_function(body: Callable) -> Any:
    """`body` for a kernel. Functions it calls are rebound as well; anything else among its globals stays what it is."""
    names: dict[str, Any] = {}
    for name in body.__code__.co_names:
        if name not in body.__globals__:
            continue
        value = body.__globals__[name]
        if value is elementwise.stop_grad:
            value = _identity
        elif isinstance(value, FunctionType):
            value = device_function(value)
        elif isinstance(value, int | float):
            value = tl.constexpr(value)
        names[name] = value
    if body.__closure__:
        raise ValueError(f"{body.__name__} closes over variables; a kernel can only be given its parameters")
    # The interpreter looks for the language under this name, whatever the body calls it.
    names["tl"] = tl
    twin = FunctionType(body.__code__, names, body.__name__, body.__defaults__)
    twin.__module__, twin.__qualname__ = body.__module__, body.__qualname__
    return triton.jit(twin)


def arguments(body: Callable, params: dict[str, Any]) -> tuple[float, ...]:
    """The values of a body's parameters, in its order; an epsilon that is not set does not clip."""
    given = (params[name] for name in body_params(body))
    return tuple(math.inf if value is None else float(value) for value in given)
