"""Bad input: a ValueError that names the argument, before anything is computed from it."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

import losses
from tests.losses.common import BACKENDS, VARIANTS, own_params
from tests.strategies import make_case

both = pytest.mark.parametrize("backend", BACKENDS)
NAN, INF = float("nan"), float("inf")
CASE = make_case(71, batch=2, length=3, width=4, vocab=5, mask_kind="full", bias=True, sampling=True)
HOLES = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)


def linear(backend: str = "chunked", inputs: losses.LossInputs | None = None, **changes: Any) -> losses.LossOutput:
    given = {"hidden": CASE.hidden, "lm_head_weight": CASE.weight, "inputs": inputs or CASE.inputs()} | changes
    return losses.linear_policy_loss(backend=backend, **given)


@both
@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("completion_ids", torch.zeros(2, 4, dtype=torch.long)),
        ("completion_mask", torch.ones(2, 4)),
        ("completion_mask", torch.ones(3, 3)),
        ("completion_mask", torch.ones(3)),
        ("advantages", torch.ones(3)),
        ("advantages", torch.ones(2, 4)),
        ("advantages", torch.ones(2, 1)),
        ("advantages", torch.tensor(1.0)),
        ("old_per_token_logps", torch.zeros(2, 4)),
        ("old_per_token_logps", torch.zeros(3)),
        ("ref_per_token_logps", torch.zeros(1, 3)),
        ("sampling_per_token_logps", torch.zeros(2, 2)),
        ("group_ids", torch.zeros(3, dtype=torch.long)),
        ("num_items_in_batch", torch.ones(2)),
        ("num_sequences_in_batch", torch.ones(2)),
        ("num_items_in_batch", -1),
        ("num_sequences_in_batch", -3),
        ("completion_mask", torch.full((2, 3), 0.5)),
        ("completion_mask", torch.full((2, 3), 2)),
        ("completion_mask", torch.full((2, 3), NAN)),
        ("completion_ids", torch.zeros(2, 3)),
    ],
)
def test_shapes_and_kinds_of_inputs(backend, argument, bad):
    inputs = CASE.inputs(**{argument: bad})
    with pytest.raises(ValueError, match=argument):
        linear(backend, inputs)
    with pytest.raises(ValueError, match=argument):
        losses.policy_loss(torch.zeros(2, 3), inputs)


@both
@pytest.mark.parametrize(
    ("argument", "bad"),
    [
        ("hidden", torch.zeros(6, 4, dtype=torch.float64)),
        ("hidden", torch.zeros(2, 3, 4, dtype=torch.long)),
        ("lm_head_weight", torch.zeros(5, 3, dtype=torch.float64)),
        ("lm_head_weight", torch.zeros(5, dtype=torch.float64)),
        ("lm_head_weight", torch.zeros(5, 4, dtype=torch.long)),
        ("lm_head_bias", torch.zeros(4, dtype=torch.float64)),
        ("lm_head_bias", torch.zeros(5, 1, dtype=torch.float64)),
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("temperature", NAN),
        ("temperature", INF),
        ("logit_softcap", 0.0),
        ("logit_softcap", -30.0),
        ("logit_softcap", NAN),
        ("logit_scale", 0.0),
        ("logit_scale", NAN),
        ("logit_scale", INF),
    ],
)
def test_heads(backend, argument, bad):
    with pytest.raises(ValueError, match=argument):
        linear(backend, **{argument: bad})
    given = {"hidden": CASE.hidden, "lm_head_weight": CASE.weight, "completion_ids": CASE.ids} | {argument: bad}
    with pytest.raises(ValueError, match=argument):
        losses.per_token_logps(backend=backend, **given)


@both
@pytest.mark.parametrize("bad", [5, 2**40, -1, -100])
def test_token_ids_past_the_vocabulary(backend, bad):
    ids = CASE.ids.clone()
    ids[1, 2] = bad
    with pytest.raises(ValueError, match=r"completion_ids.*" + re.escape(str(bad))):
        linear(backend, CASE.inputs(completion_ids=ids))
    with pytest.raises(ValueError, match="completion_ids"):
        losses.per_token_logps(CASE.hidden, CASE.weight, ids, backend=backend)
    assert torch.isfinite(linear(backend, CASE.inputs(completion_ids=ids, completion_mask=HOLES)).loss)


@both
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "argument", ["advantages", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"]
)
def test_numbers_that_are_none(backend, argument, bad):
    """NaN and infinities are refused at unmasked tokens, and named; behind the mask they are nobody's business."""
    spoilt = getattr(CASE.inputs(), argument).clone()
    spoilt[-1] = bad
    inputs = CASE.inputs(**{argument: spoilt})
    with pytest.raises(ValueError, match=argument):
        linear(backend, inputs)
    with pytest.raises(ValueError, match=argument):
        losses.policy_loss(torch.zeros(2, 3), inputs)
    behind = torch.tensor([[1, 1, 1], [0, 0, 0]])
    hidden = CASE.inputs(**{argument: spoilt, "completion_mask": behind})
    assert torch.isfinite(linear(backend, hidden).loss)
    assert torch.isfinite(losses.policy_loss(torch.zeros(2, 3), hidden).loss)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_token_advantages(bad):
    advantages = torch.zeros(2, 3)
    advantages[1, 2] = bad
    with pytest.raises(ValueError, match=r"advantages.*1, 2"):
        losses.policy_loss(torch.zeros(2, 3), CASE.inputs(advantages=advantages))
    assert torch.isfinite(
        losses.policy_loss(torch.zeros(2, 3), CASE.inputs(advantages=advantages, completion_mask=HOLES)).loss
    )


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_policy_log_probs(bad):
    n = torch.zeros(2, 3)
    n[1, 2] = bad
    with pytest.raises(ValueError, match="per_token_logps"):
        losses.policy_loss(n, CASE.inputs())


@both
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_broken_model_is_named(backend, trained, bad):
    """NaN or infinite hidden states at an unmasked token: the log-probs are refused, not trained on."""
    hidden = CASE.hidden.clone()
    hidden[0, 1, 0] = bad
    weight = CASE.weight.clone().requires_grad_(trained)
    with pytest.raises(ValueError, match="log-prob|hidden"):
        linear(backend, hidden=hidden.requires_grad_(True), lm_head_weight=weight)


@both
@pytest.mark.parametrize("variant", VARIANTS)
def test_missing_reference_log_probs(variant, backend):
    inputs = CASE.inputs(ref_per_token_logps=None)
    needed = losses.get(variant).kl is not None
    for call in (
        lambda **kw: linear(backend, inputs, variant=variant, **kw, **own_params(variant)),
        lambda **kw: losses.policy_loss(torch.zeros(2, 3), inputs, variant, **kw, **own_params(variant)),
    ):
        if needed:
            with pytest.raises(ValueError, match="ref_per_token_logps"):
                call()
            with pytest.raises(ValueError, match="ref_per_token_logps"):
                call(beta=1e-9)
        assert torch.isfinite(call(beta=0.0).loss)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if own_params(v)])
def test_parameters_without_default_are_asked_for(variant):
    (name,) = own_params(variant)
    with pytest.raises(ValueError, match=name):
        losses.policy_loss(torch.zeros(2, 3), CASE.inputs(), variant)
    with pytest.raises(ValueError, match=name):
        linear(variant=variant)


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ({"backend": "chunkd"}, "chunked"),
        ({"backend": "Reference"}, "reference"),
        ({"precision": "fp88"}, "fp8"),
        ({"variant": "full_reverse"}, "full_reverse_kl"),
        ({"betta": 0.1}, "beta"),
        ({"epsilon_hi": 0.1}, "epsilon_high"),
        ({"temprature": 0.1}, "temprature"),
    ],
)
def test_unknown_names_offer_the_nearest(changes, offered):
    with pytest.raises(ValueError, match=offered):
        linear(**({"backend": "chunked"} | changes))


@pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="Triton can run here"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_triton_without_a_gpu_is_refused_not_replaced(dtype):
    case = CASE.cast(dtype)
    for work in (
        lambda: linear("triton", case.inputs(), hidden=case.hidden, lm_head_weight=case.weight),
        lambda: losses.per_token_logps(case.hidden, case.weight, case.ids, backend="triton"),
    ):
        with pytest.raises(ValueError, match="triton"):
            work()


def test_auto_runs():
    out = linear("auto")
    torch.testing.assert_close(out.loss, linear("chunked").loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [0, -4])
def test_chunk_size(size):
    with pytest.raises(ValueError, match="chunk_size"):
        linear(chunk_size=size)


@both
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_batches(backend, shape):
    """No completion, or completions without a token: nothing to learn from."""
    hidden = torch.zeros(*shape, 4, requires_grad=True)
    weight = torch.ones(5, 4, requires_grad=True)
    zeros = torch.zeros(shape)
    inputs = losses.LossInputs(zeros.long(), zeros.bool(), torch.zeros(shape[0]), zeros, zeros)
    out = losses.linear_policy_loss(hidden, weight, inputs, backend=backend)
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert hidden.grad.shape == hidden.shape
    assert weight.grad is None or not weight.grad.any()
    assert all(torch.isfinite(m.mean) for m in out.metrics.values())
