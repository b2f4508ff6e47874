"""Triton's process-wide hooks, which other libraries set and these kernels cannot live with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def keeping_hooks() -> Iterator[None]:
    """Undoes what the block does to Triton's compile hook and autotuner messages, where Triton is installed.

    With a compile hook set, Triton writes a kernel's constants as JSON, which fails for kernels that take a function,
    as the losses' do. vLLM leaves such a hook on every later compilation of the process.
    """
    try:
        from triton import knobs
    except ImportError:
        yield
        return
    hook, printing = knobs.runtime.jit_post_compile_hook, knobs.autotuning.print
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook, knobs.autotuning.print = hook, printing
