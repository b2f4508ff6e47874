"""The interpreter runs the kernels untraced: coverage leaves their lines out, and tracing them doubles the time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(trace)
            (lambda: None)()  # coverage takes over again at a call, and must see the return of this frame

    return call


@pytest.fixture(scope="session", autouse=True)
def untraced_kernels() -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", untraced(GridExecutor.__call__))
        yield
