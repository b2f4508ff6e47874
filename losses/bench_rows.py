"""What `losses.bench` measures: a problem, and a list of rows, each one way to compute LM head + loss."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import losses
from losses.spec import nearest

BETA = 0.04


@dataclass(frozen=True)
class Shape:
    """hidden (batch, tokens / batch, hidden) and weight (vocab, hidden) in `dtype`; head "frozen" or "train"."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str = "float32"
    head: str = "frozen"
    batch: int = 1
    device: str = "cpu"
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        return f"{self.device}-{self.dtype}-{self.head}-{self.tokens}x{self.hidden}x{self.vocab}"


@dataclass(frozen=True)
class Problem:
    """Random tokens, logits with a deviation of about 2, reference log-probs near the policy's; nothing is masked."""

    shape: Shape
    hidden: Tensor  # (B, T, H)
    weight: Tensor  # (V, H)
    ids: Tensor  # (B, T)
    advantages: Tensor  # (B,)
    ref: Tensor  # (B, T)

    @classmethod
    def make(cls, shape: Shape) -> Problem:
        rng = torch.Generator(shape.device).manual_seed(shape.seed)
        like: dict[str, Any] = {"generator": rng, "device": shape.device}
        size = (shape.batch, shape.tokens // shape.batch)
        weight = torch.randn(shape.vocab, shape.hidden, dtype=shape.torch_dtype, **like)
        return cls(
            shape,
            hidden=torch.randn(*size, shape.hidden, dtype=shape.torch_dtype, **like),
            weight=weight.mul_(2 / math.sqrt(shape.hidden)),
            ids=torch.randint(0, shape.vocab, size, **like),
            advantages=torch.randn(shape.batch, **like),
            ref=-torch.rand(*size, **like) * 3 - 9,
        )

    def leaves(self) -> tuple[Tensor, Tensor]:
        """New leaves on the same memory, so that no row sees another one's gradients."""
        return (
            self.hidden.detach().requires_grad_(),
            self.weight.detach().requires_grad_(self.shape.head == "train"),
        )


def _k3(n: Tensor, p: Tensor) -> Tensor:
    return torch.exp(p - n) - (p - n) - 1


# The founding variants' token terms (n, p, A) -> (B, T), written again: the gate does not ask the library about itself.
TERMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "reference": lambda n, p, a: -torch.exp(n - n.detach()) * a + BETA * _k3(n, p),
    "no_detach": lambda n, p, a: -torch.exp(n - n) * a + BETA * _k3(n, p),
    "full_reverse_kl": lambda n, p, a: -torch.exp(n - n.detach()) * a + BETA * torch.exp(n) * _k3(n, p),
    "forward_kl": lambda n, p, a: -torch.exp(n - n.detach()) * a + BETA * torch.exp(p) * (p - n),
}


# Others come from the library, at the gate as well: the gate then holds their products and not their terms.
VARIANTS = (*TERMS, *(n for n in losses.names() if n not in TERMS and losses.get(n).vocabulary is None))


def params(variant: str, problem: Problem) -> dict[str, Any]:
    known = {p.name for p in losses.get(variant).all_params}
    longest = {"max_completion_length": problem.ref.shape[1]} if "max_completion_length" in known else {}
    return {"beta": BETA, **longest}


def inputs_of(problem: Problem) -> losses.LossInputs:
    return losses.LossInputs(
        problem.ids, torch.ones_like(problem.ids), problem.advantages, ref_per_token_logps=problem.ref
    )


def plain_loss(problem: Problem, logps: Tensor, variant: str) -> Tensor:
    """The variant's loss from log-probs (tokens,), in their dtype."""
    n = logps.view_as(problem.ref)
    if variant not in TERMS:
        return losses.policy_loss(n, inputs_of(problem), variant, **params(variant, problem)).loss
    terms = TERMS[variant](n, problem.ref.to(n.dtype), problem.advantages.to(n.dtype).unsqueeze(1))
    return terms.mean(1).mean()


Run = Callable[[Problem, Tensor, Tensor, str], Tensor]  # (problem, hidden, weight, variant) -> loss


@dataclass(frozen=True)
class Row:
    """One way to compute the loss. `package`: what it needs; `budget`: its error over an independent computation's."""

    name: str
    label: str
    run: Run
    package: str | None = None
    variants: tuple[str, ...] = VARIANTS
    devices: tuple[str, ...] = ("cpu", "cuda")
    budget: float = 2.0
    ours: bool = False

    @property
    def peer(self) -> bool:
        """Whether it is others' code, which may fail without this library being wrong."""
        return self.package is not None and not self.ours


def missing(package: str | None) -> str | None:
    """Why a row that needs `package` cannot run, or None."""
    there = package is None or importlib.util.find_spec(package) is not None
    return None if there else f"{package} is not installed"


def _full(problem: Problem, hidden: Tensor, weight: Tensor, variant: str) -> Tensor:
    logits = hidden.view(-1, hidden.shape[-1]) @ weight.t()
    logps = torch.log_softmax(logits.float(), -1).gather(1, problem.ids.view(-1, 1)).squeeze(1)
    return plain_loss(problem, logps, variant)


def _ours(
    problem: Problem, hidden: Tensor, weight: Tensor, variant: str, *, backend: str, precision: str = "auto"
) -> Tensor:
    return losses.linear_policy_loss(
        hidden, weight, inputs_of(problem), variant, backend=backend, precision=precision, **params(variant, problem)
    ).loss


def _trl(problem: Problem, hidden: Tensor, weight: Tensor, variant: str) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    flat = hidden.view(-1, hidden.shape[-1])
    logps = ChunkedLogProbFunction.apply(
        flat, weight, None, problem.ids.view(-1), 1.0, 32768, None, 1.0, ("log_probs",)
    )[0]
    return plain_loss(problem, logps.float(), variant)


def _unsloth(problem: Problem, hidden: Tensor, weight: Tensor, variant: str) -> Tensor:
    os.environ.setdefault("UNSLOTH_IS_PRESENT", "1")  # it refuses to be imported alone
    from unsloth_zoo.fused_losses.fused_linear import fused_linear_logprobs

    return plain_loss(
        problem, fused_linear_logprobs(hidden.flatten(0, 1), weight, problem.ids.view(-1)).float(), variant
    )


def _cut_cross_entropy(problem: Problem, hidden: Tensor, weight: Tensor, variant: str) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    nll = linear_cross_entropy(hidden.flatten(0, 1), weight, problem.ids.view(-1), reduction="none")
    return plain_loss(problem, -nll.float(), variant)


def _liger(problem: Problem, hidden: Tensor, weight: Tensor, variant: str) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=BETA, loss_type="grpo", use_ref_model=True)
    mask = torch.ones_like(problem.ids)
    return loss(hidden, weight, problem.ids, mask, problem.advantages, ref_per_token_logps=problem.ref)[0]


def _backend_row(name: str, **kwargs: Any) -> Row:
    return Row(name, f"ours: {name}", functools.partial(_ours, backend=name), ours=True, **kwargs)


# A peer rounds where it sees fit: its budget only says that it computes the same function.
ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row("full", "full logits (torch)", _full),
        _backend_row("reference"),
        _backend_row("chunked"),
        _backend_row("triton", package="triton", devices=("cuda",)),
        Row(
            "triton-fp8",
            "ours: triton, fp8",
            functools.partial(_ours, backend="triton", precision="fp8"),
            package="triton",
            devices=("cuda",),
            budget=20.0,
            ours=True,
        ),
        Row("trl", "TRL fused head", _trl, package="trl", budget=10.0),
        Row("unsloth", "Unsloth fused head", _unsloth, package="unsloth_zoo", devices=("cuda",), budget=10.0),
        Row(
            "cce", "cut-cross-entropy", _cut_cross_entropy, package="cut_cross_entropy", devices=("cuda",), budget=20.0
        ),
        Row("liger", "Liger", _liger, package="liger_kernel", variants=("reference",), budget=10.0),
    )
}


def choose_rows(names: str | None, device: str) -> list[Row]:
    """Rows by name, comma-separated; "all": those of this device; None: `full` and the library's own of those.

    Raises ValueError for an unknown name, or for one that does not run on `device`.
    """
    if names is None or names == "all":
        return [r for r in ROWS.values() if device in r.devices and (names or not r.peer)]
    chosen = []
    for name in names.split(","):
        if name not in ROWS:
            raise ValueError(f"unknown row {name!r}; {nearest(name, ROWS)}")
        if device not in ROWS[name].devices:
            raise ValueError(f"row {name!r} cannot run: it runs on {' and '.join(ROWS[name].devices)} only")
        chosen.append(ROWS[name])
    return chosen


@dataclass(frozen=True)
class Entry:
    row: Row
    variant: str

    @property
    def name(self) -> str:
        return self.row.name

    def __str__(self) -> str:
        return f"{self.row.name}[{self.variant}]"

    def step(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
        """Forward and backward: loss, d hidden, d weight."""
        hidden, weight = problem.leaves()
        loss = self.row.run(problem, hidden, weight, self.variant)
        loss.backward()
        assert hidden.grad is not None
        return loss.detach(), hidden.grad, weight.grad


def entries(rows: Iterable[Row], variants: list[str]) -> list[Entry]:
    """The library's own rows for every variant, others for the first of theirs: their time does not depend on it."""
    return [Entry(r, v) for r in rows for v in [v for v in variants if v in r.variants][: None if r.ours else 1]]
