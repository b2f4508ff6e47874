"""Every aggregation's weights against the sentence that defines it, whether a registered variant uses it or not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from losses.aggregation import AGGREGATIONS, weights
from tests import oracles
from tests.losses.common import close
from tests.strategies import PROFILE, generator, make_mask, mask_kinds, seeds


@pytest.mark.parametrize("kind", AGGREGATIONS)
@PROFILE
@given(
    seed=seeds,
    mask_kind=mask_kinds,
    batch=st.integers(1, 5),
    length=st.integers(1, 7),
    counts=st.sampled_from((None, (40, 9), (torch.tensor(40), torch.tensor(9)))),
)
def test_weights(kind, seed, mask_kind, batch, length, counts):
    mask = make_mask(mask_kind, batch, length, seed)
    values = torch.randn(batch, length, generator=generator(seed), dtype=torch.float64)
    items, sequences = counts or (None, None)
    got = weights(
        mask,
        kind,
        num_items=items,
        num_sequences=sequences,
        params={"max_completion_length": 6},
        dtype=torch.float64,
    )
    rows = [values[b][mask[b]] for b in range(batch)]
    want = oracles.aggregate(rows, kind, *(None if n is None else float(n) for n in (items, sequences)), constant=6)
    close((got * values).sum(), want, 1e-12, kind)
    assert torch.equal(got != 0, mask.expand_as(got)) and got.shape == mask.shape


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_counts_of_zero(kind):
    """A part without tokens of a batch without tokens: weights of 0, not 0 / 0."""
    mask = torch.zeros(2, 3, dtype=torch.bool)
    got = weights(mask, kind, num_items=0, num_sequences=0, params={"max_completion_length": 6})
    assert torch.equal(got, torch.zeros(2, 3))


def test_refusals():
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="sequence_mean"):
        weights(mask, "sequence-mean", params={})
    with pytest.raises(ValueError, match="max_completion_length"):
        weights(mask, "constant", params={})
