"""From measurements to a certificate: what a variant trains, in words, and whether its own claims hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

import losses
from ablate.certificates import problems
from ablate.certificates.behaviour import Behaviour, examine
from ablate.certificates.measure import Measured, has_kl, measure, token_share
from ablate.certificates.problems import BIASED, NOTHING, Problem

EXACT = 1e-9  # relative: a gradient or value this near to a true one is that one
EPSILON = 0.2
TEMPERATURE = 0.7
REGIMES = {"on-policy": False, "off-policy": True}

_SURROGATE = (*problems.SURROGATE_TARGETS, NOTHING, BIASED)
_KL = (*problems.KL_TARGETS, NOTHING, BIASED)
_VALUE = (problems.REVERSE, problems.FORWARD, BIASED)
CLAIMS: dict[str, tuple[str, ...]] = {
    "surrogate on-policy": _SURROGATE,
    "surrogate off-policy": _SURROGATE,
    "kl on-policy": _KL,
    "kl off-policy": _KL,
    "value on-policy": _VALUE,
    "value off-policy": _VALUE,
    "length": ("unbiased", BIASED),
}
"""What a variant can claim, and the answers there are (`problems.MEANING` says what they mean).

surrogate, kl: whose gradient the term has on average; value: what the KL term's number is on average; length: whether
the surrogate keeps the policy gradient's direction where completions differ in length.
"""


@dataclass(frozen=True)
class Comparison:
    """One part of a variant on one problem in one regime, per token sum: the completion's mean times its length."""

    problem: str
    regime: str
    part: str
    gradient: list[float]
    variance: float
    value: float
    value_deviation: float
    relative: dict[str, float]  # |g - target| / |target| by target
    matches: dict[str, float]  # targets that the gradient is exactly a multiple of, and the multiple
    value_bias: dict[str, float]  # value - true value, by divergence


@dataclass(frozen=True)
class Broken:
    """A claim that does not hold."""

    claim: str
    said: str
    found: str

    def __str__(self) -> str:
        return f"claims {self.claim!r}: {self.said!r}, but the result is {self.found!r}"


@dataclass(frozen=True)
class Certificate:
    """All that was found for one variant. labels: one answer for each claim that applies."""

    variant: losses.Variant
    labels: dict[str, str]
    comparisons: list[Comparison]
    length_error: float | None
    clipping: dict[str, dict[str, float]]  # regime -> problem -> relative change of the surrogate's gradient
    temperature: str
    behaviour: Behaviour
    broken: list[Broken]

    def find(self, part: str, regime: str, problem: str) -> Comparison | None:
        wanted = (part, regime, problem)
        return next((c for c in self.comparisons if (c.part, c.regime, c.problem) == wanted), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {k: v for k, v in vars(self).items() if k not in ("variant", "comparisons", "behaviour", "broken")}
        return {
            "variant": self.variant.name,
            **found,
            "claims": self.variant.claims,
            "broken": [asdict(b) for b in self.broken],
            "behaviour": asdict(self.behaviour),
            "comparisons": [asdict(c) for c in self.comparisons],
        }


def compare(variant: losses.Variant, problem: Problem, part: str, regime: str, measured: Measured) -> Comparison:
    off_policy = REGIMES[regime]
    share = token_share(variant, problem)
    gradient = measured.gradient / share
    names = problems.SURROGATE_TARGETS if part == "surrogate" else problems.KL_TARGETS
    true = {k: v for k, v in problems.true_gradients(problem, off_policy).items() if k in names and v.norm() > 1e-12}
    values = problems.true_values(problem, off_policy)
    return Comparison(
        problem=problem.name,
        regime=regime,
        part=part,
        gradient=gradient.tolist(),
        variance=measured.variance / share**2,
        value=measured.value / share,
        value_deviation=measured.value_deviation / share,
        relative={k: float((gradient - v).norm() / v.norm()) for k, v in true.items()},
        matches=match(gradient, true),
        value_bias={k: measured.value / share - values[k] for k in (problems.REVERSE, problems.FORWARD)},
    )


def match(gradient: Tensor, true: dict[str, Tensor]) -> dict[str, float]:
    """The targets that `gradient` is a positive multiple of, to EXACT, and the multiples."""
    if float(gradient.norm()) <= 1e-12:
        return {NOTHING: 1.0}
    found = {}
    for name, target in true.items():
        scale = float(gradient @ target / (target @ target))
        if scale > 0 and float((gradient - scale * target).norm()) <= EXACT * float(gradient.norm()):
            found[name] = scale
    return found


def label(comparisons: list[Comparison], order: tuple[str, ...]) -> str:
    """The first target of `order` that the gradient is the same multiple of on every problem."""
    for name in order:
        scales = [c.matches.get(name) for c in comparisons]
        known = [scale for scale in scales if scale is not None]
        if len(known) == len(scales) and max(known) - min(known) <= EXACT * max(known):
            return name if abs(known[0] - 1) <= EXACT else f"{known[0]:.4g} x {name}"
    return BIASED


def value_label(comparisons: list[Comparison]) -> str:
    for name in (problems.REVERSE, problems.FORWARD):
        if all(abs(c.value_bias[name]) <= EXACT for c in comparisons):
            return name
    return BIASED


def certify(variant: losses.Variant) -> Certificate:
    """Everything about one variant, by enumeration; seconds at most."""
    fixed = [problems.bandit(), problems.tree()]
    parts = ("surrogate", "kl") if has_kl(variant) else ("surrogate",)
    comparisons, labels = [], {}
    for part in parts:
        order = (*(problems.SURROGATE_TARGETS if part == "surrogate" else problems.KL_TARGETS), NOTHING)
        for regime, off_policy in REGIMES.items():
            here = [compare(variant, x, part, regime, measure(variant, x, part, off_policy=off_policy)) for x in fixed]
            comparisons += here
            labels[f"{part} {regime}"] = label(here, order)
            if part == "kl" and (variant.kl is not None or variant.vocabulary is not None):
                labels[f"value {regime}"] = value_label(here)
    length_error = _length_error(variant)
    if length_error is not None:
        labels["length"] = "unbiased" if length_error <= EXACT else BIASED
    ordered = {name: labels[name] for name in CLAIMS if name in labels}
    return Certificate(
        variant=variant,
        labels=ordered,
        comparisons=comparisons,
        length_error=length_error,
        clipping=_clipping(variant, fixed),
        temperature=_temperature(variant, parts, comparisons),
        behaviour=examine(variant),
        broken=broken_claims(variant, ordered),
    )


def broken_claims(variant: losses.Variant, labels: dict[str, str]) -> list[Broken]:
    """Claims that the result contradicts, that nobody can make, or that do not apply to the variant."""
    found = []
    for claim, said in variant.claims.items():
        if claim not in CLAIMS:
            found.append(Broken(claim, said, f"no such claim; {losses.spec.nearest(claim, CLAIMS)}"))
        elif claim not in labels:
            found.append(Broken(claim, said, "does not apply: the variant has no such part"))
        elif labels[claim] != said:
            found.append(Broken(claim, said, labels[claim]))
    return found


def _length_error(variant: losses.Variant) -> float | None:
    """How far the surrogate's direction is from the policy gradient's where a token may end the completion: the part of
    the gradient across it, relative. None where there is no gradient."""
    problem = problems.tree(stop=True)
    gradient = measure(variant, problem, "surrogate", off_policy=False).gradient
    true = problems.true_gradients(problem, False)[problems.POLICY_GRADIENT]
    if float(gradient.norm()) <= 1e-12:
        return None
    return float((gradient - gradient @ true / (true @ true) * true).norm() / gradient.norm())


def _clipping(variant: losses.Variant, fixed: list[Problem]) -> dict[str, dict[str, float]]:
    changes: dict[str, dict[str, float]] = {}
    for regime, off_policy in REGIMES.items():
        changes[regime] = {}
        for problem in fixed:
            free, held = (
                measure(variant, problem, "surrogate", off_policy=off_policy, epsilon=e).gradient
                for e in (None, EPSILON)
            )
            changes[regime][problem.name] = float((held - free).norm() / free.norm().clamp(min=1e-300))
    return changes


def _temperature(variant: losses.Variant, parts: tuple[str, ...], comparisons: list[Comparison]) -> str:
    """ "holds" where, with all logits divided by a temperature, the bandit's gradients match what they matched at 1."""
    problem = problems.bandit().at_temperature(TEMPERATURE)
    for part, (regime, off_policy) in product(parts, REGIMES.items()):
        there = next(c for c in comparisons if (c.part, c.regime, c.problem) == (part, regime, problem.name))
        here = compare(variant, problem, part, regime, measure(variant, problem, part, off_policy=off_policy))
        if set(here.matches) != set(there.matches):
            return f"{part} {regime} no longer matches {', '.join(there.matches) or 'what it did'}"
    return "holds"


def group_advantages() -> dict[str, dict[str, float]]:
    """What forming advantages in groups of four does to the bandit's policy gradient, over all 81 groups: the multiple
    of it that is left, and the part of the result across it, relative."""
    problem, found = problems.bandit(), {}
    true = -problems.true_gradients(problem, False)[problems.POLICY_GRADIENT]
    drawn, ids = problem.probabilities(problem.policy), torch.zeros(4, dtype=torch.long)
    for name, hook in (("centred", losses.centred_advantages), ("normalised", losses.group_advantages)):
        total = torch.zeros_like(true)
        for group in product(range(3), repeat=4):
            index = torch.tensor(group)
            advantages = hook(problem.rewards[index], ids).double()
            total += drawn[index].prod() * (advantages @ problem.jacobian[index, 0]) / 4
        scale = float(total @ true / (true @ true))
        found[name] = {"scale": scale, "across": float((total - scale * true).norm() / total.norm())}
    return found
