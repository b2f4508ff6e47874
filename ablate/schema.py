"""Names of the files and columns of a run: what `ablate` writes and `analysis` reads.

    runs/<experiment>/<cell>/
        config.json     {"hash", "experiment", "cell": {"name", "variant", "seed", "point", "axes"}, "config": {...}}
        env.json        provenance (ablate.provenance) and the hashes that prove the pairing
        metrics.jsonl   one object per optimizer step, keys below
        eval.jsonl      one object per evaluation: {"step", "eval/<name>": float, ...}
        rollouts/       step-000001.parquet, one row per completion, columns ROLLOUT_COLUMNS
        checkpoint/     what a resume needs; removed once the cell is done unless it is kept on request
        done.json       written last: {"hash", "seconds" (of all steps), "wall_seconds", "steps", "eval": {...},
                        "pairing": {...}, "finished_at"}
        failed.json     {"hash", "type", "message", "traceback", "step"} of the last failure, removed on success
        replay/         step-000001/{replay.json, table.md, table.csv, cosine.png, cosine.svg}, of `ablate replay`
    runs/<experiment>/report/   table.md, table.csv, table.tex, *.png, *.svg, report.html

This module imports nothing but the standard library, so that reading runs needs neither torch nor TRL.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CONFIG_FILE = "config.json"
ENV_FILE = "env.json"
METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"
ROLLOUTS_DIR = "rollouts"
CHECKPOINT_DIR = "checkpoint"
DONE_FILE = "done.json"
FAILED_FILE = "failed.json"
REPORT_DIR = "report"
REPLAY_DIR = "replay"  # in a cell, or in the experiment where that was replayed
REPLAY_FILE = "replay.json"

# The variants of the founding experiment, in display order: `losses.founding`, without importing torch.
FOUNDING = ("reference", "no_detach", "full_reverse_kl", "forward_kl")

EVAL_PREFIX = "eval/"

POINT_AXIS = "point"  # in config.json["cell"]["point"]: the axis of named points, each of which sets several keys

# metrics.jsonl. TRL's names where TRL has one; rewards/<function>/mean and /std come on top for each reward function.
STEP = "step"  # optimizer step, counted from 1
# Parts of a step in their order, each a column time/<part>: seconds that add up to step_time.
PARTS = (
    "rollout",  # completions drawn, decoded and stored, advantages
    "sync",  # the policy brought into the engine, the engine's memory mapped and given back
    "reward",
    "old_logps",
    "reference",  # the reference's log-probs, or its hidden states
    "loss",  # forward and backward
    "exact_kl",  # kl_exact/*, on the steps that measure them
    "optimizer",  # and all that is left: logging, checkpoints
)
METRICS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "kl",  # k3 estimate of KL(policy || reference), mean over tokens
    "kl_own",  # the variant's own KL term, before beta
    "entropy",  # of the policy's next-token distribution, nats, mean over tokens
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "weight_distance",  # L2 distance of the trained parameters from their start
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "tokens_per_second",
    "peak_memory_bytes",
    "step_time",  # seconds, of the whole step
    *(f"time/{part}" for part in PARTS),
)
# As METRICS, where there is something to tell.
GPU_BUSY = "gpu/busy"  # share of the step in which the GPU ran kernels, 0 to 1
SKIPPED_STEPS = "skipped_steps"  # float16: 1 where GradScaler left the step out because a gradient was not finite
# KL(policy || reference) and KL(reference || policy) over the vocabulary, mean over tokens, nats; every few steps
EXACT_KL = ("kl_exact/reverse", "kl_exact/forward")

# rollouts/*.parquet, one row per completion; lists are per token of the completion, padding removed
ROLLOUT_COLUMNS = (
    "step",  # optimizer step that first uses the completion
    "group",  # index of the prompt within the step
    "sample",  # index of the completion within the group
    "prompt_ids",
    "completion_ids",
    "completion_mask",  # 0 where the loss ignores the token (a truncated completion that is masked out)
    "advantage",
    "rewards",  # struct: reward function name -> float or null
    "old_per_token_logps",  # null when no old log-probs were used (on-policy)
    "ref_per_token_logps",  # null when beta = 0
    "sampling_per_token_logps",  # null when the engine gives none
    "sampling_seed",
    "prompt",
    "completion",
)

PACKED = ".gz"  # a packed run has this behind a file's name in its place

# env.json["pairing"] and done.json["pairing"]: equal for every variant of one seed and grid point
PAIRING = ("initial_weights_sha256", "data_sha256", "prompt_order_sha256", "sampling_seeds_sha256")

# Keys of config.json["config"] that say where, how often and how fast cells run, not what they compute: changing them
# does not make a finished cell another cell.
EXECUTION_KEYS = (
    "train.keep_checkpoint",
    "experiment",
    "variants",
    "variants_all",
    "seeds",
    "grid",
    "points",
    "out",
    "jobs",
    "threads",
    "retries",
    "wandb",
    "trl.report_to",
)

# Keys that came later, with the value that stands for how cells ran before: at that value they do not enter the hash.
LATER_KEYS = {"train.load_in_4bit": False}


def is_execution(key: str) -> bool:
    """Whether a key of the config, `a.b.c`, is one of EXECUTION_KEYS or lies below one."""
    return any(key == execution or key.startswith(execution + ".") for execution in EXECUTION_KEYS)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def deciding(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config dict, flat ("train.steps"), that decide a cell's numbers: all but EXECUTION_KEYS.

    LATER_KEYS at their earlier value are left out, as they are of a config from before.
    """
    return {
        key: value
        for key, value in flatten(values).items()
        if not is_execution(key) and (key not in LATER_KEYS or value != LATER_KEYS[key])
    }


def config_hash(values: Mapping[str, Any], variant: str, seed: int) -> str:
    """config.json["hash"]: SHA-256 (hex) of variant, seed and what of the config dict decides the numbers."""
    content = {"variant": variant, "seed": seed, "config": deciding(values)}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
