"""One cell of an experiment: a model, a task and a variant, trained, evaluated and written down."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig

from ablate import engines, models, provenance, records, resolve, schema, tasks, tracking
from ablate.config import Config
from ablate.generation import Generation
from ablate.plan import Cell
from ablate.rollout import derive_seed
from ablate.rundir import CellDir
from ablate.trainer import AblationTrainer

OnStep = Callable[[int, int, dict[str, Any]], None]


def run_cell(cell: Cell, directory: CellDir, on_step: OnStep) -> dict[str, Any]:
    """Trains one cell, or what a checkpoint leaves of it, and returns its summary (what done.json holds).

    Args:
        cell: what to run. directory: where its files go; config.json is written already.
        on_step: called with (steps done, steps in all, the step's metrics row).

    Raises whatever stops the training: a reward function's error, a loss that is not finite, a full disk.
    """
    _quiet()
    config = cell.config
    device = resolve.device(config.device).name
    dtype, load_in_4bit = _weights_dtype(config), config.train.load_in_4bit
    loaded = models.load(config.model, device=device, dtype=dtype, load_in_4bit=load_in_4bit)
    task = tasks.get(config.task, **config.task_options).bind(loaded.tokenizer)
    args = grpo_config(cell, directory.path / ".trainer", device, task.max_completion_length)
    dataset = task.train_dataset(cell.seed)
    try:
        model, live = engines.start(config, loaded, args, dataset["prompt"][:])
        trainer = AblationTrainer(
            model=model,
            reward_funcs=task.reward_functions,
            args=args,
            train_dataset=dataset,
            processing_class=loaded.tokenizer,
            peft_config=lora_config(config) if config.train.lora else None,
            loss_variant=cell.variant,
            loss_params={
                "epsilon": config.loss.epsilon,
                "epsilon_high": config.loss.epsilon_high,
                **config.loss.params,
            },
            loss_backend=config.loss.backend,
            loss_precision=config.loss.precision,
            reward_timeout=config.rewards.timeout,
            exact_kl_every=config.train.exact_kl_every,
        )
        trainer.engine = engines.get(config, trainer, live)
        with tracking.tracked(cell, directory, trainer) as tracked:
            summary = _Run(cell, directory, on_step, trainer, task, loaded, dataset).run()
            tracking.log_summary(tracked, summary)
        return summary
    finally:
        trainer = model = None  # type: ignore[assignment]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def grpo_config(cell: Cell, output_dir: Path, device: str, task_length: int) -> GRPOConfig:
    """The cell's GRPOConfig: the schema's settings under TRL's names, then `trl.*`."""
    config, train = cell.config, cell.config.train
    completions = train.prompts_per_step * train.num_generations
    micro = train.micro_batch_size or completions
    sampling = config.sampling
    values: dict[str, Any] = {
        "output_dir": str(output_dir),
        "seed": cell.seed,
        "max_steps": train.steps,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": train.warmup_steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": completions // micro,
        "num_generations": train.num_generations,
        "num_iterations": train.num_iterations,
        "max_completion_length": train.max_completion_length or task_length,
        "max_grad_norm": train.max_grad_norm,
        "mask_truncated_completions": train.mask_truncated_completions,
        "gradient_checkpointing": train.gradient_checkpointing,
        "beta": config.loss.beta,
        "temperature": sampling.get("temperature", 1.0),
        "vllm_importance_sampling_mode": "sequence_truncate",
        "bf16": train.dtype == "bfloat16",
        "fp16": train.dtype == "float16",
        "use_cpu": device == "cpu",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps" if train.checkpoint_every else "no",
        "save_steps": _checkpoint_every(config),
        "save_total_limit": 1,
        "run_name": cell.name,
        "disable_tqdm": True,
    }
    return GRPOConfig(**{**values, **config.trl, "report_to": tracking.trackers(config)})


def _checkpoint_every(config: Config) -> int:
    """Steps between checkpoints, rounded up to where a new batch of rollouts is due: TRL starts one after a resume."""
    every, iterations = config.train.checkpoint_every, config.train.num_iterations
    return max(1, -(-every // iterations)) * iterations


def _weights_dtype(config: Config) -> torch.dtype:
    """A frozen base is loaded in the training precision; trained weights stay in float32 under autocast."""
    return getattr(torch, config.train.dtype) if config.train.lora else torch.float32


def lora_config(config: Config) -> Any:
    """The cell's LoraConfig: what stands here, then `peft.*`."""
    from peft import LoraConfig

    return LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32, "target_modules": "all-linear", **config.peft}
    )


def _quiet() -> None:
    """Warnings that TRL and transformers print at every start, and that a sweep would repeat for every cell."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("accelerate", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*pin_memory.*")


@dataclass
class _Run:
    """The training of one cell and the files that come of it."""

    cell: Cell
    directory: CellDir
    on_step: OnStep
    trainer: AblationTrainer
    task: tasks.Task
    loaded: models.LoadedModel
    dataset: Dataset

    def run(self) -> dict[str, Any]:
        config, trainer, directory = self.cell.config, self.trainer, self.directory
        pairing = self._pairing()
        env = provenance.collect([self.cell.seed])
        env |= {
            "pairing": pairing,
            "task": {
                "name": self.task.name,
                "primary_metric": self.task.primary_metric,
                "primary_label": self.task.primary_label,
            },
            "model": {"spec": config.model, "source": self.loaded.source, "sha256": self.loaded.sha256},
            "resolved": self._resolved(),
        }
        found = directory.latest_checkpoint()
        before = directory.read_env()
        if found and before and before.get("pairing") != pairing:
            raise ValueError(f"{directory.path}: its model or data changed since it began; delete the folder")
        directory.write_env(env)
        directory.rewind(found[0] if found else -1)
        trainer.on_generation = self._store_rollouts
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(_Callback(self))
        if not found:
            self.evaluate(0)
        trainer.train(resume_from_checkpoint=str(found[1]) if found else None)
        steps = trainer.state.global_step
        evals = directory.evals()
        if not evals or evals[-1][schema.STEP] != steps:
            self.evaluate(steps)
        rows = directory.metrics()
        return {
            "steps": steps,
            "seconds": sum(row.get("step_time") or 0.0 for row in rows),
            "eval": {k: v for k, v in directory.evals()[-1].items() if k != schema.STEP},
            "pairing": pairing,
        }

    def evaluate(self, step: int) -> None:
        trainer, config = self.trainer, self.cell.config
        model = trainer.accelerator.unwrap_model(trainer.model)
        training = model.training
        model.eval()

        def generate(prompts: list[Any], max_new_tokens: int) -> list[list[int]]:
            prompt_ids = trainer._tokenize_prompts(prompts)[0]
            return trainer.engine.greedy(model, [list(ids) for ids in prompt_ids], max_new_tokens)  # type: ignore[union-attr]

        with torch.no_grad(), trainer._meter.pause():
            context = tasks.EvalContext(model, self.loaded.tokenizer, generate, prompts=config.eval.prompts)
            scores = self.task.evaluate(context)
        model.train(training)
        self.directory.append_eval({schema.STEP: step, **{schema.EVAL_PREFIX + k: v for k, v in scores.items()}})
        tracking.log_scores(trainer, scores)

    def _store_rollouts(self, generation: Generation) -> None:
        train = self.cell.config.train
        if train.rollouts_every and (generation.step - 1) % train.rollouts_every == 0:
            self.directory.write_rollouts(generation.step, records.rollout_rows(generation))
        if train.adapter_every and (generation.step - 1) % train.adapter_every == 0:
            folder = self.directory.rollouts_dir / f"policy-{generation.step:06d}"
            self.trainer.accelerator.unwrap_model(self.trainer.model).save_pretrained(folder, safe_serialization=True)

    def _pairing(self) -> dict[str, str]:
        """Hashes of what must be equal for every variant of one seed and grid point (schema.PAIRING)."""
        trainer, args = self.trainer, self.trainer.args
        generations = range(0, args.max_steps, trainer.num_iterations)
        rows = len(generations) * args.generation_batch_size * trainer.num_iterations * args.steps_per_generation
        sampler, order = trainer._get_train_sampler(self.dataset), []
        for epoch in range(-(-rows // max(1, len(sampler)))):
            sampler.set_epoch(epoch)
            order += list(sampler)
        prompts = json.dumps(self.dataset["prompt"][:], ensure_ascii=False, sort_keys=True)
        seeds = [derive_seed(args.seed, "rollout", step, 0) for step in generations]
        return {
            "initial_weights_sha256": self.loaded.initial_weights_sha256(trainer.model),
            "data_sha256": self.task.fingerprint(),
            "prompt_order_sha256": hashlib.sha256((prompts + json.dumps(order[:rows])).encode()).hexdigest(),
            "sampling_seeds_sha256": hashlib.sha256(json.dumps(seeds).encode()).hexdigest(),
        }

    def _resolved(self) -> dict[str, Any]:
        from losses.backends import resolve as loss_backends

        model, config = self.trainer.model, self.cell.config
        dtype = getattr(torch, config.train.dtype)
        backend, why = loss_backends.choose(config.loss.backend, model.device, dtype)
        engine = resolve.rollout(config.rollout, config.device)
        return {
            "device": str(model.device),
            "loss_backend": backend,
            "loss_backend_why": why,
            "rollout": engine.name,
            "rollout_why": engine.why,
            **({"engine": drawn.describe()} if (drawn := self.trainer.engine) and hasattr(drawn, "describe") else {}),
            "loss_params": self.trainer.loss_params,
        }


class _Callback(TrainerCallback):
    """Writes metric rows, evaluations and checkpoints as the trainer goes."""

    def __init__(self, run: _Run) -> None:
        self.run = run

    def on_step_end(self, args, state, control, **kwargs):
        every = self.run.cell.config.eval.every
        if every and state.global_step % every == 0:
            self.run.evaluate(state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs:  # the summary that transformers logs at the end
            return
        row = {schema.STEP: state.global_step, **{k: v for k, v in logs.items() if k not in ("epoch", "num_tokens")}}
        self.run.directory.append_metrics(row)
        self.run.on_step(state.global_step, args.max_steps, row)

    def on_save(self, args, state, control, **kwargs):
        source = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        with self.run.directory.save_checkpoint(state.global_step) as folder:
            for path in source.iterdir():
                path.rename(folder / path.name)
        source.rmdir()
