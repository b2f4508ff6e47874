"""A causal LM's forward that hands its last hidden states to a function instead of computing logits.

    attach(model)
    model(input_ids=..., attention_mask=..., on_hidden=lambda hidden, weight, bias: ...)

The call goes through the model as it is wrapped (PEFT, DDP, autocast), so that hooks, gradient synchronisation and
precision are those of an ordinary forward; without `on_hidden` the forward is the original one, and generation is
unchanged.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import Tensor, nn


def attach(model: nn.Module) -> None:
    """Gives a transformers causal LM (a PEFT model's base) the `on_hidden` keyword."""
    original = model.forward

    @functools.wraps(type(model).forward)  # generate() reads the signature
    def forward(self: Any, *args: Any, on_hidden: Any = None, **kwargs: Any) -> Any:
        if on_hidden is None:
            return original(*args, **kwargs)
        hidden = self.base_model(*args, **kwargs, use_cache=False).last_hidden_state
        weight, bias = head_parameters(self)
        return on_hidden(hidden.to(weight.device), weight, bias)

    model.forward = types.MethodType(forward, model)


def head_parameters(model: Any) -> tuple[Tensor, Tensor | None]:
    """Weight (V, H) and bias (V,) or None of the LM head in use. Raises ValueError where an adapter is on the head."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings: a causal LM with an LM head is needed")
    if hasattr(head, "modules_to_save"):  # PEFT's full copy of the head
        active = head.active_adapters if not getattr(head, "disable_adapters", False) else []
        copies = [head.modules_to_save[name] for name in active if name in head.modules_to_save]
        head = copies[0] if copies else head.original_module
    elif hasattr(head, "base_layer"):
        raise ValueError(
            "peft target_modules includes the LM head: its adapter would be left out of the loss. "
            "Take lm_head out of target_modules, or train a full copy with modules_to_save=['lm_head']"
        )
    return head.weight, getattr(head, "bias", None)


def logit_options(config: Any) -> dict[str, float | None]:
    """`logit_softcap` and `logit_scale` of a model's config, as `losses` takes them.

    Gemma caps its logits; Cohere multiplies them (`logit_scale`), Falcon-H1 too (`lm_head_multiplier`), Granite and
    MiniCPM3 divide by `logits_scaling`, by which HyperCLOVA X multiplies.
    """
    text = config.get_text_config()
    names = ("logit_scale", "output_multiplier", "lm_head_multiplier")
    scale = next((value for name in names if (value := getattr(text, name, None)) is not None), None)
    scaling = getattr(text, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = scaling if text.model_type == "hyperclovax" else 1 / scaling
    return {
        "logit_softcap": getattr(text, "final_logit_softcapping", None),
        "logit_scale": 1.0 if scale is None else float(scale),
    }
