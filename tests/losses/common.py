"""What the loss tests share: one call of the library, the matching call of the oracle, and how the two are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import losses
from tests import oracles, oracles_kl
from tests.strategies import Case

BACKENDS = ("reference", "chunked")
VARIANTS = tuple(name for name in losses.names() if name in oracles.DEFINITIONS)  # the KL family: test_family.py
DEFINITIONS = oracles.DEFINITIONS | oracles_kl.DEFINITIONS
LENGTH_LIMIT = 7  # value for parameters that have no default (Dr. GRPO's constant)


def own_params(variant: str) -> dict[str, Any]:
    """Values for the parameters that a variant cannot do without."""
    return {p.name: p.type(LENGTH_LIMIT) for p in losses.get(variant).params if p.default is None}


def oracle_options(variant: str, case: Case) -> oracles.Options:
    given = dict(case.options)
    level, mode = given.pop("sampling_mode", "sequence_truncate").split("_")
    return oracles.Options(
        sampling_level=level,
        sampling_mode=mode,
        sampling_cap=given.pop("sampling_clip_max", 3.0),
        constant=own_params(variant).get("max_completion_length"),
        **given,
    )


def oracle(variant: str, case: Case, dtype: torch.dtype = torch.float64) -> oracles.Result:
    return oracles.evaluate(
        DEFINITIONS[variant],
        case.hidden,
        case.weight,
        case.batch,
        oracle_options(variant, case),
        case.head,
        dtype,
    )


@dataclass(frozen=True)
class Got:
    """One forward and backward of the library; a gradient is None where none was asked for."""

    loss: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    per_token_logps: Tensor
    metrics: dict[str, losses.Metric]

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.loss, self.hidden, self.weight, self.bias, self.per_token_logps) if x is not None]


def call(
    variant: str,
    case: Case,
    backend: str,
    *,
    inputs: losses.LossInputs | None = None,
    trained: tuple[str, ...] = ("hidden", "weight", "bias"),
    upstream: float = 1.0,
    **changes: Any,
) -> Got:
    """`linear_policy_loss` of a case and its gradients. `trained` says which of hidden, weight, bias ask for one."""
    leaves = {
        name: None if x is None else x.detach().requires_grad_(name in trained)
        for name, x in (("hidden", case.hidden), ("weight", case.weight), ("bias", case.bias))
    }
    hidden, weight = leaves["hidden"], leaves["weight"]
    assert hidden is not None and weight is not None
    keywords = case.head_kwargs | {"lm_head_bias": leaves["bias"]} | case.options | own_params(variant) | changes
    out = losses.linear_policy_loss(hidden, weight, inputs or case.inputs(), variant, backend=backend, **keywords)
    if trained:
        (out.loss * upstream).backward()
    grads = {name: None if x is None else x.grad for name, x in leaves.items()}
    return Got(out.loss.detach(), grads["hidden"], grads["weight"], grads["bias"], out.per_token_logps, out.metrics)


def close(got: Tensor | None, want: Tensor | None, tolerance: float = 1e-10, what: str = "") -> None:
    """Equal within `tolerance`, absolute and relative; shapes and dtypes are held too."""
    if got is None or want is None:
        assert got is None and want is None, f"{what}: one of the two is missing"
        return
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def same(got: Got, want: Got | oracles.Result, tolerance: float = 1e-10) -> None:
    for what in ("loss", "hidden", "weight", "bias", "per_token_logps"):
        close(getattr(got, what), getattr(want, what), tolerance, what)


def identical(got: Got, want: Got) -> None:
    for what in ("loss", "hidden", "weight", "bias", "per_token_logps"):
        a, b = getattr(got, what), getattr(want, what)
        assert (a is None) == (b is None), what
        assert a is None or torch.equal(a, b), f"{what} differs by {(a - b).abs().max()}"


def error(got: Tensor, exact: Tensor) -> float:
    """Relative error in the Frobenius norm, against float64."""
    difference = (got.double() - exact.double()).norm()
    return float(difference / exact.double().norm().clamp(min=1e-300))


def finite(got: Got) -> bool:
    everything = [*got.tensors(), *(x for m in got.metrics.values() for x in (m.sum, m.count, m.mean))]
    return all(bool(torch.isfinite(x).all()) for x in everything)
