"""Certificates in words and numbers: sentences, table cells, and the answer to 'is a Q missing?'."""

from __future__ import annotations

from collections.abc import Iterable

from ablate.certificates import problems
from ablate.certificates.behaviour import FAR, FLOAT16_ERROR
from ablate.certificates.certify import EPSILON, EXACT, REGIMES, TEMPERATURE, Certificate, Comparison
from ablate.certificates.problems import (
    AWAY,
    BIASED,
    FORWARD,
    LOCAL,
    NOTHING,
    POLICY_GRADIENT,
    REVERSE,
    SEQUENCE_REVERSE,
)

BANDIT, TREE = problems.bandit().name, problems.tree().name


def number(x: float, digits: int = 3) -> str:
    """Significant digits, and a plain 0 for what is 0 but for rounding."""
    return "0" if abs(x) < 1e-12 else f"{x:.{digits}g}"


def signed(x: float) -> str:
    return "0" if abs(x) <= EXACT else f"{x:+.4f}"


def vector(xs: Iterable[float], digits: int = 4) -> str:
    return "(" + ", ".join(f"{round(x, digits) + 0.0:.{digits}f}" for x in xs) + ")"


def nearest(comparison: Comparison) -> str:
    """The one of the two divergences, or of the policy gradients, that a gradient is least far from."""
    among = (REVERSE, FORWARD) if comparison.part == "kl" else (POLICY_GRADIENT, LOCAL)
    return min(among, key=lambda name: comparison.relative[name])


def _the(label: str) -> str:
    if label == NOTHING:
        return "nothing on average"
    if label == AWAY:
        return f"{AWAY} (away from the sampler, whatever the reference)"
    return f"exact {label}"


def trains(certificate: Certificate, part: str) -> str:
    """'exact forward KL on-policy; biased off-policy, 0.68 relative (0.29 on the tree; nearest: the forward KL)'."""
    labels = {regime: certificate.labels[f"{part} {regime}"] for regime in REGIMES}
    if labels["on-policy"] == labels["off-policy"] != BIASED:
        return f"{_the(labels['on-policy'])}, on- and off-policy"
    said = []
    for regime, label in labels.items():
        if label != BIASED:
            said.append(f"{_the(label)} {regime}")
            continue
        bandit, tree = (certificate.find(part, regime, name) for name in (BANDIT, TREE))
        assert bandit is not None and tree is not None
        if bandit.matches:
            target = nearest(tree)
            fact = f"{tree.relative[target]:.2f} relative on the tree (nearest: the {target})"
        else:
            target = nearest(bandit)
            on_tree = f"{tree.relative[target]:.2f} on the tree"
            fact = f"{bandit.relative[target]:.2f} relative ({on_tree}; nearest: the {target})"
        said.append(f"biased {regime}, {fact}")
    return "; ".join(said)


def surrogate(certificate: Certificate) -> str:
    found = [c for c in certificate.comparisons if c.part == "surrogate"]
    if max(c.variance for c in found) <= EXACT and certificate.labels["surrogate on-policy"] == NOTHING:
        return "nothing: its gradient is zero on every completion"
    text = trains(certificate, "surrogate")
    tree = certificate.find("surrogate", "off-policy", TREE)
    if tree is not None and certificate.labels["surrogate off-policy"] == LOCAL:
        text += f" ({tree.relative[POLICY_GRADIENT]:.2f} relative from the policy gradient on the tree)"
    return text


def value_target(certificate: Certificate) -> str:
    """The divergence that a KL term's value is measured against: the one that it is on-policy, else the reverse KL."""
    label = certificate.labels["value on-policy"]
    return REVERSE if label == BIASED else label


def value(certificate: Certificate) -> str:
    """The KL term's number on average: what it equals, or by how much it misses on the bandit."""
    target, said = value_target(certificate), []
    for regime in REGIMES:
        bandit = certificate.find("kl", regime, BANDIT)
        assert bandit is not None
        exact = certificate.labels[f"value {regime}"] == target
        fact = f"exact {target}" if exact else f"{signed(bandit.value_bias[target])} off the {target}"
        said.append(f"{fact} {regime} (deviation of one token {number(bandit.value_deviation)})")
    return "; ".join(said)


def variance(certificate: Certificate, regime: str, problem: str = BANDIT) -> float | None:
    found = certificate.find("kl", regime, problem)
    return None if found is None else found.variance


def noise(certificate: Certificate, others: list[Certificate]) -> str:
    """The KL term's variance beside that of the other terms that train the same thing on-policy."""

    def pair(of: Certificate, problem: str) -> str:
        found = (variance(of, regime, problem) for regime in REGIMES)
        return " / ".join(number(x or 0.0) for x in found)

    text = (
        f"variance of the gradient on- / off-policy {pair(certificate, BANDIT)} (on the tree {pair(certificate, TREE)})"
    )
    label = certificate.labels["kl on-policy"]
    if label in (NOTHING, BIASED):
        return text
    rivals: dict[str, str] = {}
    for other in others:
        same_term = other.variant.kl is certificate.variant.kl is not None
        if other.labels.get("kl on-policy") != label or same_term or other.variant.name == certificate.variant.name:
            continue
        stays = "" if other.labels["kl off-policy"] == label else ", biased off-policy"
        numbers = f"{pair(other, BANDIT)} ({pair(other, TREE)}){stays}"
        rivals.setdefault(numbers, other.variant.name)
    if rivals:
        ranked = sorted(rivals.items(), key=lambda item: float(item[0].split(" ")[0]))
        text += f"; others with the {label} on-policy: " + ", ".join(f"`{name}` {numbers}" for numbers, name in ranked)
    return text


def whole_completions(certificate: Certificate) -> str | None:
    """How far a next-token KL is from the KL between completions."""
    label, tree = certificate.labels.get("kl on-policy"), certificate.find("kl", "on-policy", TREE)
    if tree is None or label != REVERSE:
        return None
    return f"{tree.relative[SEQUENCE_REVERSE]:.3f} relative from the KL between whole completions on the tree"


def length(certificate: Certificate) -> str:
    if certificate.length_error is None:
        return "no gradient to be biased"
    if certificate.labels["length"] == BIASED:
        return (
            f"where completions differ in length, {certificate.length_error:.2f} of the gradient lies across the "
            "policy gradient: a token of a short completion weighs more"
        )
    return "keeps the policy gradient's direction where completions differ in length"


def clipping(certificate: Certificate) -> str:
    on, off = (certificate.clipping[regime] for regime in ("on-policy", "off-policy"))
    if max(*on.values(), *off.values()) <= EXACT:
        return f"epsilon {EPSILON} changes nothing"
    said = "leaves the on-policy gradient as it is" if max(on.values()) <= EXACT else f"changes it by {on[BANDIT]:.2f}"
    return (
        f"epsilon {EPSILON} {said} and changes the surrogate's off-policy by {off[BANDIT]:.2f} relative "
        f"({off[TREE]:.2f} on the tree); the KL term is never clipped"
    )


def behaviour(certificate: Certificate) -> str:
    found = certificate.behaviour.failures()
    if certificate.temperature != "holds":
        found.append(f"temperature: {certificate.temperature}")
    text = "; ".join(f"FAILS {failure}" for failure in found) or (
        "derivative equal to autograd; padding, masked-out completions and accumulation change nothing; the same at "
        f"temperature {TEMPERATURE}; float16 under GradScaler within {FLOAT16_ERROR} of float64"
    )
    if certificate.behaviour.overflow != "none":
        text += f"; infinite in float32 at {FAR:.0f} nats ({certificate.behaviour.overflow})"
    return text


def problems_found(certificate: Certificate) -> list[str]:
    """Everything that makes a check fail."""
    name = certificate.variant.name
    found = [f"{name} {broken}" for broken in certificate.broken]
    found += [f"{name}: {failure}" for failure in certificate.behaviour.failures()]
    if certificate.temperature != "holds":
        found.append(f"{name}: at temperature {TEMPERATURE} {certificate.temperature}")
    return found


def answer(certificates: dict[str, Certificate]) -> str:
    """'Is a Q missing?', in two sentences with the numbers of the bandit."""

    def gradient(name: str) -> str:
        found = certificates[name].find("kl", "on-policy", BANDIT)
        assert found is not None
        return vector(found.gradient)

    def away(name: str, target: str) -> str:
        found = certificates[name].find("kl", "on-policy", BANDIT)
        assert found is not None
        return f"{found.relative[target]:.2f}"

    reverse, forward = (away("full_reverse_kl", target) for target in (REVERSE, FORWARD))
    return (
        "What is missing from the k3 term on sampled tokens is not Q but the ratio Q / sg(Q_old), its gradient kept: "
        f"with it (`k3_is`) the expected gradient is that of the reverse KL, {gradient('k3_is')} on the test problem, "
        "on- and off-policy, without it (`reference`) that of the forward KL, "
        f"{gradient('reference')}, and only on-policy. Multiplying by Q itself (`full_reverse_kl`) counts the "
        f"sampling twice and gives {gradient('full_reverse_kl')}, an error of {reverse} relative to the reverse and of "
        f"{forward} "
        "to the forward KL; Q belongs only where the sum runs over the whole vocabulary (`exact_reverse_kl`)."
    )
