"""Gradients of one batch's parts and their dot products: one forward for each micro-batch, a backward for each part.

The dot products of all parts are summed up by layer group, parameter by parameter, in float64. The gradients of a block
of parameters are kept in host memory as float32; where those of all parameters would not fit, the backward passes are
repeated block by block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import losses
from ablate.errors import ConfigError
from ablate.replay_stored import Batch
from ablate.replay_terms import Components

SLICE = 1 << 18  # values of a gradient that are multiplied in float64 at a time
Head = tuple[Tensor, Tensor, Tensor | None]  # hidden (B, T, H) that predicts the completion, LM head weight, bias


@dataclass(frozen=True)
class Models:
    """Policy and reference on one device, with what their log-probs are computed under.

    base: the policy's causal LM. reference: opens the reference for use. options: of `losses.per_token_logps`.
    autocast: opens the run's precision. rows: completions in a forward.
    """

    policy: nn.Module
    base: nn.Module
    reference: Callable[[], AbstractContextManager[nn.Module]]
    options: dict[str, Any]
    autocast: Callable[[], AbstractContextManager[Any]]
    rows: int

    def parts(self, batch: Batch) -> Iterator[tuple[slice, Batch]]:
        for start in range(0, len(batch), self.rows):
            yield slice(start, start + self.rows), batch.rows(start, start + self.rows)

    def head(self, model: nn.Module, batch: Batch) -> Head:
        """The model's hidden states and LM head on a batch, inside its own forward."""
        length = batch.completion_ids.shape[1]

        def on_hidden(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Head:
            return hidden[:, -length - 1 : -1], weight, bias

        with self.autocast():
            return model(
                input_ids=torch.cat([batch.prompt_ids, batch.completion_ids], 1),
                attention_mask=torch.cat([batch.prompt_mask, batch.completion_mask], 1),
                on_hidden=on_hidden,
            )

    def log_probs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (B, T), 0 where masked, without gradient."""
        found = []
        with torch.no_grad(), self.autocast():
            for _, part in self.parts(batch):
                hidden, weight, bias = self.head(model, part)
                found.append(
                    losses.logps_and_entropy(
                        hidden, weight, part.completion_ids, lm_head_bias=bias, completion_mask=part.completion_mask,
                        **self.options,
                    )
                )  # fmt: skip
        mask = batch.completion_mask.bool()
        logps, entropy = (torch.where(mask, torch.cat(x), 0) for x in zip(*found, strict=True))
        return logps, entropy


@dataclass(frozen=True)
class Gram:
    """Dot products (parts, parts) float64 of the parts' gradients by layer group, and each group's trained
    parameters.
    """

    by_group: dict[str, Tensor]
    sizes: dict[str, int]

    @property
    def whole(self) -> Tensor:
        return torch.stack(list(self.by_group.values())).sum(0)


def gram(
    models: Models, batch: Batch, parts: Components, *, memory: int | None = None, progress: Callable[[str], None]
) -> Gram:
    """Dot products of the gradients of all parts over what the policy trains.

    memory: bytes of host memory for gradients; None: half of what is free. Raises ConfigError where a gradient is
    not finite.
    """
    trained = [(name, p) for name, p in models.policy.named_parameters() if p.requires_grad]
    head = _head_weight(models.base)
    tied = head is not None and head is _embedding_weight(models.base)
    count = max(1, len(parts.parts))
    by_group: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    blocks = list(_blocks(trained, count, memory or psutil.virtual_memory().available // 2))
    for number, block in enumerate(blocks, 1):
        note = f", block {number} of {len(blocks)}" if len(blocks) > 1 else ""
        store = _gradients(models, batch, parts, [p for _, p in block], progress, note)
        for (name, p), values in zip(block, store, strict=True):
            group = layer_group(name, head=p is head, tied=tied)
            sizes[group] = sizes.get(group, 0) + p.numel()
            products = _products(values)
            by_group[group] = by_group[group] + products if group in by_group else products
    if not all(bool(torch.isfinite(products).all()) for products in by_group.values()):
        raise ConfigError("policy: its gradient on this batch is not finite; replay a step before the run diverged")
    return Gram(by_group, sizes)


def _blocks(
    trained: Sequence[tuple[str, nn.Parameter]], count: int, memory: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Parameters in order, in blocks whose gradients of all parts fit in `memory`; one that is too large is alone."""
    block: list[tuple[str, nn.Parameter]] = []
    used = 0
    for name, p in trained:
        need = 4 * count * p.numel()
        if block and used + need > memory:
            yield block
            block, used = [], 0
        block.append((name, p))
        used += need
    if block:
        yield block


def _gradients(
    models: Models,
    batch: Batch,
    parts: Components,
    block: list[nn.Parameter],
    progress: Callable[[str], None],
    note: str = "",
) -> list[Tensor]:
    """(parts, numel) float32 on the host for each parameter of the block."""
    store = [torch.zeros(len(parts.parts), p.numel()) for p in block]
    for rows, part in models.parts(batch):
        hidden, weight, bias = models.head(models.policy, part)
        reference = None
        if any(direction for direction, _ in parts.parts):
            with models.reference() as model, torch.no_grad():
                reference = models.head(model, part)
        leaf = hidden.detach().requires_grad_(True)
        pull = _Pull(models, part, leaf, weight, bias, reference)
        for i, (direction, g) in enumerate(parts.parts):
            place = f"completions {rows.start + 1} to {rows.start + len(part)}"
            progress(f"{place}, gradient {i + 1} of {len(parts.parts)}{note}")
            d_hidden, d_head = pull(direction, g[rows])
            # float16 holds nothing below 6e-8: scaled by a power of two, which changes no digit.
            scale = _scale(d_hidden) if d_hidden.dtype == torch.float16 else 1.0
            found = torch.autograd.grad(
                hidden, block, d_hidden * scale, retain_graph=True, allow_unused=True
            )  # the graph stays for the next part
            for values, p, grad in zip(store, block, found, strict=True):
                if grad is not None:
                    values[i] += grad.reshape(-1).float().cpu() / scale
                if (own := next((d for q, d in d_head if q is p), None)) is not None:
                    values[i] += own.reshape(-1).float().cpu()
    return store


def _scale(x: Tensor) -> float:
    top = float(x.detach().abs().max())
    return float(2.0 ** -torch.tensor(top).log2().ceil()) if 0 < top < float("inf") else 1.0


class _Pull:
    """From d loss / d n, or an exact KL's weights, to d hidden and the LM head's own gradients."""

    def __init__(
        self, models: Models, part: Batch, leaf: Tensor, weight: Tensor, bias: Tensor | None, reference: Head | None
    ) -> None:
        self.models, self.part, self.leaf, self.reference = models, part, leaf, reference
        self.weight, self.bias = weight, bias
        self.trained = [x for x in (weight, bias) if x is not None and x.requires_grad]
        self.n: Tensor | None = None
        self.u: Tensor | None = None

    def __call__(self, direction: str | None, g: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        mask = self.part.completion_mask
        if direction is not None:
            assert self.reference is not None
            hidden, weight, bias = self.reference
            with self.models.autocast():
                kl = losses.exact_kl(
                    self.leaf, self.weight, hidden, weight, direction=direction,  # type: ignore[arg-type]
                    lm_head_bias=self.bias, ref_lm_head_bias=bias, completion_mask=mask, **self.models.options,
                )  # fmt: skip
            return self._of((g * kl).sum())
        if self.trained:
            if self.n is None:
                self.n = self._log_probs(self.leaf)
            return self._of((g * self.n).sum(), keep=True)
        if self.u is None:  # with a frozen head d hidden is g u, and u is the same for every part
            (self.u,) = torch.autograd.grad(self._log_probs(self.leaf).sum(), self.leaf)
        return (self.u.float() * g.unsqueeze(-1)).to(self.leaf.dtype), []

    def _log_probs(self, hidden: Tensor) -> Tensor:
        with self.models.autocast():
            return losses.per_token_logps(
                hidden, self.weight, self.part.completion_ids, lm_head_bias=self.bias,
                completion_mask=self.part.completion_mask, **self.models.options,
            )  # fmt: skip

    def _of(self, loss: Tensor, keep: bool = False) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        d_hidden, *own = torch.autograd.grad(loss, [self.leaf, *self.trained], retain_graph=keep)
        return d_hidden, list(zip(self.trained, own, strict=True))


def _products(values: Tensor) -> Tensor:
    """values @ values^T in float64, without a float64 copy of the whole."""
    total = torch.zeros(len(values), len(values), dtype=torch.float64)
    for piece in values.split(SLICE, dim=1):
        wide = piece.double()
        total += wide @ wide.T
    return total


def _head_weight(base: Any) -> Tensor | None:
    head = base.get_output_embeddings()
    if hasattr(head, "modules_to_save"):
        head = next((m for m in head.modules_to_save.values()), head)
    return getattr(head, "weight", None)


def _embedding_weight(base: Any) -> Tensor | None:
    return getattr(base.get_input_embeddings(), "weight", None)


def layer_group(name: str, *, head: bool = False, tied: bool = False) -> str:
    """The group of a parameter: 'embeddings', 'block 3 attention', 'block 3 MLP', 'norms', 'head', 'embeddings and
    head' where one matrix is both, or 'other'; ' lora_A' or ' lora_B' behind it for a LoRA adapter's.

    name: as in `named_parameters`. head: it is the LM head's. tied: the LM head is the embedding.
    """
    found = re.search(r"(?:^|\.)(?:layers|h|blocks?|layer)\.(\d+)\.(.*)", name)
    rest = found[2] if found else name
    if head:
        group = "embeddings and head" if tied else "head"
    elif re.search(r"norm|(?:^|\.)ln_", rest):
        group = "norms"
    elif found and "attn" in rest or found and "attention" in rest:
        group = f"block {found[1]} attention"
    elif found and re.search(r"mlp|feed_forward|ffn|fc|expert|moe", rest):
        group = f"block {found[1]} MLP"
    elif found:
        group = f"block {found[1]} other"
    elif re.search(r"embed_out|lm_head", rest):
        group = "head"
    elif re.search(r"embed|(?:^|\.)w[tp]e\b", rest):
        group = "embeddings"
    else:
        group = "other"
    adapter = re.search(r"\.(lora_(?:embedding_)?[AB])\b", name)
    return f"{group} {adapter[1]}" if adapter else group


def kind_of(group: str) -> str:
    """Embeddings, attention, MLP, norms, head or other, whichever block it is in."""
    plain = re.sub(r"^block \d+ | lora_\w+$", "", group)
    return "embeddings" if plain == "embeddings and head" else plain
