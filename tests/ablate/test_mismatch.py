"""Figures of the sampler's log-probs against the trainer's."""

from __future__ import annotations

import math

import pytest
import torch

from ablate import mismatch

OLD = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -1.0, 0.0]])
SAMPLING = torch.tensor([[-1.5, -2.0, -0.4], [-2.0, -1.0, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def test_differences_and_ratios() -> None:
    figures = mismatch.figures(OLD, SAMPLING, MASK)
    assert figures["sampling/sampling_logp_difference/mean"] == pytest.approx((0.5 + 0 + 0.1 + 1 + 0) / 5)
    assert figures["sampling/sampling_logp_difference/max"] == pytest.approx(1.0)
    ratios = [math.exp(0.4), math.exp(-1.0)]
    assert figures["sampling/sequence_ratio/mean"] == pytest.approx(sum(ratios) / 2)
    assert figures["sampling/sequence_ratio/min"] == pytest.approx(min(ratios))
    assert figures["sampling/sequence_ratio/max"] == pytest.approx(max(ratios))
    assert figures["sampling/sequence_ratio/q50"] == pytest.approx(sum(ratios) / 2)
    assert not any("truncated" in name or "kept" in name for name in figures)


def test_kept_mass_scales_the_truncated_ratio_alone() -> None:
    kept = [[math.log(0.5)] * 3, [math.log(0.8)] * 2]
    figures = mismatch.figures(OLD, SAMPLING, MASK, kept)
    assert figures["sampling/kept_mass/mean"] == pytest.approx((3 * 0.5 + 2 * 0.8) / 5)
    expected = (math.exp(0.4) * 0.125 + math.exp(-1.0) * 0.64) / 2
    assert figures["sampling/truncated/sequence_ratio/mean"] == pytest.approx(expected)
    assert (
        figures["sampling/sequence_ratio/mean"] == mismatch.figures(OLD, SAMPLING, MASK)["sampling/sequence_ratio/mean"]
    )


def test_tokens_without_a_score_are_left_out() -> None:
    sampling = SAMPLING.clone()
    sampling[1] = torch.nan
    figures = mismatch.figures(OLD, sampling, MASK, [[0.0] * 3, []])
    assert figures["sampling/sampling_logp_difference/max"] == pytest.approx(0.5)
    assert all(map(math.isfinite, figures.values()))
    assert mismatch.figures(OLD, torch.full_like(OLD, torch.nan), MASK) == {}
    assert mismatch.figures(OLD, SAMPLING, torch.zeros_like(MASK)) == {}


def test_distance_of_weights_from_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from ablate import measure

    for limit in (measure.ON_DEVICE, 0):  # both ways of keeping the start
        monkeypatch.setattr(measure, "ON_DEVICE", limit)
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
        start = measure.snapshot(model)
        assert measure.distance(model, start) == 0.0
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.5)
        count = sum(p.numel() for p in model.parameters())
        assert measure.distance(model, start) == pytest.approx(0.5 * math.sqrt(count))
