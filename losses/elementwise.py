"""The small op vocabulary a token term is written in, and its torch twin.

A body such as `clipped_surrogate` is one function with two lives: called as it stands it works on torch tensors, since
`tl` here is the torch twin of `triton.language`; the Triton backend rebinds the same code object to the real
`triton.language` and compiles it into a kernel. A body may therefore use arithmetic, comparisons, the names below and
its arguments, and nothing else.

Every body returns `(value, derivative)`: the term and its derivative with respect to the policy's log-prob `n`, written
out by hand. `stop_grad` marks the log-probs through which the derivative must not flow: it is what autograd through
`value` obeys (the tests compare the two), and it is the identity in a kernel.
"""

from __future__ import annotations

from typing import Any

import torch


class _TorchLanguage:
    """The part of `triton.language` that bodies use, on torch tensors."""

    exp = staticmethod(torch.exp)
    log = staticmethod(torch.log)
    abs = staticmethod(torch.abs)
    sigmoid = staticmethod(torch.sigmoid)

    @staticmethod
    def where(condition: Any, x: Any, y: Any) -> torch.Tensor:
        return torch.where(condition, x, y)

    @staticmethod
    def minimum(x: Any, y: Any) -> torch.Tensor:
        return torch.minimum(x, y) if isinstance(y, torch.Tensor) else torch.clamp(x, max=y)

    @staticmethod
    def maximum(x: Any, y: Any) -> torch.Tensor:
        return torch.maximum(x, y) if isinstance(y, torch.Tensor) else torch.clamp(x, min=y)


tl = _TorchLanguage()


def stop_grad(x: torch.Tensor) -> torch.Tensor:
    """`x` without its gradient; the identity inside a kernel."""
    return x.detach()


def clipped_surrogate(n, o, a, epsilon, epsilon_high):
    """PPO's clipped surrogate, -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), r = exp(n - sg(o)).

    No clipping is epsilon = inf. A = 0 is no gain even where r overflows.
    Source: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; TRL's `loss_type="grpo"`.
    """
    r = tl.exp(n - stop_grad(o))
    clipped = tl.minimum(tl.maximum(r, 1.0 - epsilon), 1.0 + epsilon_high)
    gain = tl.where(a == 0.0, 0.0, r * a)
    clipped_gain = tl.where(a == 0.0, 0.0, clipped * a)
    return -tl.minimum(gain, clipped_gain), tl.where(gain <= clipped_gain, -gain, 0.0)


def k3(n, p, o):
    """Schulman's k3 estimate of KL(policy || reference), exp(p - n) - (p - n) - 1 ('Approximating KL divergence')."""
    x = p - n
    e = tl.exp(x)
    return e - x - 1.0, 1.0 - e
