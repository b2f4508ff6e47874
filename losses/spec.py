"""What a loss variant is: `Variant`, its inputs and outputs, and the registry."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: what the name may have meant, or everything there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"


@dataclass(frozen=True)
class Param:
    """One typed parameter of a variant. `low` and `high` are inclusive bounds; a default of None means 'not set'."""

    name: str
    default: float | int | str | None
    doc: str
    type: type = float
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        """`value` in this parameter's type. Raises ValueError naming the parameter."""
        if value is None:
            if self.default is None:
                return None
            raise ValueError(f"{self.name}: None is not a value; leave it out for the default {self.default}")
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"{self.name}={value!r} is not one of {', '.join(self.choices)}")
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{self.name}={value!r} is not a number")
        if self.type is int and not float(value).is_integer():
            raise ValueError(f"{self.name}={value!r} is not a whole number")
        value = self.type(value)
        if (
            value != value
            or (self.low is not None and value < self.low)
            or (self.high is not None and value > self.high)
        ):
            raise ValueError(f"{self.name}={value} is outside [{self.low}, {self.high}]")
        return value


COMMON_PARAMS = (
    Param("beta", 0.04, "weight of the KL term", low=0.0, high=1e6),
    Param("epsilon", None, "lower clipping range of the ratio, 1 - epsilon; not set: no clipping", low=0.0),
    Param("epsilon_high", None, "upper clipping range, 1 + epsilon_high; not set: epsilon", low=0.0),
    Param(
        "sampling_mode",
        "sequence_truncate",
        "what corrects for the sampler: the ratio exp(o - mu) of a token or of the whole completion, cut off at "
        "sampling_clip_max (truncate) or set to 0 above it (mask)",
        type=str,
        choices=("sequence_truncate", "sequence_mask", "token_truncate", "token_mask"),
    ),
    Param("sampling_clip_max", 3.0, "upper bound of the sampling ratio", low=0.0),
)

Body = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Variant:
    """A loss variant, whole. The loss of a token is w x surrogate + beta x kl, w the correction for the sampler.

    Args:
        surrogate: body (n, o, a, <parameters by name>) -> (value, d value / d n), see `losses.elementwise`.
        kl: body (n, p, o, <parameters by name>) -> (value, d value / d n), or None: no KL term, whatever beta.
        ratio_level: "token", or "sequence": the surrogate is taken at the mean of n - o over the completion (GSPO).
        aggregation: how token losses become one number, see `losses.aggregation`.
        params: the variant's own parameters, beside beta, epsilon, epsilon_high, sampling_mode, sampling_clip_max.
        sequence_term: replaces the surrogate where it is no function of single tokens:
            (n, o, p, a, mask, inputs, params) -> (value (B,), d value / d n (B, T)); averaged over completions.
        vocabulary: the KL term is the exact divergence over the vocabulary, from `LossInputs.ref_hidden`.
        advantage: hook (rewards (B,), group_ids (B,)) -> advantages (B,); None: `losses.group_advantages`.
        shape_reward: hook (rewards (B,), n (B, T), p (B, T), mask (B, T), params) -> rewards (B,), before advantages.
        shape_advantage: hook (advantages (B, T), o (B, T), p (B, T), mask (B, T), params) -> advantages (B, T), applied
            in the loss where beta > 0; o and p are log-probs of the policy that drew the tokens and of the reference.
        kinks: ratios at which the surrogate has two slopes, as a function of the parameters, for the property tests.
        claims: what the variant is said to train, held against the result by `python -m ablate check` (`CLAIMS` in
            ablate/certificates/certify.py lists what can be claimed).
    """

    name: str
    summary: str
    formula: str
    paper: str
    surrogate: Body
    kl: Body | None = None
    ratio_level: Literal["token", "sequence"] = "token"
    aggregation: str = "sequence_mean"
    params: tuple[Param, ...] = ()
    sequence_term: Callable[..., tuple[Tensor, Tensor]] | None = None
    vocabulary: Literal["reverse_kl", "forward_kl"] | None = None
    advantage: Callable[[Tensor, Tensor], Tensor] | None = None
    shape_reward: Callable[..., Tensor] | None = None
    shape_advantage: Callable[..., Tensor] | None = None
    claims: dict[str, str] = field(default_factory=dict)

    @property
    def all_params(self) -> tuple[Param, ...]:
        return (*COMMON_PARAMS, *self.params)

    @property
    def token_level(self) -> bool:
        """Whether d loss / d n of a token is known from that token alone."""
        return self.ratio_level == "token" and self.sequence_term is None

    def resolve(self, given: dict[str, Any]) -> dict[str, Any]:
        """Every parameter's value: those given, checked, and the defaults. Raises ValueError naming what is unknown."""
        params = {p.name: p for p in self.all_params}
        for name in given:
            if name not in params:
                raise ValueError(f"variant {self.name!r} has no parameter {name!r}; {nearest(name, params)}")
        values = {name: p.check(given[name]) if name in given else p.default for name, p in params.items()}
        if values["epsilon_high"] is None:
            values["epsilon_high"] = values["epsilon"]
        return values


@dataclass
class LossInputs:
    """What a loss needs beside the policy. B completions padded to T tokens.

    Args:
        completion_ids: (B, T) int, the sampled tokens.
        completion_mask: (B, T) bool, int or float of 0 and 1; tokens with 0 enter nothing.
        advantages: (B,) or (B, T) float.
        old_per_token_logps: (B, T) float, o; None: on-policy, o = n without gradient.
        ref_per_token_logps: (B, T) float, p; needed where beta > 0 and the variant has a KL term on samples.
        sampling_per_token_logps: (B, T) float, mu, the sampler's own log-probs; None: no correction.
        num_items_in_batch: unmasked tokens of the whole accumulated batch, int or 0-d tensor; None: of this call.
        num_sequences_in_batch: completions with an unmasked token, likewise.
        group_ids: (B,) int, completions of one prompt share one.
        ref_hidden: (B, T, H) the reference model's hidden states, for a variant with a vocabulary level.
        ref_lm_head_weight: (V, H) the reference model's LM head; None: the policy's.
        ref_lm_head_bias: (V,) the bias of the reference model's LM head; None: the policy's.
    """

    completion_ids: Tensor
    completion_mask: Tensor
    advantages: Tensor
    old_per_token_logps: Tensor | None = None
    ref_per_token_logps: Tensor | None = None
    sampling_per_token_logps: Tensor | None = None
    num_items_in_batch: int | Tensor | None = None
    num_sequences_in_batch: int | Tensor | None = None
    group_ids: Tensor | None = None
    ref_hidden: Tensor | None = None
    ref_lm_head_weight: Tensor | None = None
    ref_lm_head_bias: Tensor | None = None


@dataclass(frozen=True)
class Metric:
    """A mean that pools rightly: add those of micro-batches or ranks, then take `.mean`. Both are 0-d tensors."""

    sum: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """sum / count, and 0 where nothing was counted."""
        return torch.where(self.count > 0, self.sum / self.count.clamp(min=1), torch.zeros_like(self.sum))

    def __add__(self, other: Metric) -> Metric:
        return Metric(self.sum + other.sum, self.count + other.count)


@dataclass(frozen=True)
class LossOutput:
    """loss: 0-d, with gradient. per_token_logps: (B, T), detached, 0 where masked. metrics: TRL's names."""

    loss: Tensor
    per_token_logps: Tensor
    metrics: dict[str, Metric]


_REGISTRY: dict[str, Variant] = {}
founding = ("reference", "no_detach", "full_reverse_kl", "forward_kl")


def register(variant: Variant) -> Variant:
    """Adds a variant. Raises ValueError where the name is taken or a body asks for a parameter the variant lacks."""
    if variant.name in _REGISTRY:
        raise ValueError(f"a loss variant named {variant.name!r} is registered already; choose another name")
    known = {p.name for p in variant.all_params}
    for kind, body in (("surrogate", variant.surrogate), ("kl", variant.kl)):
        for name in () if body is None else body_params(body):
            if name not in known:
                raise ValueError(f"{variant.name}: its {kind} takes {name!r}, which is no parameter of the variant")
    _REGISTRY[variant.name] = variant
    return variant


def body_params(body: Body, given: int = 3) -> tuple[str, ...]:
    """The names of a body's parameters, after its first `given` arguments."""
    return tuple(inspect.signature(body).parameters)[given:]


def names() -> list[str]:
    """The registered variants, in the order of registration: the founding four come first."""
    return list(_REGISTRY)


def get(name: str | Variant) -> Variant:
    """The variant of that name; a `Variant` stands for itself. Raises ValueError with the nearest names."""
    if isinstance(name, Variant):
        return name
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"unknown loss variant {name!r}; {nearest(str(name), _REGISTRY)}")
    return _REGISTRY[name]
