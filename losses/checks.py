"""Refusals: what an input must be, said by the argument's name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from losses.spec import LossInputs, Variant


def may_look(x: Tensor) -> bool:
    """Whether values may be read: that waits for the device, which neither a graph under capture nor a compiler can."""
    return not torch.compiler.is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


@dataclass(frozen=True)
class Values:
    """What a question is about. kind: "ids" (x in [0, bound)), "mask" (0 or 1), "token" or "row" (finite x (B, T) or
    (B,)); at unmasked tokens."""

    kind: str
    x: Tensor
    mask: Tensor | None
    bound: int = 0


@dataclass(frozen=True)
class Question:
    """One check of values: `bad()` is true somewhere where the input must be refused, `refuse()` raises."""

    bad: Callable[[], Tensor]
    refuse: Callable[[], NoReturn]
    values: Values | None = None


_open: ContextVar[list[Question] | None] = ContextVar("_open", default=None)


@contextmanager
def collecting(questions: list[Question]) -> Iterator[None]:
    """Checks of values within the block go into `questions`, for `settle`, instead of being answered one by one."""
    before = _open.set(questions)
    try:
        yield
    finally:
        _open.reset(before)


Answers = Callable[[list[Question]], list[bool]]


def answers(questions: list[Question]) -> list[bool]:
    return torch.stack([question.bad().any() for question in questions]).tolist()


def settle(questions: list[Question], answers: Answers = answers) -> None:
    """Answers all of them with one wait for the device; raises for the first that refuses.

    answers: whether each refuses; a backend may have a shorter way.
    """
    for question, bad in zip(questions, answers(questions) if questions else [], strict=True):
        if bad:
            question.refuse()


def _ask(bad: Callable[[], Tensor], refuse: Callable[[], NoReturn], values: Values) -> None:
    questions = _open.get()
    if questions is not None:
        questions.append(Question(bad, refuse, values))
    elif bad().any():
        refuse()


def check_finite(name: str, x: Tensor | None, mask: Tensor | None = None) -> None:
    """Raises ValueError naming `name` and the first place where `x` is NaN or infinite at an unmasked token."""
    if x is None or not may_look(x):
        return

    def bad() -> Tensor:
        infinite = x.detach() * 0 != 0  # NaN of NaN and of infinities: fewer launches than isfinite
        if mask is None:
            return infinite
        return infinite & (mask.bool() if x.dim() == 2 else mask.bool().any(-1))

    def refuse() -> NoReturn:
        where = tuple(bad().nonzero()[0].tolist())
        raise ValueError(f"{name} is {x[where].item()} at {where}: every unmasked value must be finite")

    _ask(bad, refuse, Values("token" if x.dim() == 2 else "row", x, mask))


def check_integers(ids: Tensor) -> None:
    """Raises ValueError where token ids are of no integer dtype."""
    if ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"completion_ids must be integers, not {ids.dtype}")


def check_ids(ids: Tensor, mask: Tensor | None, vocab: int) -> None:
    """Raises ValueError where an unmasked token id is outside [0, vocab)."""
    if not may_look(ids):
        return

    def bad() -> Tensor:
        outside = (ids < 0) | (ids >= vocab)
        return outside if mask is None else outside & mask.bool()

    def refuse() -> NoReturn:
        where = tuple(bad().nonzero()[0].tolist())
        raise ValueError(
            f"completion_ids holds {ids[where].item()} at {where}, but lm_head_weight has {vocab} rows: "
            "mask the token or use the model's own tokenizer"
        )

    _ask(bad, refuse, Values("ids", ids, mask, vocab))


def check_inputs(variant: Variant, inputs: LossInputs, params: dict[str, Any], shape: torch.Size) -> None:
    """Shapes, needs and finite numbers of `inputs` for log-probs of `shape` (B, T)."""
    if len(shape) != 2:
        raise ValueError(f"per-token log-probs must be (B, T), not {tuple(shape)}")
    for name in (
        "completion_ids",
        "completion_mask",
        "old_per_token_logps",
        "ref_per_token_logps",
        "sampling_per_token_logps",
    ):
        x = getattr(inputs, name)
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, but the policy's log-probs are {tuple(shape)}")
    if inputs.advantages.shape not in (shape, shape[:1]):
        raise ValueError(
            f"advantages has shape {tuple(inputs.advantages.shape)}; it must be {tuple(shape[:1])} or {tuple(shape)}"
        )
    if inputs.group_ids is not None and inputs.group_ids.shape != shape[:1]:
        raise ValueError(f"group_ids has shape {tuple(inputs.group_ids.shape)}; it must be {tuple(shape[:1])}")
    check_integers(inputs.completion_ids)
    check_mask(inputs.completion_mask)
    if params["beta"] > 0:
        if variant.vocabulary is not None and inputs.ref_hidden is None:
            raise ValueError(
                f"ref_hidden is needed by {variant.name!r} with beta > 0: give the reference's states, or beta=0"
            )
        on_samples = variant.kl is not None or variant.shape_advantage is not None
        if variant.vocabulary is None and on_samples and inputs.ref_per_token_logps is None:
            raise ValueError(
                f"ref_per_token_logps is needed by {variant.name!r} with beta={params['beta']}: "
                "give the reference's log-probs, or beta=0"
            )
    mask = inputs.completion_mask
    check_finite("advantages", inputs.advantages, mask)
    for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"):
        check_finite(name, getattr(inputs, name), mask)
    for name in ("num_items_in_batch", "num_sequences_in_batch"):
        count = getattr(inputs, name)
        if isinstance(count, Tensor) and count.dim() != 0:
            raise ValueError(f"{name} must be an int or a 0-d tensor, not {tuple(count.shape)}")
        if isinstance(count, int | float) and not 0 <= count < math.inf:
            raise ValueError(f"{name}={count} must be a number of 0 or more")


def check_tensors(inputs: LossInputs) -> None:
    """Raises ValueError where a field of `inputs` that must be a tensor is none, or they are on several devices."""
    for name, x in vars(inputs).items():
        if name in ("num_items_in_batch", "num_sequences_in_batch"):
            if x is not None and not isinstance(x, Tensor | int | float):
                raise ValueError(f"{name} must be a number or a 0-d tensor, not {type(x).__name__}")
        elif x is None and name not in ("completion_ids", "completion_mask", "advantages"):
            continue
        elif not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, not {type(x).__name__}")
        elif x.device != inputs.completion_ids.device:
            raise ValueError(f"{name} is on {x.device}, completion_ids on {inputs.completion_ids.device}")


def check_logps(x: Tensor, inputs: LossInputs) -> None:
    """Raises ValueError unless the policy's log-probs are a tensor of floats, on the device of valid `inputs`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise ValueError(f"per_token_logps must be a tensor of floats, not {getattr(x, 'dtype', type(x).__name__)}")
    check_tensors(inputs)
    if x.device != inputs.completion_ids.device:
        raise ValueError(f"completion_ids is on {inputs.completion_ids.device}, per_token_logps on {x.device}")


def check_mask(mask: Tensor) -> None:
    if mask.dtype == torch.bool or not may_look(mask):
        return

    def refuse() -> NoReturn:
        raise ValueError("completion_mask must hold only 0 and 1")

    _ask(lambda: (mask != 0) & (mask != 1), refuse, Values("mask", mask, mask))


def check_head(
    hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor | None, bias: Tensor | None, temperature: float,
    softcap: float | None, scale: float,
) -> None:  # fmt: skip
    """Shapes, devices and ranges of an LM head's product."""
    if hidden.dim() != 3:
        raise ValueError(f"hidden must be (B, T, H), not {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[2]:
        raise ValueError(
            f"lm_head_weight has shape {tuple(weight.shape)}; it must be (V, {hidden.shape[2]}) for this hidden"
        )
    if ids.shape != hidden.shape[:2]:
        raise ValueError(f"completion_ids has shape {tuple(ids.shape)}, but hidden is {tuple(hidden.shape)}")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"completion_mask has shape {tuple(mask.shape)}, but completion_ids {tuple(ids.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"lm_head_bias has shape {tuple(bias.shape)}; it must be {tuple(weight.shape[:1])}")
    for name, x in (
        ("lm_head_weight", weight),
        ("completion_ids", ids),
        ("lm_head_bias", bias),
        ("completion_mask", mask),
    ):
        if x is not None and x.device != hidden.device:
            raise ValueError(f"{name} is on {x.device}, hidden on {hidden.device}")
    check_integers(ids)
    if not hidden.is_floating_point() or not weight.is_floating_point():
        raise ValueError(f"hidden ({hidden.dtype}) and lm_head_weight ({weight.dtype}) must be floating point")
    if not temperature > 0 or temperature == float("inf"):
        raise ValueError(f"temperature={temperature} must be positive and finite")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"logit_softcap={softcap} must be positive and finite, or None")
    if scale == 0 or not math.isfinite(scale):
        raise ValueError(f"logit_scale={scale} must be finite and not 0")
    check_ids(ids, mask, weight.shape[0])
