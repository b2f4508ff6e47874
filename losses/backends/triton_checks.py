"""The checks of values in one launch: as operations of their own they were a third of a step's launches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from losses.checks import Question

BLOCK = 1024
IDS, MASK, FIRST = 0, 1, 2  # places of the answers; those for tensors that must be finite follow
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _note(found, bad):
    if tl.max(bad.to(tl.int32), 0) > 0:
        tl.store(found, 1)


@triton.jit
def _infinite(v):
    if v.dtype != tl.float64:
        v = v.to(tl.float32)
    return (v != v) | (tl.abs(v) == INFINITY)


@triton.jit
def find_bad(
    found, ids, vocab, mask, of_tokens, of_rows, size, length, ASK_IDS: tl.constexpr, ASK_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """found[i] = 1 where something at an unmasked token must be refused: an id outside the vocabulary, a mask that is
    neither 0 nor 1 (anywhere), NaN or infinity in one of of_tokens (B, T) or of_rows (B,); size = B x T.
    """
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = k < size
    m = tl.load(mask + k, mask=here, other=0)
    live = here & (m != 0)
    if ASK_MASK:
        _note(found + 1, live & (m != 1))
    if ASK_IDS:
        y = tl.load(ids + k, mask=live, other=0)
        _note(found, live & ((y < 0) | (y >= vocab)))
    for i in tl.static_range(len(of_tokens)):
        _note(found + 2 + i, live & _infinite(tl.load(of_tokens[i] + k, mask=live, other=0.0)))
    for i in tl.static_range(len(of_rows)):
        _note(
            found + 2 + len(of_tokens) + i,
            live & _infinite(tl.load(of_rows[i] + k // length, mask=live, other=0.0)),
        )


def answers(questions: list[Question]) -> list[bool]:
    """Whether each refuses, with one wait. Questions about other masks than the first's are asked as they are."""
    if not questions:
        return []
    values = [question.values for question in questions]
    mask = next((v.mask for v in values if v is not None and v.mask is not None and v.mask.numel()), None)
    places: dict[int, int] = {}  # question -> place in `found`
    chosen: dict[str, list[Tensor]] = {"ids": [], "mask": [], "token": [], "row": []}
    vocab = 0
    for kind in chosen:
        for i, v in enumerate(values):
            if v is None or mask is None or v.kind != kind or v.mask is not mask:
                continue
            if kind in ("ids", "mask") and chosen[kind]:
                continue
            places[i] = {"ids": IDS, "mask": MASK}.get(kind, FIRST + len(chosen["token"]) + len(chosen["row"]))
            vocab = v.bound if kind == "ids" else vocab
            chosen[kind].append(v.x.detach().contiguous())
    parts = []
    if mask is not None and places:
        found = torch.zeros(FIRST + len(questions), dtype=torch.int32, device=mask.device)
        _launch(found, mask, vocab, chosen)
        parts.append(found)
    others = [i for i in range(len(questions)) if i not in places]
    parts += [questions[i].bad().any().to(torch.int32).view(1) for i in others]
    flat = (parts[0] if len(parts) == 1 else torch.cat(parts)).tolist()
    rest = dict(zip(others, flat[len(flat) - len(others) :], strict=True))
    return [bool(flat[places[i]] if i in places else rest[i]) for i in range(len(questions))]


def _launch(found: Tensor, mask: Tensor, vocab: int, chosen: dict[str, list[Tensor]]) -> None:
    flat: Any = mask.contiguous()
    flat = flat.view(torch.int8) if flat.dtype == torch.bool else flat
    ids = chosen["ids"][0] if chosen["ids"] else None
    with torch.cuda.device(mask.device) if mask.is_cuda else nullcontext():
        find_bad[(triton.cdiv(mask.numel(), BLOCK),)](
            found, ids, vocab, flat, tuple(chosen["token"]), tuple(chosen["row"]), mask.numel(), mask.shape[-1],
            ASK_IDS=ids is not None, ASK_MASK=bool(chosen["mask"]), BLOCK=BLOCK,
        )  # fmt: skip
