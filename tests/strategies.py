"""Hypothesis strategies for the loss tests: shapes, masks, dtypes, chunk sizes, head options, whole loss inputs.

Hypothesis draws the structure (sizes, kind of mask, which inputs are given) and a seed; the numbers come from a
torch.Generator with that seed, which keeps a case small to print and quick to draw. Values are continuous, so that a
case sits on a kink of a piecewise loss with probability 0.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import oracles

settings.register_profile(
    "losses",
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("losses-thorough", parent=settings.get_profile("losses"), max_examples=300, derandomize=False)
PROFILE = settings.get_profile(os.environ.get("LOSSES_HYPOTHESIS_PROFILE", "losses"))
"""Used as a decorator (`@PROFILE`), so that loading this module changes nothing for other tests.
LOSSES_HYPOTHESIS_PROFILE=losses-thorough draws many more cases, new ones each time."""

MASK_KINDS = ("full", "right", "left", "holes", "empty_rows", "single", "none")
MASK_DTYPES = (torch.bool, torch.int64, torch.int32, torch.float32)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_mask(kind: str, batch: int, length: int, seed: int) -> Tensor:
    """(B, T) bool. "none" masks everything, "empty_rows" whole completions, "single" leaves one token of the batch."""
    rng = generator(seed)
    position = torch.arange(length)[None, :]
    lengths = torch.randint(0, length + 1, (batch, 1), generator=rng)
    if kind == "full":
        return torch.ones(batch, length, dtype=torch.bool)
    if kind == "right":
        return position < lengths
    if kind == "left":
        return position >= length - lengths
    if kind == "holes":
        return torch.rand(batch, length, generator=rng) < 0.5
    if kind == "empty_rows":
        return (torch.arange(batch)[:, None] % 2 == seed % 2).expand(batch, length).clone()
    mask = torch.zeros(batch, length, dtype=torch.bool)
    if kind == "single":
        mask[seed % batch, seed % length] = True
    return mask


@dataclass(frozen=True)
class Case:
    """One problem: float64 tensors, cast at the edges. Log-probs are near the policy's own, as in training."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    ids: Tensor
    mask: Tensor
    advantages: Tensor
    old: Tensor | None
    ref: Tensor | None
    sampling: Tensor | None
    group_ids: Tensor
    ref_hidden: Tensor
    ref_weight: Tensor
    mask_dtype: torch.dtype = torch.bool
    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0
    num_items: int | None = None
    num_sequences: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> oracles.Head:
        return oracles.Head(self.bias, self.temperature, self.softcap, self.scale)

    @property
    def head_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of `linear_policy_loss` and `per_token_logps`."""
        return {
            "lm_head_bias": self.bias,
            "temperature": self.temperature,
            "logit_softcap": self.softcap,
            "logit_scale": self.scale,
        }

    @property
    def batch(self) -> oracles.Batch:
        return oracles.Batch(
            self.ids, self.mask, self.advantages, self.old, self.ref, self.sampling, self.num_items, self.num_sequences
        )

    @property
    def log_probs(self) -> Tensor:
        return oracles.log_probs(self.hidden, self.weight, self.ids, self.mask, self.head)

    def inputs(self, **changes: Any) -> Any:
        """The same as a losses.LossInputs."""
        import losses

        given: dict[str, Any] = {
            "completion_ids": self.ids,
            "completion_mask": self.mask.to(self.mask_dtype),
            "advantages": self.advantages,
            "old_per_token_logps": self.old,
            "ref_per_token_logps": self.ref,
            "sampling_per_token_logps": self.sampling,
            "num_items_in_batch": self.num_items,
            "num_sequences_in_batch": self.num_sequences,
            "group_ids": self.group_ids,
            "ref_hidden": self.ref_hidden,
            "ref_lm_head_weight": self.ref_weight,
        }
        return losses.LossInputs(**(given | changes))

    def rows(self, index: Tensor | slice, **changes: Any) -> Case:
        """The completions `index` of the batch, with everything per completion that belongs to them."""

        def take(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[index]

        names = ("hidden", "ids", "mask", "advantages", "old", "ref", "sampling", "group_ids", "ref_hidden")
        return replace(self, **({name: take(getattr(self, name)) for name in names} | changes))

    def cast(self, dtype: torch.dtype) -> Case:
        """Hidden, weight and bias rounded to `dtype`; log-probs and advantages to float32 unless it is float64."""
        rest = torch.float64 if dtype == torch.float64 else torch.float32

        def to(x: Tensor | None, kind: torch.dtype) -> Tensor | None:
            return None if x is None else x.to(kind)

        return replace(
            self,
            hidden=self.hidden.to(dtype),
            weight=self.weight.to(dtype),
            bias=to(self.bias, dtype),
            ref_hidden=self.ref_hidden.to(dtype),
            ref_weight=self.ref_weight.to(dtype),
            advantages=self.advantages.to(rest),
            old=to(self.old, rest),
            ref=to(self.ref, rest),
            sampling=to(self.sampling, rest),
        )


def make_case(
    seed: int,
    batch: int = 3,
    length: int = 5,
    width: int = 4,
    vocab: int = 11,
    mask_kind: str = "right",
    mask_dtype: torch.dtype = torch.bool,
    bias: bool = False,
    old: bool = True,
    ref: bool = True,
    sampling: bool = False,
    token_advantages: bool = False,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    spread: float = 1.0,
    groups: int = 2,
    **options: Any,
) -> Case:
    """A case from a seed. `spread` scales the logits' standard deviation."""
    rng = generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    mask = make_mask(mask_kind, batch, length, seed)
    case = Case(
        hidden=normal(batch, length, width) * spread / width**0.5,
        weight=normal(vocab, width),
        bias=normal(vocab) * 0.3 if bias else None,
        ids=torch.randint(0, vocab, (batch, length), generator=rng),
        mask=mask,
        advantages=normal(batch, length) if token_advantages else normal(batch),
        old=None,
        ref=None,
        sampling=None,
        group_ids=torch.arange(batch) % max(groups, 1),
        ref_hidden=normal(batch, length, width) * spread / width**0.5,
        ref_weight=normal(vocab, width),
        mask_dtype=mask_dtype,
        temperature=temperature,
        softcap=softcap,
        scale=scale,
        options=options,
    )
    n = oracles.log_probs(case.hidden, case.weight, case.ids, torch.ones_like(mask), case.head)
    drawn_from = n + 0.2 * normal(batch, length) if old else n
    return replace(
        case,
        old=drawn_from if old else None,
        ref=n + 0.5 * normal(batch, length) if ref else None,
        sampling=drawn_from + 0.1 * normal(batch, length) if sampling else None,
    )


seeds = st.integers(0, 2**20)
mask_kinds = st.sampled_from(MASK_KINDS)
mask_dtypes = st.sampled_from(MASK_DTYPES)
dtypes = st.sampled_from(DTYPES)
chunk_sizes = st.sampled_from((1, 2, 3, 7, 64))
temperatures = st.sampled_from((1.0, 0.5, 0.7, 1.3))
softcaps = st.sampled_from((None, 2.0, 30.0))
scales = st.sampled_from((1.0, 0.0625, 2.5))
betas = st.sampled_from((0.04, 0.0, 1.0))
sampling_modes = st.sampled_from(("sequence_truncate", "sequence_mask", "token_truncate", "token_mask"))
epsilons = st.sampled_from(((None, None), (0.2, None), (0.13, 0.28)))


@st.composite
def cases(draw: st.DrawFn, **fixed: Any) -> Case:
    """Cases of every structure; keyword arguments of `make_case` hold some of it fixed."""
    low, high = draw(epsilons)
    beta = draw(betas)
    drawn: dict[str, Any] = {
        "seed": draw(seeds),
        "batch": draw(st.integers(1, 5)),
        "length": draw(st.integers(1, 7)),
        "width": draw(st.sampled_from((1, 3, 8))),
        "vocab": draw(st.sampled_from((2, 5, 17))),
        "mask_kind": draw(mask_kinds),
        "mask_dtype": draw(mask_dtypes),
        "bias": draw(st.booleans()),
        "old": draw(st.booleans()),
        "sampling": draw(st.booleans()),
        "token_advantages": draw(st.booleans()),
        "temperature": draw(temperatures),
        "softcap": draw(softcaps),
        "scale": draw(scales),
        "ref": beta > 0 or draw(st.booleans()),
        "beta": beta,
        "sampling_mode": draw(sampling_modes),
        "sampling_clip_max": draw(st.sampled_from((3.0, 1.02))),
        "epsilon": low,
        "epsilon_high": high,
    }
    return make_case(**(drawn | fixed))


@st.composite
def permutations(draw: st.DrawFn, size: int) -> Tensor:
    """A permutation of range(size) as an index tensor."""
    return torch.tensor(draw(st.permutations(range(size))), dtype=torch.long)


@st.composite
def splits(draw: st.DrawFn, size: int) -> list[slice]:
    """A split of range(size) into consecutive non-empty parts."""
    cuts = sorted(draw(st.sets(st.integers(1, size - 1)))) if size > 1 else []
    edges = [0, *cuts, size]
    return [slice(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
