"""Log-probs and hidden states of policy, old policy and reference: one path, from hidden states and the LM head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.trainer.utils import use_adapter

import losses
from ablate import fp16, lm_head, schema
from ablate.generation import extra_inputs, loss_mask

# What the reference's pass gives a micro-batch: hidden (B, T, H), LM head weight (V, H), bias (V,) or None.
ReferenceHead = tuple[Tensor, Tensor, Tensor | None]


class ScoringTrainer(GRPOTrainer):
    """A GRPOTrainer that scores completions through `losses` instead of its own logits.

    Policy, old and reference log-probs of the same weights are equal to the bit on a CPU.

    Args:
        loss_backend: see `losses.linear_policy_loss`. loss_precision: likewise.
        exact_kl_every: see `AblationTrainer`.
    """

    def __init__(
        self,
        *args: Any,
        loss_backend: str = "auto",
        loss_precision: str = "auto",
        exact_kl_every: int = 0,
        **kwargs: Any,
    ) -> None:
        given = inspect.signature(GRPOTrainer.__init__).bind_partial(self, *args, **kwargs).arguments
        _check_reference(given["model"], given.get("args"), given.get("peft_config"), exact_kl_every)
        super().__init__(*args, **kwargs)
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, PeftModel):
            _widen(model)
        if self.args.fp16:
            fp16.prepare(self)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        lm_head.attach(base)
        if self.ref_model is not None:
            lm_head.attach(self.ref_model)
        self.exact_kl_every = exact_kl_every
        self._head_options = {
            **lm_head.logit_options(base.config),
            "temperature": self.temperature,
            "backend": loss_backend,
            "precision": loss_precision,
        }
        self._scoring = False  # within `_unscored`

    def _with_head(self, model: Any, batch: dict[str, Tensor], function: Callable[..., Any]) -> Any:
        """function(hidden (B, T, H) that predicts the completion, LM head weight, bias), inside the model's forward."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        length = batch["completion_ids"].shape[1]

        def on_hidden(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
            return function(hidden[:, -length - 1 : -1], weight, bias)

        with self.accelerator.autocast():
            return model(input_ids=ids, attention_mask=attention, on_hidden=on_hidden, **extra_inputs(batch))

    def _logps(self, model: Any, batch: dict[str, Tensor], entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        return self._with_head(model, batch, lambda *head: self._head_logps(batch, *head, entropy=entropy))

    def _head_logps(
        self, batch: dict[str, Tensor], hidden: Tensor, weight: Tensor, bias: Tensor | None, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return losses.logps_and_entropy(
            hidden,
            weight,
            batch["completion_ids"],
            lm_head_bias=bias,
            completion_mask=loss_mask(batch),
            entropy=entropy,
            **self._head_options,
        )

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ):
        """TRL's method on the same path; None within `_unscored`."""
        if self._scoring:
            return None, None, None
        if kwargs.pop("compute_aux_loss", False):
            raise ValueError("output_router_logits: the load-balancing loss of mixture models is not added")
        prompt = input_ids.shape[1] - logits_to_keep
        logps: list[Tensor] = []
        entropies: list[Tensor] = []
        size = batch_size or len(input_ids)
        for start in range(0, len(input_ids), size):
            ids, attention = input_ids[start : start + size], attention_mask[start : start + size]
            batch = {
                "prompt_ids": ids[:, :prompt],
                "completion_ids": ids[:, prompt:],
                "prompt_mask": attention[:, :prompt],
                "completion_mask": attention[:, prompt:],
            }
            logp, entropy = self._logps(model, batch, compute_entropy)
            logps.append(logp)
            if entropy is not None:
                entropies.append(entropy)
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None

    @contextmanager
    def _unscored(self) -> Iterator[None]:
        """TRL generates and takes rewards inside, with no log-probs and so no ratio to those of its vLLM."""
        self._scoring, self.vllm_importance_sampling_correction = True, False
        try:
            yield
        finally:
            self._scoring = False
            self.vllm_importance_sampling_correction = self.args.vllm_importance_sampling_correction

    @contextmanager
    def _reference(self) -> Iterator[Any]:
        """The reference: a copy of the start, or the policy with its adapter off (or its own 'ref' adapter on)."""
        if self.ref_model is not None:
            yield self.ref_model
        else:
            peft_model = self.accelerator.unwrap_model(self.model)
            with use_adapter(peft_model, "ref" if "ref" in peft_model.peft_config else None):
                yield self.model

    def _reference_head(self, batch: dict[str, Any], logps: bool) -> tuple[ReferenceHead, Tensor | None]:
        """The reference's side of a micro-batch and, on request, its log-probs (B, T); without gradient."""

        kept: list[Any] = []  # not the forward's result: accelerate makes that float32, the head's weight with it

        def keep(hidden: Tensor, *head: Any) -> Tensor:
            kept.append(((hidden, *head), self._head_logps(batch, hidden, *head)[0] if logps else None))
            return hidden.new_zeros(())

        with torch.no_grad(), self._reference() as model:
            self._with_head(model, batch, keep)
        return kept[0]

    def _is_exact_kl_due(self) -> bool:
        """Whether the step under way measures the exact divergences."""
        every = self.exact_kl_every
        return self.model.training and every > 0 and (self.state.global_step + 1) % every == 0

    def _apart(self) -> Any:
        """What runs inside leaves the random generators as they were."""
        device = self.accelerator.device
        return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])

    @torch.no_grad()
    def _exact_kl(
        self, batch: dict[str, Any], reference: ReferenceHead, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> dict[str, losses.Metric]:
        """KL(policy || reference) and KL(reference || policy) over the vocabulary, in nats, over unmasked tokens."""
        ref_hidden, ref_weight, ref_bias = reference
        mask = loss_mask(batch)
        metrics = {}
        directions: tuple[Literal["reverse", "forward"], ...] = ("reverse", "forward")
        for name, direction in zip(schema.EXACT_KL, directions, strict=True):
            kl = losses.exact_kl(
                hidden,
                weight,
                ref_hidden,
                ref_weight,
                direction=direction,
                lm_head_bias=bias,
                ref_lm_head_bias=ref_bias,
                completion_mask=mask,
                **self._head_options,
            )
            metrics[name] = losses.Metric(kl.sum(), mask.sum())
        return metrics


def _widen(model: PeftModel) -> None:
    """What an adapter trains becomes float32: Adam's small steps are lost in half precision.

    TRL puts an adapter on a 4-bit base in bfloat16, and PEFT copies `modules_to_save` in the base's type.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()


def _check_reference(model: Any, args: Any, peft_config: Any, exact_kl_every: int) -> None:
    """Raises ValueError where a reference is asked for that cannot be had."""
    if exact_kl_every < 0:
        raise ValueError(f"exact_kl_every={exact_kl_every}: steps between measurements, or 0 for none")
    beta = 0.0 if args is None else args.beta
    if peft_config is not None or isinstance(model, PeftModel):
        return
    if exact_kl_every and beta == 0:
        raise ValueError(
            f"exact_kl_every={exact_kl_every}: with beta=0 and all weights trained no reference is kept to measure the "
            "divergence to. Train an adapter (peft_config), set beta above 0, or exact_kl_every=0"
        )
    if beta != 0 and isinstance(model, PreTrainedModel) and not getattr(model.config, "_name_or_path", ""):
        raise ValueError(
            f"beta={beta}: the reference is loaded from where the model came from, and this one was built in memory. "
            "Save it (model.save_pretrained(folder)) and load it from there, train an adapter (peft_config), or set "
            "beta=0"
        )
