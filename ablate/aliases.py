"""Other libraries' names for what this schema sets itself.

TRL, vLLM, transformers and PEFT have names of their own for things that the schema has one place for. Where the value
carries over as it is, the other name is accepted and means the schema's key (so setting both is setting one thing
twice, which `ablate.keys` refuses); where it does not, it is refused with the key to use.
"""

from __future__ import annotations

from ablate.errors import ConfigError

SAME: dict[str, str] = {
    "trl.max_steps": "train.steps",
    "trl.learning_rate": "train.learning_rate",
    "trl.warmup_steps": "train.warmup_steps",
    "trl.per_device_train_batch_size": "train.micro_batch_size",
    "trl.num_generations": "train.num_generations",
    "trl.num_iterations": "train.num_iterations",
    "trl.gradient_checkpointing": "train.gradient_checkpointing",
    "trl.max_completion_length": "train.max_completion_length",
    "trl.max_grad_norm": "train.max_grad_norm",
    "trl.mask_truncated_completions": "train.mask_truncated_completions",
    "trl.save_steps": "train.checkpoint_every",
    "trl.eval_steps": "eval.every",
    "trl.beta": "loss.beta",
    "trl.epsilon": "loss.epsilon",
    "trl.epsilon_high": "loss.epsilon_high",
    "trl.vllm_importance_sampling_mode": "loss.params.sampling_mode",
    "trl.vllm_importance_sampling_clip_max": "loss.params.sampling_clip_max",
    "trl.temperature": "sampling.temperature",
    "trl.top_p": "sampling.top_p",
    "trl.top_k": "sampling.top_k",
    "trl.min_p": "sampling.min_p",
    "trl.repetition_penalty": "sampling.repetition_penalty",
    "trl.vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "trl.vllm_max_model_length": "vllm.max_model_len",
    "trl.vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "trl.vllm_enable_sleep_mode": "vllm.enable_sleep_mode",
    "trl.vllm_model_impl": "vllm.model_impl",
    "sampling.max_new_tokens": "train.max_completion_length",
    "sampling.max_tokens": "train.max_completion_length",
    "sampling.num_return_sequences": "train.num_generations",
    "sampling.n": "train.num_generations",
    "vllm.model": "model",
    "peft.base_model_name_or_path": "model",
}

REFUSED: dict[str, str] = {
    "trl.output_dir": "run directories are made below out=",
    "trl.num_train_epochs": "the length of training is train.steps",
    "trl.gradient_accumulation_steps": "set train.micro_batch_size (completions per pass); the rest follows",
    "trl.generation_batch_size": "set train.prompts_per_step and train.num_generations",
    "trl.steps_per_generation": "set train.prompts_per_step and train.num_iterations",
    "trl.per_device_eval_batch_size": "held-out evaluation is the task's; eval.prompts sets its size",
    "trl.save_strategy": "set train.checkpoint_every",
    "trl.save_total_limit": "one checkpoint is kept, see train.keep_checkpoint",
    "trl.save_only_model": "a cell resumes from its checkpoint, which needs the optimizer",
    "trl.logging_steps": "every step is logged",
    "trl.logging_strategy": "every step is logged",
    "trl.logging_nan_inf_filter": "a loss that is not finite ends the cell",
    "trl.eval_strategy": "set eval.every",
    "trl.eval_on_start": "evaluation always runs before the first step",
    "trl.eval_delay": "set eval.every",
    "trl.resume_from_checkpoint": "a half-run cell resumes by itself",
    "trl.seed": "seeds are an axis: seeds=0,1,7",
    "trl.data_seed": "seeds are an axis: seeds=0,1,7",
    "trl.full_determinism": "cells are seeded and reproducible as they are",
    "trl.bf16": "set train.dtype=bfloat16",
    "trl.fp16": "set train.dtype=float16",
    "trl.use_cpu": "set device=cpu",
    "trl.use_vllm": "set rollout=vllm",
    "trl.vllm_mode": "the engine runs in the trainer's process: rollout=vllm",
    "trl.vllm_structured_outputs_regex": "set sampling.structured_outputs",
    "trl.use_transformers_paged": "the rollout engine is rollout=transformers or rollout=vllm",
    "trl.use_transformers_continuous_batching": "the rollout engine is rollout=transformers or rollout=vllm",
    "trl.transformers_continuous_batching_config": "the rollout engine is rollout=transformers or rollout=vllm",
    "trl.loss_type": "the loss is the variant: variants=NAME",
    "trl.importance_sampling_level": "it belongs to the variant: variants=gspo is the sequence level",
    "trl.use_liger_kernel": "the loss is computed by `losses`: loss.backend",
    "trl.liger_kernel_config": "the loss is computed by `losses`: loss.backend",
    "trl.model_init_kwargs": "set model and train.dtype",
    "trl.do_train": "every cell trains",
    "trl.do_eval": "set eval.every",
    "trl.do_predict": "set eval.every",
    "sampling.max_length": "set train.max_completion_length",
    "sampling.transformers_version": "it is no sampling option",
    "wandb.id": "every cell is a run of its own, which a resumed cell finds again",
    "wandb.name": "runs are named after their cells; set wandb.group for the sweep",
    "wandb.resume": "a resumed cell goes on in its run",
    "wandb.config": "the config of a run is that of its cell",
}


def canonical(key: str) -> str:
    """The schema key of a key in an open group; most stand for themselves.

    Raises ConfigError with the key to use instead, where the schema sets the thing in another form.
    """
    if key in SAME:
        return SAME[key]
    option = ".".join(key.split(".")[:2])
    if option in REFUSED:
        raise ConfigError(f"{key} cannot be set: {REFUSED[option]}")
    if key.startswith("trl.generation_kwargs."):
        return canonical("sampling." + key.removeprefix("trl.generation_kwargs."))
    if key == "trl.generation_kwargs":
        raise ConfigError("trl.generation_kwargs: write each option as sampling.NAME=value")
    if key.startswith("trl.vllm_server_") or key == "trl.vllm_group_port":
        raise ConfigError(f"{key}: the engine runs in the trainer's process, there is no server: rollout=vllm")
    return key
