"""TRL's GRPOTrainer with the loss taken from the registry, computed from hidden states.

What is changed, and where:

- Log-probs and loss run one path (`ablate.scoring`), `losses`' product of hidden states and LM head, so that policy,
  old and reference log-probs of the same weights are equal to the bit on a CPU.
- Old and reference log-probs are computed after TRL has shuffled and split the generation batch, on the micro-batches
  as the loss will see them: the same tensors in the same shapes, whatever the accumulation.
- Advantages come from the variant's hook or `losses.group_advantages`.
- Every draw is seeded by (seed, optimizer step), so that a resumed run continues with the same numbers.
- Metrics are pooled by tokens over micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import set_seed

import losses
from ablate import fp16, measure, mismatch, schema, trl_options
from ablate.generation import EpochSampler, Generation, length_figures, loss_mask, normalise
from ablate.rewards import checked
from ablate.rollout import SYNC, Engine, Rollout, derive_seed
from ablate.scoring import ScoringTrainer


class AblationTrainer(ScoringTrainer):
    """A GRPOTrainer whose loss is a registered variant.

    Args:
        loss_variant: a name of `losses.names()`; None: what `args.loss_type` and `args.importance_sampling_level` name.
        loss_params: parameters of the variant beside or instead of GRPOConfig's (`{"epsilon": None}`: no clipping).
        loss_backend: see `losses.linear_policy_loss`. loss_precision: likewise.
        exact_kl_every: steps between measurements of the divergences from the reference over the whole vocabulary
            (`kl_exact/reverse`, `kl_exact/forward`), at the positions of the loss; 0: none. It changes nothing else.
        engine: draws the completions; None: TRL's own generation (vLLM included).
        reward_timeout: seconds that a reward function gets for a batch; see `ablate.rewards.checked`.
        on_generation: called with the `Generation` of every batch of rollouts, after its log-probs are known.

    Everything else is GRPOTrainer's. Raises ValueError where GRPOConfig holds a loss option that would have no effect,
    and where there is no reference to be had.
    """

    _tag_names = ["trl", "grpo", "grpo-ablation"]

    def __init__(
        self,
        *args: Any,
        loss_variant: str | None = None,
        loss_params: dict[str, Any] | None = None,
        engine: Engine | None = None,
        on_generation: Callable[[Generation], None] | None = None,
        reward_timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.variant = losses.get(trl_options.variant_of(self.args, loss_variant))
        self.loss_params = trl_options.loss_params(self.args, self.variant.name, loss_params)
        self.engine, self.on_generation = engine, on_generation
        named = zip(self.reward_funcs, self.reward_func_names, strict=True)
        self.reward_funcs: list[Any] = [checked(function, name, reward_timeout) for function, name in named]
        self._generation: Generation | None = None
        self._empty: list[bool] = []  # completions of the generation at hand that hold no token
        self._ended: list[bool] = []  # and those that came to an end of their own
        self._sampling_seed: int | None = None
        self._mismatch: mismatch.Comparison | None = None  # of the generation at hand
        self._drawn: Rollout | None = None  # what the engine gave for the generation at hand
        self._scored: tuple[list[Any], list[Any], Tensor, list[int]]
        self._pooled = {"train": measure.Pool(), "eval": measure.Pool()}
        self._meter = measure.Meter(self.accelerator.device)
        self._start = measure.snapshot(self.model)
        self._skipped = fp16.SkippedSteps(self.accelerator.scaler)
        if self.args.fp16:
            self.add_callback(self._skipped)
        if self.use_vllm:
            self.vllm_generation.sync_weights = self._meter.timed("sync", self.vllm_generation.sync_weights)

    # ---- rollouts

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        sampler = super()._get_train_sampler(dataset)
        return EpochSampler(
            sampler.data_source,
            sampler.mini_repeat_count,
            sampler.batch_size,
            sampler.repeat_count,
            sampler.shuffle,
            sampler.seed,
        )

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        every = self.args.steps_per_generation * self.num_iterations
        fresh = self.model.training and (self._step % every == 0 or self._buffered_inputs is None)
        if not self.model.training or not fresh:
            return super()._prepare_inputs(generation_batch)
        # Shuffling, dropout and TRL's own sampling draw from the global generators: set here, a resume finds the same.
        set_seed(derive_seed(self.args.seed, "step", self.state.global_step, self.accelerator.process_index) % 2**32)
        with self._meter.time("rollout"):
            with self._unscored():
                inputs = super()._prepare_inputs(generation_batch)
            self._finish_generation(self._buffered_inputs)
        return inputs

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        if self.engine is None:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
        if images is not None:
            raise ValueError(f"the rollout engine {self.engine.name!r} takes no images; engine=None leaves them to TRL")
        seed = derive_seed(self.args.seed, "rollout", self.state.global_step, self.accelerator.process_index)
        rollout = self.engine.generate(
            self.accelerator.unwrap_model(self.model_wrapped),
            [list(ids) for ids in prompt_ids],
            seed=seed,
            step=self.state.global_step,
            num_generations=num_generations,
        )
        self._meter.move(sum(rollout.stats.get(name, 0.0) for name in SYNC), "rollout", "sync")
        self._sampling_seed, self._drawn = seed, rollout
        # TRL reads the last token of every completion: an empty one becomes a lone end token that no mean counts.
        self._empty = [not ids for ids in rollout.completion_ids]
        ids = [row or [self.eos_token_ids[0]] for row in rollout.completion_ids]
        logps = None if rollout.logps is None else [row or [0.0] for row in rollout.logps]
        return ids, logps

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        with self._meter.time("reward"):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._scored = (prompts, completions, rewards, [len(ids) for ids in completion_ids_list])
        return rewards

    def _generate(self, prompts):
        """TRL's, with the engine's word on which completions ended: one may do so at a stop string."""
        output = super()._generate(prompts)
        ids = output[1]
        if self._drawn is None or self._drawn.finished is None or self.tools:
            ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
            self._ended = [row[-1] in ends for row in ids]
        else:
            self._ended = self._drawn.finished
            lengths = torch.tensor([len(row) for row in ids], device=self.accelerator.device)
            ended = torch.tensor(self._ended, device=self.accelerator.device)
            for name, value in length_figures(*map(self.accelerator.gather, (lengths, ended))).items():
                self._metrics["train" if self.model.training else "eval"][name][-1] = value
        return output

    def _generate_and_score_completions(self, inputs):
        self._empty = [False] * len(inputs)
        self._sampling_seed = self._drawn = None
        masks: bool = self.args.mask_truncated_completions
        self.mask_truncated_completions = False  # TRL would look at end tokens alone
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self.mask_truncated_completions = masks
        output["row"] = torch.arange(len(inputs), device=output["advantages"].device)
        left_out = [empty or (masks and not ended) for empty, ended in zip(self._empty, self._ended, strict=True)]
        rows = torch.tensor(left_out, device=output["row"].device)
        output["completion_mask"] = output["completion_mask"].masked_fill(rows.unsqueeze(1), 0)
        return output

    def _finish_generation(self, batches: list[dict[str, Any]]) -> None:
        """Log-probs, normalisers and advantages of a generation's micro-batches, as the loss will see them."""
        off_policy = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) != 0
        # On-policy the loss itself takes o = n; a token that the sampler has not scored stands for o as well.
        sampling = [batch["sampling_per_token_logps"] for batch in batches if "sampling_per_token_logps" in batch]
        needs_old = off_policy or self._shapes_rewards or any(bool(logps.isnan().any()) for logps in sampling)
        if needs_old:
            with torch.no_grad(), self._meter.time("old_logps"):
                for batch in batches:
                    batch["old_per_token_logps"] = self._logps(self.model, batch)[0]
        if self.beta != 0 and self.variant.vocabulary is None:
            with torch.no_grad(), self._meter.time("reference"), self._reference() as model:
                for batch in batches:
                    batch["ref_per_token_logps"] = self._logps(model, batch)[0]
        normalise(batches, self.args.gradient_accumulation_steps, self.accelerator)
        self._generation = Generation(self, batches)
        self._log_rollout(self._generation)
        self._set_advantages(batches)
        if self.on_generation is not None:
            self.on_generation(self._generation)

    def _log_rollout(self, generation: Generation) -> None:
        """The engine's own figures, and how far its log-probs are from the trainer's, once those are known."""
        for name, value in ({} if self._drawn is None else self._drawn.stats).items():
            self._metrics["train"][name].append(value)
        self._mismatch = mismatch.Comparison(generation, None if self._drawn is None else self._drawn.log_kept)
        if generation.has("old_per_token_logps"):
            self._compare(torch.arange(len(generation.prompts)), generation.column("old_per_token_logps"))

    def _compare(self, rows: Tensor, logps: Tensor) -> None:
        """Takes the trainer's log-probs of rows of the generation; with the last of them the figures are logged."""
        if self._mismatch is not None:
            for name, value in self._mismatch.add(rows, logps).items():
                self._metrics["train"][name].append(value)

    @property
    def _shapes_rewards(self) -> bool:
        return self.variant.shape_reward is not None and self.beta != 0

    def _set_advantages(self, batches: list[dict[str, Any]]) -> None:
        """The variant's advantages; TRL's own stay where rewards are scaled by the batch, or groups span processes."""
        generation, hook = self._generation, self.variant.advantage
        assert generation is not None
        plain = self.args.scale_rewards == "group" and self.args.multi_objective_aggregation == "sum_then_normalize"
        if self.accelerator.num_processes > 1 or not (plain or hook):
            if hook or self._shapes_rewards:
                raise ValueError(f"{self.variant.name!r} sets its own advantages: one process, scale_rewards='group'")
            return
        rewards = generation.total_rewards
        if self._shapes_rewards:
            assert self.variant.shape_reward is not None
            rewards = generation.shape_rewards(self.variant.shape_reward, self.loss_params)
        advantages = (hook or losses.group_advantages)(rewards, generation.group_ids)
        for batch in batches:
            batch["advantages"] = advantages[batch["row"]]
        generation.advantages = advantages

    # ---- the loss

    def _compute_loss(self, model, inputs):
        loss_reference = kl_reference = None
        ref_logps = inputs.get("ref_per_token_logps")
        if self.variant.vocabulary is not None and self.beta != 0:
            with self._meter.time("reference"):
                loss_reference, ref_logps = self._reference_head(inputs, logps=True)
        if self._is_exact_kl_due():
            with self._meter.time("exact_kl"), self._apart():
                kl_reference = loss_reference or self._reference_head(inputs, logps=False)[0]
        ref_hidden, ref_weight, ref_bias = loss_reference or (None, None, None)
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        group = inputs["row"] // group_size if "row" in inputs else None
        loss_inputs = losses.LossInputs(
            completion_ids=inputs["completion_ids"],
            completion_mask=loss_mask(inputs),
            advantages=inputs["advantages"],
            old_per_token_logps=inputs.get("old_per_token_logps"),
            ref_per_token_logps=ref_logps,
            sampling_per_token_logps=self._sampling_logps(inputs),
            num_items_in_batch=inputs.get("num_items"),
            num_sequences_in_batch=inputs.get("num_sequences"),
            group_ids=group,
            ref_hidden=ref_hidden,
            ref_lm_head_weight=ref_weight,
            ref_lm_head_bias=ref_bias,
        )

        def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out = losses.linear_policy_loss(
                hidden,
                weight,
                loss_inputs,
                self.variant,
                lm_head_bias=bias,
                **self._head_options,
                **self.loss_params,
            )
            self._pooled["train" if self.model.training else "eval"].add(out.metrics)
            if kl_reference is not None:
                with self._meter.time("exact_kl"):
                    self._pooled["train"].add(self._exact_kl(inputs, kl_reference, hidden, weight, bias))
            if "row" in inputs and self.model.training:
                self._compare(inputs["row"], out.per_token_logps)
            return out.loss

        loss = self._with_head(model, inputs, loss_of)
        if not torch.isfinite(loss):
            raise ValueError(f"the loss of {self.variant.name!r} is {loss.item()} at step {self.state.global_step + 1}")
        self._meter.count(inputs["completion_mask"])
        return loss

    def _sampling_logps(self, inputs: dict[str, Any]) -> Tensor | None:
        sampling = inputs.get("sampling_per_token_logps")
        if sampling is None or not self.args.vllm_importance_sampling_correction:
            return None
        # A token that the sampler could not score counts as drawn from the policy.
        old = inputs.get("old_per_token_logps")
        return torch.where(torch.isnan(sampling), old, sampling) if old is not None else sampling

    # ---- steps and logs

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self._meter.flush()  # what came before is no step
        with self._meter.busy.sampled():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._meter.pause():
            return super().evaluate(*args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:  # resumed at the end, where transformers takes one more step
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        self._meter.steps += self.accelerator.sync_gradients  # the last micro-batch of an optimizer step
        with self._meter.time("loss"):
            return super().training_step(model, inputs, num_items_in_batch)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        figures = self._pooled[mode].flush(self.accelerator)
        if figures and mode == "train":
            moved = measure.distance(self.model, self._start)
            if not math.isfinite(moved):
                raise ValueError(
                    f"the weights are not finite after step {self.state.global_step}: lower the learning rate"
                )
            figures |= {"weight_distance": moved, **self._meter.flush()}
            if self.args.fp16:
                figures[schema.SKIPPED_STEPS] = self._skipped.flush()
        self._metrics[mode].update({name: [value] for name, value in figures.items()})
        super().log(logs, start_time)
