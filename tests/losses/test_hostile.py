"""What is no tensor, lies on another device or has no finite value: refused by the argument's name, not by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import losses
from tests.losses.common import BACKENDS
from tests.strategies import make_case

NAN, INF = float("nan"), float("inf")
CASE = make_case(72, batch=2, length=3, width=4, vocab=5, mask_kind="full", sampling=True)
GROUPS = torch.tensor([0, 0])


def linear(inputs: losses.LossInputs | None = None, **options: Any) -> losses.LossOutput:
    return losses.linear_policy_loss(CASE.hidden, CASE.weight, inputs or CASE.inputs(), **options)


@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("advantages", [1.0, -1.0]),
        ("advantages", None),
        ("completion_mask", [[1, 1, 1], [1, 1, 1]]),
        ("ref_per_token_logps", 0.5),
        ("completion_ids", torch.zeros(2, 3, dtype=torch.complex64)),
        ("num_items_in_batch", "6"),
        ("num_items_in_batch", NAN),
        ("num_sequences_in_batch", INF),
        ("advantages", torch.ones(2, device="meta")),
        ("ref_per_token_logps", torch.zeros(2, 3, device="meta")),
        ("old_per_token_logps", torch.zeros(2, 3, device="meta")),
        ("sampling_per_token_logps", torch.zeros(2, 3, device="meta")),
        ("group_ids", torch.zeros(2, device="meta")),
    ],
)
def test_inputs(argument, bad):
    inputs = CASE.inputs(**{argument: bad})
    with pytest.raises(ValueError, match=argument):
        losses.policy_loss(torch.zeros(2, 3), inputs)
    with pytest.raises(ValueError, match=argument):
        linear(inputs)


@pytest.mark.parametrize("bad", [[[0.0] * 3] * 2, torch.zeros(2, 3, dtype=torch.long)])
def test_policy_log_probs_are_a_tensor_of_floats(bad):
    with pytest.raises(ValueError, match="per_token_logps must be a tensor of floats"):
        losses.policy_loss(bad, CASE.inputs())


def test_policy_log_probs_on_another_device():
    with pytest.raises(ValueError, match="completion_ids is on cpu, per_token_logps on meta"):
        losses.policy_loss(torch.zeros(2, 3, device="meta"), CASE.inputs())


@pytest.mark.parametrize("name", [None, 3, ["reference"], "refrence"])
def test_a_variant_that_is_none(name):
    with pytest.raises(ValueError, match="unknown loss variant"):
        linear(variant=name)
    with pytest.raises(ValueError, match="unknown loss variant"):
        losses.policy_loss(torch.zeros(2, 3), CASE.inputs(), name)


@pytest.mark.parametrize("size", [0, -1, 2.5, "2"])
def test_chunk_sizes(size):
    with pytest.raises(ValueError, match="chunk_size"):
        linear(chunk_size=size)


def test_an_infinite_softcap():
    with pytest.raises(ValueError, match="logit_softcap"):
        linear(logit_softcap=INF)


@pytest.mark.parametrize("value", [INF, NAN, 2.5])
def test_whole_numbers(value):
    with pytest.raises(ValueError, match="length=.*is not a whole number"):
        losses.Param("length", None, "", type=int).check(value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", ["exact_reverse_kl", "exact_forward_kl"])
def test_states_of_the_reference_that_are_not_finite(backend, variant):
    states = torch.randn(2, 3, 4)
    states[1, 2, 0] = NAN
    with pytest.raises(ValueError, match=r"ref_hidden.* is nan at \(1, 2\)"):
        linear(CASE.inputs(ref_hidden=states), variant=variant, backend=backend)
    masked = CASE.inputs(ref_hidden=states, completion_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))
    assert torch.isfinite(linear(masked, variant=variant, backend=backend).loss)


@pytest.mark.parametrize("function", [losses.group_advantages, losses.centred_advantages])
def test_rewards(function):
    with pytest.raises(ValueError, match="rewards is inf at 1"):
        function(torch.tensor([1.0, INF]), GROUPS)
    with pytest.raises(ValueError, match="rewards and group_ids"):
        function(torch.ones(2, 2), GROUPS)
    with pytest.raises(ValueError, match="rewards and group_ids"):
        function(torch.ones(3), GROUPS)
