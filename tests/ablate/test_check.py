"""Certificates: the printed table against an enumeration in numpy, planted claims, the page, the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from rich.console import Console

import losses
from ablate import check as checks
from ablate.certificates import page, problems, words
from ablate.certificates.behaviour import examine
from ablate.certificates.certify import CLAIMS, certify, compare
from ablate.certificates.measure import measure
from ablate.cli import main as command
from ablate.errors import ConfigError

Q, P, MU, A = (np.array(x) for x in ((0.7, 0.2, 0.1), (0.2, 0.3, 0.5), (0.5, 0.3, 0.2), (1.0, -1.0, 0.5)))


@pytest.fixture(scope="module")
def certificates() -> dict[str, checks.Certificate]:
    return {c.variant.name: c for c in checks.check(checks.select("family"))}


# The table, from scratch ----------------------------------------------------------------------------------------------

X = np.log(Q / P)  # n - p
R = Q / MU
SLOPES = {
    # d term / d n by hand, as a function of the ratio r: (on-policy r = 1)
    "k1": lambda r: np.ones(3),
    "k1_sg_is": lambda r: r,
    "k1_is": lambda r: r * (X + 1),
    "k2": lambda r: X,
    "k2_sg_is": lambda r: r * X,
    "k2_is": lambda r: r * (X + X**2 / 2),
    "k3": lambda r: 1 - P / Q,
    "reference": lambda r: 1 - P / Q,
    "k3_sg_is": lambda r: r * (1 - P / Q),
    "k3_is": lambda r: r * X,
    "k1_abs": lambda r: np.sign(X),
    "k1_abs_sg_is": lambda r: r * np.sign(X),
    "k1_abs_is": lambda r: r * (np.abs(X) + np.sign(X)),
    "k1_value_k2_grad": lambda r: X,
    "k3_value_k2_grad": lambda r: X,
    "full_reverse_kl": lambda r: Q * X,
    "forward_kl": lambda r: -P,
    "kl_in_reward": lambda r: r * (X - np.log(r)),  # o - p, fixed when the completion was drawn
    "kl_in_reward_token": lambda r: r * (X - np.log(r)),
}


def expected(slopes: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """sum_y drawn_y slope_y (onehot_y - q): the gradient with respect to the logits."""
    return drawn * slopes - (drawn * slopes).sum() * Q


@pytest.mark.parametrize("regime", ["on-policy", "off-policy"])
@pytest.mark.parametrize("name", SLOPES)
def test_every_cell_of_the_table(certificates, name, regime):
    r, drawn = (np.ones(3), Q) if regime == "on-policy" else (R, MU)
    want = expected(SLOPES[name](r), drawn)
    found = certificates[name].find("kl", regime, "bandit")
    np.testing.assert_allclose(found.gradient, want, rtol=0, atol=1e-9)
    per_sample = SLOPES[name](r)[:, None] * (np.eye(3) - Q)
    variance = drawn @ (per_sample**2).sum(1) - (want**2).sum()
    assert found.variance == pytest.approx(variance, abs=1e-9)


@pytest.mark.parametrize("regime", ["on-policy", "off-policy"])
def test_the_exact_divergences(certificates, regime):
    reverse, forward = Q * (X - (Q * X).sum()), Q - P
    for name, want in (("exact_reverse_kl", reverse), ("exact_forward_kl", forward)):
        found = certificates[name].find("kl", regime, "bandit")
        np.testing.assert_allclose(found.gradient, want, rtol=0, atol=1e-9)
        assert found.variance < 1e-20
    true = page.truth()["gradients"][regime]
    np.testing.assert_allclose(true["reverse KL"], reverse, rtol=0, atol=1e-12)
    np.testing.assert_allclose(true["forward KL"], forward, rtol=0, atol=1e-12)
    away = np.zeros(3) if regime == "on-policy" else MU - Q
    np.testing.assert_allclose(true["minus KL(sampler || policy)"], away, rtol=0, atol=1e-12)


PRINTED = [
    ("k1", "off-policy", (-0.2, 0.1, 0.1), 4),
    ("k2", "on-policy", (0.4325, -0.2081, -0.2244), 4),
    ("k2", "off-policy", (0.498, -0.158, -0.340), 3),
    ("k3", "on-policy", (0.5, -0.1, -0.4), 4),
    ("k3", "off-policy", (0.772, -0.031, -0.741), 3),
    ("full_reverse_kl", "on-policy", (0.207, -0.133, -0.074), 3),
    ("forward_kl", "on-policy", (0.035, -0.010, -0.025), 3),
    ("k3_is", "off-policy", (0.4325, -0.2081, -0.2244), 4),
    ("k2_sg_is", "off-policy", (0.4325, -0.2081, -0.2244), 4),
    ("k2_is", "on-policy", (0.495, -0.331, -0.164), 3),
    ("k3_sg_is", "off-policy", (0.5, -0.1, -0.4), 4),
]


@pytest.mark.parametrize(("name", "regime", "printed", "digits"), PRINTED)
def test_figures_from_the_literature(certificates, name, regime, printed, digits):
    found = certificates[name].find("kl", regime, "bandit").gradient
    np.testing.assert_allclose(found, printed, rtol=0, atol=0.5 * 10**-digits + 1e-9)


def test_the_surrogate(certificates):
    want = -Q * (A - (Q * A).sum())
    np.testing.assert_allclose(want, [-0.3150, 0.3100, 0.0050], atol=5e-5)
    for name, certificate in certificates.items():
        for regime in ("on-policy", "off-policy"):
            found = certificate.find("surrogate", regime, "bandit").gradient
            np.testing.assert_allclose(found, np.zeros(3) if name == "no_detach" else want, rtol=0, atol=1e-12)


# The tree, by numerical differentiation of enumerated sums ------------------------------------------------------------

STATES = np.array([[1.0, 0.0], [0.6, 0.8], [-0.5, 0.7], [0.3, -0.9]])


def tree_objectives(policy: np.ndarray, problem: problems.Problem, source: np.ndarray) -> dict[str, float]:
    """What the tree's true objectives are, in numpy, completion by completion."""

    def token(w: np.ndarray, state: int) -> np.ndarray:
        z = STATES[state] @ w.T
        return np.exp(z - z.max()) / np.exp(z - z.max()).sum()

    reference, rewards = problem.reference.numpy(), problem.rewards.numpy().reshape(3, 3)
    found = dict.fromkeys(("policy gradient", "reverse KL", "forward KL", "sequence reverse KL"), 0.0)
    q1, p1, s1 = token(policy, 0), token(reference, 0), token(source, 0)
    found["reverse KL"] += (q1 * np.log(q1 / p1)).sum()
    found["forward KL"] += (p1 * np.log(p1 / q1)).sum()
    for a in range(3):
        q2, p2 = token(policy, 1 + a), token(reference, 1 + a)
        found["reverse KL"] += s1[a] * (q2 * np.log(q2 / p2)).sum()
        found["forward KL"] += s1[a] * (p2 * np.log(p2 / q2)).sum()
        for b in range(3):
            both = q1[a] * q2[b]
            found["policy gradient"] -= both * rewards[a, b]
            found["sequence reverse KL"] += both * np.log(both / (p1[a] * p2[b]))
    return found


@pytest.mark.parametrize("off_policy", [False, True])
def test_true_gradients_of_the_tree(off_policy):
    problem = problems.tree()
    policy = problem.policy.numpy()
    source = problem.source(off_policy).numpy()
    true = problems.true_gradients(problem, off_policy)
    step = 1e-5
    for index in itertools.product(range(3), range(2)):
        nudge = np.zeros((3, 2))
        nudge[index] = step
        up, down = (tree_objectives(policy + sign * nudge, problem, source) for sign in (1, -1))
        for name in up:
            slope = (up[name] - down[name]) / (2 * step)
            assert float(true[name].reshape(3, 2)[index]) == pytest.approx(slope, abs=1e-8), (name, index)


def test_probabilities_sum_to_one_and_differ():
    for problem in (problems.bandit(), problems.tree(), problems.tree(stop=True)):
        for weight in (problem.policy, problem.reference, problem.sampler):
            assert float(problem.probabilities(weight).sum()) == pytest.approx(1, abs=1e-14)
        assert float((problem.policy - problem.sampler).abs().min()) > 1e-3


# Claims ---------------------------------------------------------------------------------------------------------------


def test_every_variant_claims_everything_and_every_claim_holds(certificates):
    assert list(certificates) == losses.names()
    for name, certificate in certificates.items():
        assert words.problems_found(certificate) == []
        assert certificate.variant.claims == certificate.labels, name
        assert set(certificate.labels) <= set(CLAIMS)
        assert all(label in CLAIMS[claim] for claim, label in certificate.labels.items())


def planted(**changes) -> losses.Variant:
    return dataclasses.replace(losses.get("reference"), name="planted", **changes)


@pytest.mark.parametrize(
    ("claim", "said", "found"),
    [
        ("kl on-policy", "reverse KL", "forward KL"),
        ("kl off-policy", "forward KL", "biased"),
        ("surrogate on-policy", "nothing", "policy gradient"),
        ("value on-policy", "biased", "reverse KL"),
        ("length", "unbiased", "biased"),
        ("kl of-policy", "biased", "kl off-policy"),
    ],
)
def test_a_planted_claim_is_found(claim, said, found):
    certificate = certify(planted(claims={**losses.get("reference").claims, claim: said}))
    (line,) = words.problems_found(certificate)
    assert "planted" in line and claim in line and said in line and found in line


def test_a_planted_claim_makes_the_command_fail(monkeypatch, capsys):
    """The exit code is not 0 and the output names the variant and the claim."""
    wrong = planted(claims={"kl on-policy": "reverse KL"})
    monkeypatch.setitem(losses.spec._REGISTRY, "planted", wrong)
    with pytest.raises(SystemExit) as caught:
        command(["check", "variants=planted"])
    assert caught.value.code == 1
    shown = capsys.readouterr().out
    assert "FAILED planted claims 'kl on-policy': 'reverse KL', but the result is 'forward KL'" in shown


def test_a_wrong_derivative_is_found():
    def kl(n, p, o):
        x = p - n
        return torch.exp(x) - x - 1.0, torch.exp(x) - 1.0  # the sign

    certificate = certify(planted(kl=kl))
    assert any("derivative" in line for line in words.problems_found(certificate))
    assert certificate.labels["kl on-policy"] == "biased"


def test_a_multiple_is_said():
    def kl(n, p, o):
        x = n - p
        return x * x, 2.0 * x

    certificate = certify(planted(kl=kl))
    assert certificate.labels["kl on-policy"] == "2 x reverse KL"


def test_a_variant_that_looks_at_the_rest_of_its_batch_is_found():
    changed = examine(planted(shape_advantage=lambda a, o, p, mask, params: a + len(mask)))
    assert [failure.split(":")[0] for failure in changed.failures()] == ["truncation", "accumulation"]


# Sharper facts --------------------------------------------------------------------------------------------------------


def test_kl_in_the_reward_trains_the_kl_of_completions(certificates):
    for name in ("kl_in_reward", "kl_in_reward_token"):
        tree = certificates[name].find("kl", "on-policy", "two-step tree")
        assert tree.relative["sequence reverse KL"] < 1e-12 and tree.relative["reverse KL"] > 0.01
    whole, to_go = (
        certificates[n].find("kl", "on-policy", "two-step tree") for n in ("kl_in_reward", "kl_in_reward_token")
    )
    assert to_go.variance < 0.6 * whole.variance


def test_the_unbiased_terms_by_noise(certificates):
    """exact < k3_is = k2_sg_is < k1_is, on- and off-policy, on both problems."""
    for regime, problem in itertools.product(("on-policy", "off-policy"), ("bandit", "two-step tree")):
        exact, k3, k2, k1 = (
            certificates[n].find("kl", regime, problem).variance
            for n in ("exact_reverse_kl", "k3_is", "k2_sg_is", "k1_is")
        )
        assert exact < k3 < k1 and k3 == pytest.approx(k2, rel=1e-9)


def test_clipping_changes_the_surrogate_off_policy_only(certificates):
    for name, certificate in certificates.items():
        assert max(certificate.clipping["on-policy"].values()) == 0
        assert (min(certificate.clipping["off-policy"].values()) > 0.1) == (name != "no_detach")


def test_length(certificates):
    unbiased = {name for name, c in certificates.items() if c.labels.get("length") == "unbiased"}
    assert unbiased == {"dapo", "dr_grpo"}


def test_group_advantages_by_hand():
    """Centred: three quarters of the policy gradient in groups of four. Divided by the deviation: another direction."""
    found = page.group_advantages()
    assert found["centred"]["scale"] == pytest.approx(0.75, abs=1e-6) and found["centred"]["across"] < 1e-6
    assert found["normalised"]["across"] > 0.05


def test_temperature_is_part_of_the_problem():
    warm = problems.bandit().at_temperature(2.0)
    found = compare(
        losses.get("k3_is"), warm, "kl", "on-policy", measure(losses.get("k3_is"), warm, "kl", off_policy=False)
    )
    q, p = (np.sqrt(x) / np.sqrt(x).sum() for x in (Q, P))
    want = q * (np.log(q / p) - (q * np.log(q / p)).sum()) / 2
    np.testing.assert_allclose(found.gradient, want, rtol=0, atol=1e-12)


# The page and the command ---------------------------------------------------------------------------------------------


def test_the_committed_page_is_current(certificates):
    assert checks.page_path().read_text(encoding="utf-8") == page.markdown(list(certificates.values())), (
        "run `python -m ablate check --write`"
    )


def test_the_page_answers_and_shows_every_variant(certificates):
    text = checks.page_path().read_text(encoding="utf-8")
    assert text.index("## Is a Q missing?") < text.index("## What each KL term trains") < text.index("## Summary")
    assert words.answer(certificates) in text
    for figure in ("(0.4325, -0.2081, -0.2244)", "(0.5000, -0.1000, -0.4000)", "(0.2068, -0.1325, -0.0742)"):
        assert figure in words.answer(certificates)
    for name in losses.names():
        assert f"### `{name}`" in text and losses.get(name).formula in text and losses.get(name).paper in text
    width = {}
    for line in text.splitlines():
        if line.startswith("|"):
            width.setdefault(line.replace("\\|", "").count("|"), []).append(line)
    assert set(width) == {5, 9}, "a cell holds an unescaped bar"


def test_a_stale_page_is_found(monkeypatch, tmp_path, capsys):
    stale = tmp_path / "VARIANTS.md"
    monkeypatch.setattr(checks, "page_path", lambda: stale)
    monkeypatch.setattr(losses, "names", lambda: ["k2", "k3_is"])
    assert checks.main(write=True, console=Console(width=100)) == 0
    assert checks.main(check_current=True, console=Console(width=100)) == 0
    stale.write_text(
        stale.read_text(encoding="utf-8").replace("exact reverse KL", "exact forward KL"), encoding="utf-8"
    )
    assert checks.main(check_current=True, console=Console(width=100)) == 1
    assert "not current" in capsys.readouterr().out


def test_json_and_markdown(tmp_path):
    result = checks.main(
        ["variants=k3_is,reference"], json_path=tmp_path / "c.json", markdown_path=tmp_path / "c.md",
        console=Console(width=100, quiet=True),
    )  # fmt: skip
    assert result == 0
    found = json.loads((tmp_path / "c.json").read_text(encoding="utf-8"))
    assert [c["variant"] for c in found["certificates"]] == ["k3_is", "reference"]
    assert found["certificates"][0]["labels"]["kl off-policy"] == "reverse KL"
    (row,) = found["kl_table"]
    np.testing.assert_allclose(row["gradient"]["off-policy"], Q * (X - (Q * X).sum()), rtol=0, atol=1e-12)
    assert found["problems"] == []
    assert "### `k3_is`" in (tmp_path / "c.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["variants=k3_si"], "k3_is"),
        (["variant=k3"], "variants"),
        (["variants="], "variants"),
        (["variants=,"], "variants"),
    ],
)
def test_refusals(given, said):
    with pytest.raises(ConfigError, match=said):
        checks.main(given, console=Console(quiet=True))


def test_a_part_of_the_family_is_no_page():
    with pytest.raises(ConfigError, match="every variant"):
        checks.main(["variants=all"], write=True, console=Console(quiet=True))


def test_selection():
    assert [v.name for v in checks.select("all")] == list(losses.founding)
    assert [v.name for v in checks.select("family")] == losses.names()
    assert [v.name for v in checks.select("k2, k3_is,k2")] == ["k2", "k3_is"]


def test_the_command_is_quick_and_needs_no_trainer(root):
    code = (
        "import sys, ablate.cli\n"
        "try: ablate.cli.main(['check', 'variants=k2'])\n"
        "except SystemExit as end: print('exit', end.code, sorted({'trl', 'triton'} & set(sys.modules)))"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert "exit 0 []" in done.stdout
    assert time.monotonic() - start < 60
