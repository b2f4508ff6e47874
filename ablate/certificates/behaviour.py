"""How a variant behaves where arithmetic goes wrong: masks, truncation, accumulation, float16, large log-ratios."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import losses
from ablate.certificates.measure import own_params
from ablate.certificates.problems import F64

EXACT = 1e-9
FLOAT16_ERROR = 1e-3
FLOAT16_TOKENS, FLOAT16_SCALE = 163_840, 65_536.0  # tokens of the accumulated batch; GradScaler's first scale
FAR = 100.0  # nats: exp of it is no float32


@dataclass(frozen=True)
class Behaviour:
    """Each is the largest error found, relative to the largest entry, but for `overflow`.

    derivative: of the hand-written derivative against autograd; masks: with NaN in the padding against zeros there;
    truncation: a completion that is masked out against one that is not there; accumulation: two parts against the
    whole; float16: of d hidden under GradScaler against float64; overflow: where the KL term is not finite in float32,
    of the log-ratios -100 and 100.
    """

    derivative: float
    masks: float
    truncation: float
    accumulation: float
    float16: float
    overflow: str

    def failures(self) -> list[str]:
        """What is out of bounds, in words."""
        bounds = {name: EXACT for name in ("derivative", "masks", "truncation", "accumulation")}
        bounds["float16"] = FLOAT16_ERROR
        found = asdict(self)
        return [f"{name}: error {found[name]:.2e}, at most {high:.0e}" for name, high in bounds.items()
                if not found[name] <= high]  # fmt: skip


def examine(variant: losses.Variant) -> Behaviour:
    """Every behaviour of one variant, on a seeded batch."""
    whole = _Batch(variant, seed=1)
    spoilt = _Batch(variant, seed=1, padding=math.nan)
    shorter = whole.rows([0, 1, 3])
    loss, grads = whole.run()
    counts = {"num_items_in_batch": int(whole.mask.sum()), "num_sequences_in_batch": 3}
    parts = [whole.rows(rows).run(**counts) for rows in ([0, 1], [2, 3])]
    total = parts[0][0] + parts[1][0]
    kept = grads[[0, 1, 3]]
    return Behaviour(
        derivative=_derivative_error(variant),
        masks=_error([(spoilt.run()[0], loss), (spoilt.run()[1], grads)]),
        truncation=_error([(shorter.run()[0], loss), (shorter.run()[1], kept)]),
        accumulation=_error([(total, loss), (torch.cat([parts[0][1], parts[1][1]]), grads)]),
        float16=_float16_error(variant),
        overflow=_overflow(variant),
    )


def _error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Largest difference over the largest entry; a NaN is an infinite error."""
    worst = 0.0
    for got, want in pairs:
        scale = max(float(want.abs().max()), 1e-300)
        error = float((got - want).abs().max()) / scale
        worst = max(worst, error if error == error else math.inf)
    return worst


class _Batch:
    """Four completions of five tokens, the third masked out whole, through `linear_policy_loss` in float64."""

    def __init__(self, variant: losses.Variant, seed: int, padding: float = 0.0) -> None:
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=F64)

        self.variant = variant
        lengths = torch.tensor([5, 3, 0, 4])
        self.mask = torch.arange(5) < lengths.unsqueeze(1)
        self.weight, self.ref_weight = normal(7, 6), normal(7, 6)
        self.ids = torch.randint(0, 7, (4, 5), generator=rng)
        self.hidden, self.ref_hidden, self.advantages = normal(4, 5, 6), normal(4, 5, 6), normal(4)
        n = losses.per_token_logps(self.hidden, self.weight, self.ids)
        self.old, self.ref = n + 0.2 * normal(4, 5), n + 0.5 * normal(4, 5)
        for x in (self.hidden, self.ref_hidden, self.old, self.ref):
            x[~self.mask] = padding

    def rows(self, rows: list[int]) -> _Batch:
        part = _Batch.__new__(_Batch)
        part.variant, part.weight, part.ref_weight = self.variant, self.weight, self.ref_weight
        for name in ("mask", "ids", "hidden", "ref_hidden", "advantages", "old", "ref"):
            setattr(part, name, getattr(self, name)[rows])
        return part

    def run(self, **counts: Any) -> tuple[Tensor, Tensor]:
        """Loss and d hidden."""
        hidden = self.hidden.clone().requires_grad_(True)
        inputs = losses.LossInputs(
            self.ids, self.mask, self.advantages, self.old, self.ref, ref_hidden=self.ref_hidden,
            group_ids=torch.zeros(len(self.ids), dtype=torch.long), ref_lm_head_weight=self.ref_weight, **counts,
        )  # fmt: skip
        params = own_params(self.variant, 5) | {"beta": 0.5, "epsilon": 0.2}
        out = losses.linear_policy_loss(hidden, self.weight, inputs, self.variant, **params)
        return out.loss.detach(), torch.autograd.grad(out.loss, hidden)[0]


def _derivative_error(variant: losses.Variant) -> float:
    """Largest difference of a body's derivative from autograd of its value, at 400 points that include n = o = p."""
    rng = torch.Generator().manual_seed(2)
    n = -4 * torch.rand(400, generator=rng, dtype=F64)
    o, p = (n + 0.5 * torch.randn(400, generator=rng, dtype=F64) for _ in range(2))
    o[:20], p[10:30] = n[:20], n[10:30]
    a = torch.randn(400, generator=rng, dtype=F64)
    values: dict[str, Any] = variant.resolve(own_params(variant, 5)) | {"epsilon": 0.2, "epsilon_high": 0.28}
    pairs = []
    if variant.vocabulary is not None:
        batch = _Batch(variant, seed=3)
        both = []
        for backend in ("chunked", "reference"):
            hidden, weight = (x.clone().requires_grad_(True) for x in (batch.hidden, batch.weight))
            kl = losses.exact_kl(
                hidden, weight, batch.ref_hidden, batch.ref_weight, completion_mask=batch.mask, backend=backend,
                direction="reverse" if variant.vocabulary == "reverse_kl" else "forward",
            )  # fmt: skip
            both.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(kl.sum(), (hidden, weight))]))
        pairs.append((both[0], both[1]))
    if variant.sequence_term is None:
        for body, log_probs in ((variant.surrogate, (n, o, a)), (variant.kl, (n, p, o))):
            if body is None:
                continue
            extra = [values[name] for name in losses.spec.body_params(body)]
            leaf = n.clone().requires_grad_(True)
            value, derivative = body(leaf, *log_probs[1:], *extra)
            automatic = torch.autograd.grad(value.sum(), leaf, allow_unused=True)[0]
            pairs.append((derivative.detach(), torch.zeros_like(n) if automatic is None else automatic))
    worst = 0.0
    for got, want in pairs:
        # Absolute where derivatives are small: no_detach's is 0.
        error = float((got - want).abs().max()) / max(float(want.abs().max()), 1.0)
        worst = max(worst, error if error == error else math.inf)
    return worst


def _float16_error(variant: losses.Variant) -> float:
    """Relative error of d hidden in float16 with a batch of 163,840 tokens and the loss scaled by 65,536."""
    rng = torch.Generator().manual_seed(4)

    def half(*shape: int, scale: float) -> Tensor:
        return (scale * torch.randn(*shape, generator=rng)).half()

    rows, length = 4, 32
    hidden, weight = half(rows, length, 16, scale=1.0), half(50, 16, scale=0.3)
    ref_hidden = (hidden + half(rows, length, 16, scale=0.2)).half()
    ids = torch.randint(0, 50, (rows, length), generator=rng)
    advantages = torch.randn(rows, generator=rng)
    logps = losses.per_token_logps(hidden, weight, ids)
    ref = losses.per_token_logps(ref_hidden, weight, ids)
    old = logps + 0.05 * torch.randn(rows, length, generator=rng)

    def gradient(dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        leaf = hidden.to(dtype).requires_grad_(True)
        inputs = losses.LossInputs(
            ids, torch.ones(rows, length, dtype=torch.bool), advantages.to(wide), old.to(wide), ref.to(wide),
            num_items_in_batch=FLOAT16_TOKENS, num_sequences_in_batch=FLOAT16_TOKENS // length,
            group_ids=torch.zeros(rows, dtype=torch.long), ref_hidden=ref_hidden.to(dtype),
        )  # fmt: skip
        params = own_params(variant, length) | {"beta": 0.5}
        out = losses.linear_policy_loss(leaf, weight.to(dtype), inputs, variant, **params)
        return torch.autograd.grad(out.loss * FLOAT16_SCALE, leaf)[0].double()

    exact = gradient(torch.float64)
    error = float((gradient(torch.float16) - exact).norm() / exact.norm().clamp(min=1e-300))
    return error if error == error else math.inf


def _overflow(variant: losses.Variant) -> str:
    """Where the KL term stops being finite in float32, in words."""
    if variant.kl is None:
        return "none"
    values = variant.resolve(own_params(variant, 5))
    extra = [values[name] for name in losses.spec.body_params(variant.kl)]
    bad = []
    for gap in (-FAR, FAR):
        n, p = (torch.tensor([x]) for x in ((-FAR, 0.0) if gap > 0 else (0.0, -FAR)))
        if not all(bool(torch.isfinite(x).all()) for x in variant.kl(n, p, n, *extra)):
            bad.append(f"p - n = {gap:.0f}")
    return ", ".join(bad) or "none"
