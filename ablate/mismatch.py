"""How far the sampler's log-probs are from the trainer's: the figures behind the importance ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ablate.generation import Generation

QUANTILES = (0.05, 0.5, 0.95)


class Comparison:
    """Gathers the trainer's log-probs of a generation, which come micro-batch by micro-batch, for `figures`."""

    def __init__(self, generation: Generation, log_kept: list[list[float]] | None = None) -> None:
        self.generation, self.log_kept = generation, log_kept
        self._parts: list[tuple[Tensor, Tensor]] | None = [] if generation.has("sampling_per_token_logps") else None

    def add(self, rows: Tensor, logps: Tensor) -> dict[str, float]:
        """Takes the log-probs of rows of the generation; with the last of them it gives the figures, once."""
        if self._parts is None:
            return {}
        self._parts.append((rows.to(logps.device), logps))
        if sum(len(rows) for rows, _ in self._parts) < len(self.generation.prompts):
            return {}
        order = torch.cat([rows for rows, _ in self._parts]).argsort()
        own = torch.cat([logps for _, logps in self._parts])[order]
        self._parts = None
        sampling, mask = (self.generation.column(n) for n in ("sampling_per_token_logps", "completion_mask"))
        return figures(own, sampling, mask, self.log_kept)


def figures(old: Tensor, sampling: Tensor, mask: Tensor, log_kept: list[list[float]] | None = None) -> dict[str, float]:
    """Differences per token, and ratios exp(sum(old - sampling)) per completion, by metric name.

    old, sampling, mask: (B, T); log-probs under the temperature-only distribution, NaN where the sampler gave none.
    log_kept: per completion, log of the mass that truncation kept at each of its tokens. With it the same figures are
    given for the truncated distribution, whose ratio is the kept mass times the other and is never used as a weight:
    it falls with every token and would scale the gradient by how much was cut.
    """
    mask = mask.bool() & ~torch.isnan(sampling)
    if not mask.any():
        return {}
    difference = torch.where(mask, old.double() - sampling.double(), 0.0)
    out = _figures("sampling/", difference, mask)
    if log_kept is not None:
        kept = torch.zeros_like(difference)
        known = torch.zeros_like(mask)
        for row, values in enumerate(log_kept):
            kept[row, : len(values)] = torch.tensor(values, dtype=kept.dtype)
            known[row, : len(values)] = True
        known &= mask & ~torch.isnan(kept)
        if known.any():
            out["sampling/kept_mass/mean"] = kept.exp()[known].mean().item()
            out |= _figures("sampling/truncated/", torch.where(known, difference + kept, 0.0), known)
    return out


def _figures(prefix: str, difference: Tensor, mask: Tensor) -> dict[str, float]:
    ratios = difference.sum(1)[mask.any(1)].exp()
    size = difference[mask].abs()
    out = {
        f"{prefix}sampling_logp_difference/mean": size.mean().item(),
        f"{prefix}sampling_logp_difference/max": size.max().item(),
        f"{prefix}sequence_ratio/mean": ratios.mean().item(),
        f"{prefix}sequence_ratio/min": ratios.min().item(),
        f"{prefix}sequence_ratio/max": ratios.max().item(),
    }
    for q, value in zip(
        QUANTILES,
        ratios.quantile(torch.tensor(QUANTILES, dtype=ratios.dtype, device=ratios.device)).tolist(),
        strict=True,
    ):
        out[f"{prefix}sequence_ratio/q{100 * q:02.0f}"] = value
    return out
