"""The registry: names, look-up, refusals, parameters, and that no variant goes without an oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import losses
from tests import oracles_kl
from tests.losses.common import DEFINITIONS


def test_the_founding_four_come_first():
    four = ["reference", "no_detach", "full_reverse_kl", "forward_kl"]
    assert list(losses.founding) == four
    assert losses.names()[:4] == four
    assert len(set(losses.names())) == len(losses.names())


@pytest.mark.parametrize("name", losses.names())
def test_every_variant_is_documented_and_has_an_oracle(name):
    variant = losses.get(name)
    assert variant.name == name
    assert variant.summary and variant.formula and variant.paper
    assert name in DEFINITIONS or name in oracles_kl.EXACT, f"transcribe {name} in tests/oracles.py or oracles_kl.py"
    parameters = {p.name for p in variant.all_params}
    assert {"beta", "epsilon", "epsilon_high"} <= parameters


def test_changing_the_list_of_names_changes_nothing():
    losses.names().append("intruder")
    assert "intruder" not in losses.names()


@pytest.mark.parametrize(
    ("asked", "meant"), [("refrence", "reference"), ("no-detach", "no_detach"), ("forwardkl", "forward_kl")]
)
def test_unknown_variant_offers_the_nearest(asked, meant):
    with pytest.raises(ValueError, match=meant) as caught:
        losses.get(asked)
    assert asked in str(caught.value)
    with pytest.raises(ValueError, match=meant):
        losses.policy_loss(torch.zeros(1, 1), simple_inputs(), asked)


def test_unknown_name_that_is_near_nothing_lists_what_there_is():
    with pytest.raises(ValueError) as caught:
        losses.get("zzzzzzzz")
    assert all(name in str(caught.value) for name in losses.founding)


def test_duplicates_are_refused_and_leave_the_registry_as_it_was():
    before = losses.get("reference")
    impostor = dataclasses.replace(before, summary="impostor")
    with pytest.raises(ValueError, match="reference"):
        losses.register(impostor)
    assert losses.get("reference") is before


def test_a_body_that_asks_for_an_unknown_parameter_is_refused():
    def surrogate(n, o, a, gain):
        return -gain * n * a, -gain * a + n * 0.0

    broken = dataclasses.replace(losses.get("reference"), name="broken_for_test", surrogate=surrogate)
    with pytest.raises(ValueError, match="gain"):
        losses.register(broken)
    assert "broken_for_test" not in losses.names()


def test_a_variant_needs_no_registration_to_be_used():
    def surrogate(n, o, a, gain):
        return -gain * n * a, -gain * a + n * 0.0

    own = dataclasses.replace(
        losses.get("reference"),
        name="unregistered",
        surrogate=surrogate,
        params=(losses.Param("gain", 2.0, "a factor", low=0.0),),
    )
    n = torch.tensor([[-1.0, -3.0]], dtype=torch.float64, requires_grad=True)
    out = losses.policy_loss(n, simple_inputs(2), own, beta=0.0, gain=3.0)
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx(3.0 * 2.0)
    torch.testing.assert_close(n.grad, torch.full((1, 2), -1.5, dtype=torch.float64))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bta": 1.0}, "beta"),
        ({"epsilon_hi": 0.2}, "epsilon_high"),
        ({"beta": -0.1}, "beta"),
        ({"beta": float("nan")}, "beta"),
        ({"beta": float("inf")}, "beta"),
        ({"beta": "much"}, "beta"),
        ({"epsilon": -0.2}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"epsilon_high": -1.0}, "epsilon_high"),
    ],
)
def test_bad_parameters_are_refused_by_name(given, said):
    with pytest.raises(ValueError, match=said):
        losses.policy_loss(torch.zeros(1, 1), simple_inputs(), **given)


def simple_inputs(length: int = 1) -> losses.LossInputs:
    return losses.LossInputs(
        completion_ids=torch.zeros(1, length, dtype=torch.long),
        completion_mask=torch.ones(1, length),
        advantages=torch.ones(1),
        ref_per_token_logps=torch.zeros(1, length),
    )


def test_defaults():
    """beta 0.04, no clipping, epsilon_high follows epsilon."""
    values = losses.get("reference").resolve({})
    assert (values["beta"], values["epsilon"], values["epsilon_high"]) == (0.04, None, None)
    assert losses.get("reference").resolve({"epsilon": 0.2})["epsilon_high"] == 0.2
    assert losses.get("reference").resolve({"epsilon": 0.2, "epsilon_high": 0.28})["epsilon_high"] == 0.28
