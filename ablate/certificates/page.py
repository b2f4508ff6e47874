"""The certificates as Markdown (losses/VARIANTS.md), as JSON and as a table in the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

import losses
from ablate.certificates import problems, words
from ablate.certificates.certify import CLAIMS, REGIMES, Certificate, group_advantages
from ablate.certificates.problems import BIASED, FORWARD, MEANING, REVERSE

ROWS = (
    ("k1 = n - p", "k1"),
    ("k2 = (n - p)^2 / 2", "k2"),
    ("k3 = exp(p - n) - (p - n) - 1", "k3"),
    ("exp(n) k3", "full_reverse_kl"),
    ("exp(p) (p - n)", "forward_kl"),
    ("r k1", "k1_is"),
    ("sg(r) k1", "k1_sg_is"),
    ("r k2", "k2_is"),
    ("sg(r) k2", "k2_sg_is"),
    ("r k3", "k3_is"),
    ("sg(r) k3", "k3_sg_is"),
    ("\\|k1\\|", "k1_abs"),
    ("r \\|k1\\|", "k1_abs_is"),
    ("sg(r) \\|k1\\|", "k1_abs_sg_is"),
    ("k1 in value, k2 in gradient", "k1_value_k2_grad"),
    ("k3 in value, k2 in gradient", "k3_value_k2_grad"),
    ("k1 in the reward", "kl_in_reward"),
    ("k1 in the reward, token by token", "kl_in_reward_token"),
    ("sum over the vocabulary of exp(n) k3", "exact_reverse_kl"),
    ("sum over the vocabulary of exp(p) (p - n)", "exact_forward_kl"),
)
"""KL terms and the variants that carry them."""


def kl_table(certificates: dict[str, Certificate]) -> list[dict[str, Any]]:
    """What each KL term trains on the bandit: expected gradients with respect to the logits, in full."""
    rows = []
    for term, name in ROWS:
        if name in certificates:
            found = {regime: certificates[name].find("kl", regime, words.BANDIT) for regime in REGIMES}
            gradients = {regime: None if c is None else c.gradient for regime, c in found.items()}
            labels = {regime: certificates[name].labels[f"kl {regime}"] for regime in REGIMES}
            rows.append({"term": term.replace("\\", ""), "variant": name, "gradient": gradients, "trains": labels})
    return rows


def truth() -> dict[str, Any]:
    """The bandit's true gradients and values."""
    bandit = problems.bandit()
    return {
        "gradients": {regime: {k: v.tolist() for k, v in problems.true_gradients(bandit, off).items()}
                      for regime, off in REGIMES.items()},
        "values": {regime: problems.true_values(bandit, off) for regime, off in REGIMES.items()},
    }  # fmt: skip


def as_json(certificates: list[Certificate]) -> dict[str, Any]:
    known = {c.variant.name: c for c in certificates}
    return {
        "certificates": [c.as_dict() for c in certificates],
        "kl_table": kl_table(known),
        "true": truth(),
        "group_advantages": group_advantages(),
        "problems": [text for c in certificates for text in words.problems_found(c)],
    }


def summary_cells(certificate: Certificate) -> list[str]:
    """Surrogate; KL on- and off-policy; variance; value; length; claims."""
    labels = certificate.labels
    on, off = (words.variance(certificate, regime) for regime in REGIMES)
    values = []
    for regime in REGIMES:
        found, label = certificate.find("kl", regime, words.BANDIT), labels.get(f"value {regime}")
        if found is not None and label is not None:
            target = words.value_target(certificate)
            values.append("exact" if label == target else words.signed(found.value_bias[target]))
    return [
        labels["surrogate on-policy"],
        labels["surrogate off-policy"],
        labels.get("kl on-policy", "none"),
        labels.get("kl off-policy", "none"),
        "" if on is None or off is None else f"{words.number(on)} / {words.number(off)}",
        " / ".join(values),
        labels.get("length", "no gradient"),
    ]


HEADERS = (
    "variant", "surrogate on-policy", "off-policy", "KL term on-policy", "off-policy", "variance on / off",
    "value bias on / off", "length",
)  # fmt: skip


def terminal_table(certificates: list[Certificate]) -> Table:
    """What each trains and how noisily, one line a variant that fits 80 columns; a broken one in red."""
    table = Table(
        title="What each loss trains",
        caption="variance: of the KL term's gradient from one token of the bandit, on/off-policy",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("variant", no_wrap=True)
    table.add_column("surrogate", min_width=15)
    table.add_column("KL on-policy")
    table.add_column("KL off-policy")
    table.add_column("variance", no_wrap=True)
    for c in certificates:
        surrogate, off, kl_on, kl_off, variance, *_ = summary_cells(c)
        both = surrogate if off in (surrogate, problems.LOCAL) else f"{surrogate}, {off} off-policy"
        cells = (c.variant.name, both, kl_on, kl_off, variance.replace(" ", ""))
        table.add_row(*cells, style="red" if words.problems_found(c) else None)
    return table


def markdown(certificates: list[Certificate]) -> str:
    """The page. The same text wherever it is made: rounded numbers of float64 sums, nothing of time or machine."""
    known = {c.variant.name: c for c in certificates}
    parts = ["# Loss variants\n\nMade by `python -m ablate check --write`; change the definitions, not this page.\n"]
    if {"k3_is", "reference", "full_reverse_kl", "exact_reverse_kl"} <= set(known):
        parts.append(f"## Is a Q missing?\n\n{words.answer(known)}\n")
    parts += [_terms(known), _summary(certificates), _how()]
    parts += ["## The variants\n", *(_variant(c, certificates) for c in certificates)]
    return "\n".join(parts).rstrip() + "\n"


def _rows(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def _terms(known: dict[str, Certificate]) -> str:
    here = truth()
    on, off = here["gradients"]["on-policy"], here["gradients"]["off-policy"]
    rows = [["KL term, as a loss on sampled tokens", "variant", "expected gradient on-policy", "off-policy"]]
    names = {v: t for t, v in ROWS}
    for row in kl_table(known):
        cells = [names[row["variant"]], f"`{row['variant']}`"]
        for regime in REGIMES:
            label = row["trains"][regime]
            said = "**biased**" if label == BIASED else label.replace("||", "\\|\\|")
            cells.append(f"{words.vector(row['gradient'][regime])} {said}")
        rows.append(cells)
    return (
        "## What each KL term trains\n\n"
        f"One token, policy q = {problems.Q}, reference {problems.REFERENCE}, off-policy sampler {problems.SAMPLER}; "
        f"gradients with respect to the logits, r = exp(n - sg(o)). True gradient of KL(q \\|\\| reference) = "
        f"{here['values']['on-policy'][REVERSE]:.4f}: {words.vector(on[REVERSE])}; of KL(reference \\|\\| q): "
        f"{words.vector(on[FORWARD])}; minus that of KL(sampler \\|\\| q): {words.vector(off[problems.AWAY])}.\n\n"
        f"{_rows(rows)}"
    )


def _summary(certificates: list[Certificate]) -> str:
    rows = [list(HEADERS)]
    for c in certificates:
        rows.append([f"`{c.variant.name}`", *(cell.replace("||", "\\|\\|") for cell in summary_cells(c))])
    return (
        "## Summary\n\nVariance of the gradient and bias of the value are of the KL term, for one token of the bandit; "
        "the value is held against the divergence that it is on-policy, or else against the reverse KL. 'Length' says "
        f"whether the surrogate keeps the policy gradient's direction where completions differ in length.\n\n"
        f"{_rows(rows)}"
    )


def _how() -> str:
    meaning = "\n".join(f"- **{name}**: {text}." for name, text in MEANING.items())
    groups = group_advantages()
    centred, normalised = groups["centred"], groups["normalised"]
    only = ", ".join(f"`{name}`" for name in losses.names() if losses.get(name).advantage is losses.centred_advantages)
    return (
        "## How to read the certificates\n\n"
        "Every completion of two small problems is run through `losses.policy_loss` (the exact KL through "
        "`losses.linear_policy_loss`) in float64, weighted with its probability, and the expected gradient is compared "
        "with true gradients found by differentiating the enumerated objective. The problems: a bandit (one token, "
        "three answers) and a tree (two tokens, nine completions, six parameters shared by all prefixes). Off-policy, "
        "completions come from another policy, which is also the old one. 'Exact' is to 1e-9, on both problems; "
        "relative errors are |gradient - true| / |true|. Each line is held against the claims in the variant's "
        "definition, and `python -m ablate check` fails where one does not hold.\n\n"
        f"What a term can train:\n\n{meaning}\n\n"
        "Advantages are taken as they are. Forming them in groups of four on the bandit leaves "
        f"{centred['scale']:.2f} of the policy gradient when they are centred ({only}: the direction is exact), and "
        f"{normalised['scale']:.2f} of it when they are divided by the group's deviation as well (the others), with "
        f"{normalised['across']:.2f} of the result across it.\n"
    )


def _variant(c: Certificate, certificates: list[Certificate]) -> str:
    v = c.variant
    # "k1 as a loss" keeps its small k.
    summary = v.summary if v.summary[1:2].isdigit() else v.summary[0].upper() + v.summary[1:]
    lines = [f"### `{v.name}`\n", f"{summary}.\n", f"```math\n{v.formula}\n```\n"]
    own = "".join(f"; `{p.name}` ({p.doc})" for p in v.params)
    lines.append(f"Source: {v.paper}. Aggregation: {losses.aggregation.AGGREGATIONS[v.aggregation]}{own}.\n")
    facts = [("Surrogate", words.surrogate(c))]
    if "kl on-policy" in c.labels:
        kl = words.trains(c, "kl")
        apart = words.whole_completions(c)
        facts.append(("KL term", f"{kl}; {apart}" if apart else kl))
        if "value on-policy" in c.labels:
            facts.append(("KL value", words.value(c)))
        facts.append(("Noise", words.noise(c, certificates)))
    facts += [("Length", words.length(c)), ("Clipping", words.clipping(c)), ("Arithmetic", words.behaviour(c))]
    if c.broken:
        facts.append(("**Broken claims**", "; ".join(str(b) for b in c.broken)))
    unclaimed = [name for name in CLAIMS if name in c.labels and name not in v.claims]
    if unclaimed:
        facts.append(("Not claimed", ", ".join(unclaimed)))
    lines.append("\n".join(f"- {name}: {text}." for name, text in facts) + "\n")
    return "\n".join(lines)
