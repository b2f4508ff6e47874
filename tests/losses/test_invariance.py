"""What must not matter: chunk size, how a batch is split, padding, order, memory layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import losses
from tests.losses.common import (
    BACKENDS,
    VARIANTS,
    Got,
    call,
    close,
    finite,
    identical,
    oracle,
    own_params,
    same,
)
from tests.strategies import PROFILE, Case, cases, chunk_sizes, make_case, permutations, splits

both = pytest.mark.parametrize("backend", BACKENDS)
every = pytest.mark.parametrize("variant", VARIANTS)


@every
@PROFILE
@given(case=cases(batch=4), size=chunk_sizes, trained=st.sampled_from((("hidden",), ("hidden", "weight", "bias"))))
def test_chunk_size(variant, case, size, trained):
    whole = call(variant, case, "chunked", trained=trained)
    got = call(variant, case, "chunked", trained=trained, chunk_size=size)
    same(got, whole, 1e-12)
    for name in whole.metrics:
        close(got.metrics[name].mean.double(), whole.metrics[name].mean.double(), 1e-6, name)


def total(parts: list[Got]) -> Got:
    def add(name: str) -> torch.Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.stack(found).sum(0)

    metrics = dict(parts[0].metrics)
    for part in parts[1:]:
        assert set(part.metrics) == set(metrics)
        metrics = {name: metrics[name] + part.metrics[name] for name in metrics}
    return Got(
        add("loss"),
        torch.cat([part.hidden for part in parts]),
        add("weight"),
        add("bias"),
        torch.cat([part.per_token_logps for part in parts]),
        metrics,
    )


@both
@every
@PROFILE
@given(data=st.data(), case=cases(batch=5))
def test_parts_of_a_batch_add_up(variant, backend, data, case):
    """With both normalisers the parts' losses, gradients and metrics add up to the unsplit ones."""
    whole = call(variant, case, backend)
    counts = {"num_items": int(case.mask.sum()), "num_sequences": int(case.mask.any(-1).sum())}
    as_tensor = data.draw(st.booleans(), label="0-d tensors")
    if as_tensor:
        counts = {name: torch.tensor(n) for name, n in counts.items()}
    parts = [case.rows(part, **counts) for part in data.draw(splits(5), label="split")]
    got = total([call(variant, part, backend) for part in parts])
    same(got, whole, 1e-11)
    for name in whole.metrics:
        close(got.metrics[name].mean.double(), whole.metrics[name].mean.double(), 1e-6, name)


@both
@every
def test_normalisers_are_used(variant, backend):
    """Twice the tokens and twice the completions in the batch: half the loss and gradients of this part."""
    case = make_case(21, batch=4, mask_kind="full")
    whole = call(variant, case, backend)
    doubled = call(variant, case.rows(slice(None), num_items=2 * case.mask.numel(), num_sequences=8), backend)
    close(doubled.loss, whole.loss / 2, 1e-12, "loss")
    close(doubled.hidden, whole.hidden / 2, 1e-12, "hidden")
    close(doubled.weight, whole.weight / 2, 1e-12, "weight")


def poisoned(case: Case, seed: int) -> tuple[Case, losses.LossInputs]:
    """The same problem with rubbish at every masked position: NaN, infinities, ids that no vocabulary has."""
    out = ~case.mask
    rubbish = (float("nan"), float("inf"), float("-inf"), 1e30)

    def spoil(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        x = x.clone()
        x[out] = rubbish[seed % 4]
        return x

    ids = case.ids.clone()
    ids[out] = (-100, 2**40, -1, 10**6)[seed % 4]
    advantages = case.advantages.clone()
    if advantages.ndim == 2:
        advantages[out] = float("nan")
    else:
        advantages[~case.mask.any(-1)] = float("nan")
    changed = case.rows(slice(None), hidden=spoil(case.hidden), ids=ids, advantages=advantages)
    inputs = case.inputs(
        completion_ids=ids,
        advantages=advantages,
        old_per_token_logps=spoil(case.old),
        ref_per_token_logps=spoil(case.ref),
        sampling_per_token_logps=spoil(case.sampling),
        ref_hidden=spoil(case.ref_hidden),
    )
    return changed, inputs


@both
@every
@PROFILE
@given(case=cases(batch=4), seed=st.integers(0, 3), dtype=st.sampled_from((torch.float64, torch.float32)))
def test_padding_never_matters(variant, backend, case, seed, dtype):
    case = case.cast(dtype)
    clean = call(variant, case, backend)
    changed, inputs = poisoned(case, seed)
    got = call(variant, changed, backend, inputs=inputs)
    identical(got, clean)
    assert finite(got)
    assert not got.hidden[~case.mask].any()


@every
@PROFILE
@given(case=cases(batch=4), seed=st.integers(0, 3))
def test_padding_never_matters_to_policy_loss(variant, case, seed):
    n = case.log_probs
    clean = n.clone().requires_grad_(True)
    want = losses.policy_loss(clean, case.inputs(), variant, **case.options, **own_params(variant))
    want.loss.backward()
    spoilt = torch.where(case.mask, n, (float("nan"), float("inf"), float("-inf"), 1e30)[seed]).requires_grad_(True)
    out = losses.policy_loss(spoilt, poisoned(case, seed)[1], variant, **case.options, **own_params(variant))
    out.loss.backward()
    assert torch.equal(out.loss, want.loss)
    assert torch.equal(spoilt.grad, clean.grad)
    assert torch.equal(out.per_token_logps, want.per_token_logps)
    assert all(torch.isfinite(m.mean) for m in out.metrics.values())


@both
@every
@PROFILE
@given(case=cases(batch=4, length=4, mask_kind="right"))
def test_more_padding_never_matters(variant, backend, case):
    """Four more masked tokens on the right, two more empty completions below."""
    want = call(variant, case, backend)

    def pad(x: torch.Tensor | None, value: float = 0.0) -> torch.Tensor | None:
        if x is None:
            return None
        big = torch.full((6, 8, *x.shape[2:]) if x.ndim > 1 else (6,), value, dtype=x.dtype)
        big[tuple(slice(0, n) for n in x.shape[:2])] = x
        return big

    names = ("hidden", "ids", "mask", "advantages", "old", "ref", "sampling", "group_ids", "ref_hidden")
    bigger = case.rows(slice(None), **{name: pad(getattr(case, name)) for name in names})
    got = call(variant, bigger, backend)
    close(got.loss, want.loss, 1e-12, "loss")
    close(got.hidden[:4, :4], want.hidden, 1e-12, "hidden")
    close(got.weight, want.weight, 1e-12, "weight")
    assert not got.hidden[4:].any() and not got.hidden[:, 4:].any()


@both
@every
@PROFILE
@given(data=st.data(), case=cases(batch=4))
def test_order_of_completions(variant, backend, data, case):
    order = data.draw(permutations(4))
    want, got = call(variant, case, backend), call(variant, case.rows(order), backend)
    close(got.loss, want.loss, 1e-12, "loss")
    close(got.hidden, want.hidden[order], 1e-12, "hidden")
    close(got.weight, want.weight, 1e-12, "weight")
    close(got.per_token_logps, want.per_token_logps[order], 1e-12, "log-probs")


@both
@every
@PROFILE
@given(data=st.data(), case=cases(length=6))
def test_order_of_tokens(variant, backend, data, case):
    """The losses see a completion as a set of tokens: their places carry no weight."""
    order = data.draw(permutations(6))

    def move(x: torch.Tensor | None) -> torch.Tensor | None:
        return x if x is None or x.ndim < 2 else x[:, order]

    names = ("hidden", "ids", "mask", "advantages", "old", "ref", "sampling", "ref_hidden")
    moved = case.rows(slice(None), **{name: move(getattr(case, name)) for name in names})
    want, got = call(variant, case, backend), call(variant, moved, backend)
    close(got.loss, want.loss, 1e-12, "loss")
    close(got.hidden, want.hidden[:, order], 1e-12, "hidden")
    close(got.weight, want.weight, 1e-12, "weight")


@both
@every
@PROFILE
@given(data=st.data(), case=cases(vocab=5))
def test_order_of_the_vocabulary(variant, backend, data, case):
    order = data.draw(permutations(5))
    renamed = case.rows(
        slice(None),
        weight=case.weight[order],
        ref_weight=case.ref_weight[order],
        bias=None if case.bias is None else case.bias[order],
        ids=torch.argsort(order)[case.ids],
    )
    want, got = call(variant, case, backend), call(variant, renamed, backend)
    close(got.loss, want.loss, 1e-11, "loss")
    close(got.hidden, want.hidden, 1e-11, "hidden")
    close(got.weight, want.weight[order], 1e-11, "weight")


@both
@every
def test_memory_layout(variant, backend):
    """Slices, transposes and expanded tensors give what their contiguous copies give, and gradients reach the base."""
    case = make_case(31, batch=3, length=4, width=4, mask_kind="holes", bias=True, sampling=True)
    inputs = case.inputs(
        completion_ids=torch.cat([case.ids, case.ids], 1)[:, :4],
        completion_mask=case.mask.T.contiguous().T,
        advantages=case.advantages[:, None].expand(3, 4),
        old_per_token_logps=torch.stack([case.old, case.old], -1)[..., 0],
        ref_per_token_logps=case.ref.T.contiguous().T,
    )
    want = call(variant, case, backend)
    base = torch.cat([case.hidden[:, :1], case.hidden], 1).requires_grad_(True)
    weight = case.weight.T.contiguous().requires_grad_(True)
    bias = torch.stack([case.bias, case.bias], 1).requires_grad_(True)
    out = losses.linear_policy_loss(
        base[:, 1:], weight.T, inputs, variant, lm_head_bias=bias[:, 0], backend=backend, **own_params(variant)
    )
    out.loss.backward()
    close(out.loss.detach(), want.loss, 1e-12, "loss")
    close(base.grad[:, 1:], want.hidden, 1e-12, "hidden")
    assert not base.grad[:, 0].any()
    close(weight.grad.T, want.weight, 1e-12, "weight")
    close(bias.grad[:, 0], want.bias, 1e-12, "bias")


@both
@every
def test_expanded_inputs(variant, backend):
    """One hidden state and one log-prob expanded over the whole batch."""
    case = make_case(32, batch=3, length=4, mask_kind="full")
    one = case.hidden[:1, :1].clone()
    wide = {
        "hidden": one.expand(3, 4, -1),
        "old": case.old[:1, :1].expand(3, 4),
        "ref": case.ref[:1, :1].expand(3, 4),
        "mask": torch.ones(1, 1, dtype=torch.bool).expand(3, 4),
    }
    expanded = case.rows(slice(None), **wide)
    copied = case.rows(slice(None), **{name: x.clone() for name, x in wide.items()})
    want = oracle(variant, copied)
    leaf = one.requires_grad_(True)
    out = losses.linear_policy_loss(
        leaf.expand(3, 4, -1), case.weight, expanded.inputs(), variant, backend=backend, **own_params(variant)
    )
    out.loss.backward()
    close(out.loss.detach(), want.loss, 1e-12, "loss")
    close(leaf.grad, want.hidden.sum((0, 1), keepdim=True), 1e-11, "hidden")


@both
def test_inputs_are_left_as_they_were(backend):
    case = make_case(33, mask_kind="holes", bias=True, sampling=True)
    tensors = [x for x in vars(case).values() if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    for variant in VARIANTS:
        call(variant, case, backend)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@both
@every
def test_repeated_calls_are_equal_to_the_bit(variant, backend):
    case = make_case(34, batch=4, mask_kind="holes", bias=True).cast(torch.float32)
    identical(call(variant, case, backend), call(variant, case, backend))
