"""Writes the run files in tests/analysis/fixture/: made up, but with the names, types and habits of real ones.

    python -m tests.analysis.make_fixture          # from the repository root

fixture/demo     4 variants x 3 seeds x beta {0.04, 1.0}, 20 steps, all cells done
fixture/partial  one cell done, one failed with a traceback, one stopped half way, one only planned; step times and KL
                 as runs of version 0.1.0 logged them
`points` writes one variant at three named points on a GPU with vLLM, for tests to do in a folder of their own.

The curves imitate a tiny experiment: three variants learn alike at beta 0.04, `reference` is held back at beta 1, and
`no_detach` does not move by a single bit. Everything comes from one explicit numpy Generator, so the files are the same
on every machine (parquet: the same values, not the same bytes).
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ablate import schema

ROOT = Path(__file__).resolve().parent / "fixture"
VARIANTS = ("reference", "no_detach", "full_reverse_kl", "forward_kl")
STEPS, EVAL_EVERY, EXACT_EVERY = 20, 5, 4
SHA = "3f1c9a7e5b2d4860915e7c3a1f0b8d6e4a2c7f59"
START = 0.345
FINAL = {  # variant -> beta -> (mean, sd over seeds) of the headline metric at the end
    "reference": {0.04: (0.748, 0.007), 1.0: (0.554, 0.006)},
    "no_detach": {0.04: (START, 0.0), 1.0: (START, 0.0)},
    "full_reverse_kl": {0.04: (0.752, 0.024), 1.0: (0.720, 0.006)},
    "forward_kl": {0.04: (0.742, 0.026), 1.0: (0.756, 0.028)},
}
KL = {
    "reference": {0.04: 0.54, 1.0: 0.19},
    "full_reverse_kl": {0.04: 0.56, 1.0: 0.50},
    "forward_kl": {0.04: 0.55, 1.0: 0.57},
}
ENTROPY = {
    "reference": {0.04: 0.97, 1.0: 1.76},
    "full_reverse_kl": {0.04: 0.95, 1.0: 1.05},
    "forward_kl": {0.04: 0.97, 1.0: 0.89},
}


def digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def config(variant: str, seed: int, **loss: Any) -> dict[str, Any]:
    return {
        "experiment": "demo",
        "model": "tiny",
        "task": "arithmetic",
        "variants": [variant],
        "seeds": [seed],
        "grid": {},
        "loss": {"backend": "chunked", "precision": "auto", "beta": 0.04, "epsilon": None, "params": {}} | loss,
        "train": {"steps": STEPS, "learning_rate": 7e-4, "prompts_per_step": 16, "num_generations": 8, "lora": False},
        "eval": {"every": EVAL_EVERY, "prompts": 256},
    }


def environment(seed: int, **changes: Any) -> dict[str, Any]:
    return {
        "git": {"sha": SHA, "dirty": False},
        "command": "python -m ablate run experiment=demo",
        "python": "3.11.15",
        "packages": {"torch": "2.13.0", "trl": "1.16.0", "transformers": "5.17.0"},
        "device": {"type": "cpu"},
        "threads": 1,
        "task": {
            "name": "arithmetic",
            "primary_metric": "probability",
            "primary_label": "held-out probability of the right answer",
        },
        "resolved": {"device": "cpu", "loss_backend": "chunked", "rollout": "transformers"},
        "started_at": f"2025-12-31T23:5{7 + seed}:00+00:00",
        "cpu": {"name": "Example CPU", "cores": 2, "memory_bytes": 2**33},
        "model": {"spec": "tiny", "source": "tiny (made up)", "sha256": digest("model")},
        "pairing": pairing(seed),
        **changes,
    }


def pairing(seed: int) -> dict[str, str]:
    return {key: digest(key, 0 if key.startswith(("initial", "data")) else seed) for key in schema.PAIRING}


def learned(step: int) -> float:
    """Share of the way gone after a step: 0 at step 0, 1 at the last."""
    rate = 3.0
    return (1 - math.exp(-rate * step / STEPS)) / (1 - math.exp(-rate))


def tidy(value: float) -> float:
    return float(f"{value:.5g}")


def curves(
    rng: np.random.Generator, variant: str, beta: float, *, old: bool = False
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metric rows (one per step) and evaluation rows (step 0 and every EVAL_EVERY) of one cell.

    old: old and reference log-probs timed together, and no exact KL.
    """
    mean, sd = FINAL[variant][beta]
    final = mean + sd * float(rng.standard_normal())
    still = variant == "no_detach"
    metrics, evals = [], []
    for step in range(STEPS + 1):
        share = 0.0 if still else learned(step)
        score = START + (final - START) * share
        if step % EVAL_EVERY == 0:
            wobble = 0.0 if still or step in (0, STEPS) else 0.01 * float(rng.standard_normal())
            probability = tidy(score + wobble)
            evals.append({"step": step, "eval/probability": probability, "eval/accuracy": tidy(0.85 + 0.1 * share)})
        if step == 0:
            continue
        noise = rng.standard_normal(10)
        kl = 0.0 if still else KL[variant][beta] * share * (1 + 0.04 * noise[8])
        entropy = 2.63 if still else 2.63 + (ENTROPY[variant][beta] - 2.63) * share * (1 + 0.02 * noise[9])
        right, form = score + 0.03 * noise[0], 0.97 + 0.005 * noise[1]
        length_penalty = -0.02 + 0.004 * noise[2]
        step_time = 0.25 + 0.01 * abs(noise[3]) + (0.6 if step == 1 else 0.0)
        logps = {"logps": 0.2} if old else {"sync": 0.0, "old_logps": 0.0, "reference": 0.2}
        parts = {"rollout": 0.3, "reward": 0.05, **logps, "loss": 0.35, "optimizer": 0.1}
        if not old:
            parts |= {"exact_kl": 0.0 if step % EXACT_EVERY else 0.02}
        exact = {} if old or step % EXACT_EVERY else {"kl_exact/reverse": 0.9 * kl, "kl_exact/forward": 1.5 * kl}
        row = {
            "step": step,
            "loss": beta * kl * (1 + 0.05 * noise[4]),
            "grad_norm": 0.0 if still else 0.8 * (1.2 - share) + 0.02 * abs(noise[5]),
            "learning_rate": 7e-4 * min(1.0, step / 5),
            "reward": right + 0.1 * form + length_penalty,
            "reward_std": 0.35 + 0.01 * noise[6],
            "frac_reward_zero_std": 0.01 + 0.24 * share,
            "rewards/right_answer/mean": right,
            "rewards/right_answer/std": 0.45,
            "rewards/format/mean": form,
            "rewards/format/std": 0.1,
            "rewards/length/mean": length_penalty,
            "rewards/length/std": 0.03,
            "kl": kl,
            "kl_own": kl * (1.1 if variant == "full_reverse_kl" else 1.0),
            **exact,
            "entropy": entropy,
            "clip_ratio/low_mean": 0.0,
            "clip_ratio/high_mean": 0.0,
            "clip_ratio/region_mean": 0.0,
            "weight_distance": 0.0 if still else 3.1 * share + 0.05 * abs(noise[7]),
            "completions/mean_length": 3.02,
            "completions/min_length": 2,
            "completions/max_length": 4,
            "completions/clipped_ratio": 0.02,
            "tokens_per_second": 386 / step_time,
            "peak_memory_bytes": 512 * 2**20,
            "step_time": step_time,
            **{f"time/{name}": fraction * step_time for name, fraction in parts.items()},
        }
        metrics.append({key: value if isinstance(value, int) else tidy(value) for key, value in row.items()})
    return metrics, evals


def rollouts(rng: np.random.Generator, seed: int, step: int) -> pd.DataFrame:
    """Four completions of two prompts, one of them hostile to a report that does not escape."""
    prompts = np.random.default_rng([seed, step]).integers(0, 50, (2, 2))  # the same for every variant
    rows = []
    for group in range(2):
        a, b = (int(x) for x in prompts[group])
        rewards = []
        for sample in range(4):
            slip = int(rng.integers(0, 2)) if (group, sample) != (0, 0) else 0
            text = (
                f"{a + b + slip:02d}" if (group, sample) != (1, 3) else "<script>alert('7|8')</script> & \\end{table}"
            )
            rewards.append(float(text == f"{a + b:02d}"))
            rows.append(
                {
                    "step": step,
                    "group": group,
                    "sample": sample,
                    "prompt_ids": [1, 2, 3],
                    "completion_ids": [4, 5, 6],
                    "completion_mask": [1, 1, 1],
                    "rewards": {"right_answer": rewards[-1], "format": 1.0, "length": None},
                    "old_per_token_logps": None,
                    "ref_per_token_logps": [-0.1, -0.2, -0.3],
                    "sampling_per_token_logps": None,
                    "sampling_seed": 1000 + step,
                    "prompt": f"{a:02d}+{b:02d}=",
                    "completion": text,
                }
            )
        mean, sd = float(np.mean(rewards)), float(np.std(rewards, ddof=1))
        for row, reward in zip(rows[-4:], rewards, strict=True):
            row["advantage"] = (reward - mean) / (sd + 1e-4)
    return pd.DataFrame(rows)[list(schema.ROLLOUT_COLUMNS)]


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_cell(
    rng: np.random.Generator,
    root: Path,
    variant: str,
    seed: int,
    beta: float,
    *,
    state: str = "done",
    store: bool = False,
    old: bool = False,
) -> Path:
    """One cell's folder in the given state (done, failed, partial, new); store: with rollouts of the last step."""
    name = f"{variant}-seed{seed}-beta{beta:g}"
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    cell = {"name": name, "variant": variant, "seed": seed, "point": {"beta": beta}}
    settings = {**config(variant, seed, beta=beta), "experiment": root.name}
    config_hash = schema.config_hash(settings, variant, seed)
    write_json(
        folder / schema.CONFIG_FILE, {"hash": config_hash, "experiment": root.name, "cell": cell, "config": settings}
    )
    if state == "new":
        return folder
    write_json(folder / schema.ENV_FILE, environment(seed))
    metrics, evals = curves(rng, variant, beta, old=old)
    if state != "done":
        metrics, evals = metrics[:7], evals[:2]
    write_lines(folder / schema.METRICS_FILE, metrics)
    write_lines(folder / schema.EVAL_FILE, evals)
    if store:
        (folder / schema.ROLLOUTS_DIR).mkdir(exist_ok=True)
        step = metrics[-1]["step"]
        rollouts(rng, seed, step).to_parquet(folder / schema.ROLLOUTS_DIR / f"step-{step:06d}.parquet")
    if state == "done":
        last = {key: value for key, value in evals[-1].items() if key != "step"}
        done = {"hash": config_hash, "seconds": 9.5, "steps": STEPS, "eval": last, "pairing": pairing(seed)}
        write_json(folder / schema.DONE_FILE, {**done, "finished_at": f"2026-01-01T00:0{seed}:00+00:00"})
    if state == "failed":
        trace = (
            "Traceback (most recent call last):\n"
            '  File "ablate/cell.py", line 90, in run_cell\n    rewards = score(completions)\n'
            "ValueError: reward function 'right_answer' gave NaN at step 8 for <eos>\n"
        )
        failure = {"hash": config_hash, "type": "ValueError", "step": 8, "traceback": trace}
        failure["message"] = "reward function 'right_answer' gave NaN at step 8 for <eos>"
        write_json(folder / schema.FAILED_FILE, failure)
    return folder


POINTS = {  # in the order of the sweep, which is not that of the alphabet: settings and what they do to the final score
    "fp32": ({"dtype": "float32"}, 0.0),
    "bf16": ({"dtype": "bfloat16"}, -0.004),
    "fp8_head": ({"dtype": "bfloat16", "precision": "fp8"}, -0.06),
}


def points(root: Path) -> Path:
    """`root`/points: reference at POINTS, three seeds, on a GPU with vLLM; weights start as the dtype rounds them."""
    rng = np.random.default_rng(20260102)
    gpu = {"type": "cuda", "name": "Example GPU", "capability": "9.0", "memory_bytes": 2**36, "cuda": "13.0"}
    for seed in range(3):
        shared = 0.03 * float(rng.standard_normal())
        for index, (point, (settings, shift)) in enumerate(POINTS.items()):
            folder = write_cell(rng, root / "points", "reference", seed, 0.04)
            metrics = [json.loads(line) for line in (folder / schema.METRICS_FILE).read_text().splitlines()]
            evals = [json.loads(line) for line in (folder / schema.EVAL_FILE).read_text().splitlines()]
            cell = folder.rename(root / "points" / f"reference-seed{seed}-point{point}")
            evals[-1]["eval/probability"] = tidy(0.75 + shared + shift + 0.002 * float(rng.standard_normal()))
            gap = {"fp32": 1e-6, "bf16": 2e-3, "fp8_head": 0.012}[point]
            for row in metrics:
                row |= {"skipped_steps": float(point == "fp8_head" and row["step"] in (3, 4)), "gpu/busy": 0.61}
                row |= {"memory/step_bytes": 2**35, "sampling/kept_mass/mean": 1.0}
                row |= {f"sampling/sampling_logp_difference/{k}": gap * f for k, f in (("mean", 1), ("max", 40))}
                row |= {f"sampling/sequence_ratio/{q}": 1 + gap * f for q, f in
                        (("mean", 0.1), ("min", -5), ("max", 5), ("q05", -3), ("q50", 0), ("q95", 3))}  # fmt: skip
            write_lines(cell / schema.METRICS_FILE, metrics)
            write_lines(cell / schema.EVAL_FILE, evals)
            known = config("reference", seed) | {"experiment": "points"}
            known["train"] |= settings
            identity = {"name": cell.name, "variant": "reference", "seed": seed, "point": {"point": point}}
            identity["axes"] = {"point": list(POINTS)}
            known_hash = schema.config_hash(known, "reference", seed)
            made = {"hash": known_hash, "experiment": "points", "cell": identity, "config": known}
            write_json(cell / schema.CONFIG_FILE, made)
            hashes = pairing(seed) | {"initial_weights_sha256": digest("initial", settings["dtype"])}
            resolved = {"device": "cuda:0", "loss_backend": "triton", "rollout": "vllm"}
            env = environment(seed, device=gpu, pairing=hashes, machine="m0", resolved=resolved)
            write_json(cell / schema.ENV_FILE, env)
            done = json.loads((cell / schema.DONE_FILE).read_text())
            done |= {"hash": known_hash, "pairing": hashes, "wall_seconds": 90.0}
            done["eval"] = {key: value for key, value in evals[-1].items() if key != "step"}
            done["finished_at"] = f"2026-01-01T0{seed}:{2 * index:02d}:00+00:00"
            write_json(cell / schema.DONE_FILE, done)
    return root / "points"


def main(root: Path = ROOT) -> None:
    rng = np.random.default_rng(20260101)
    for beta in (0.04, 1.0):
        for seed in range(3):
            for variant in VARIANTS:
                write_cell(rng, root / "demo", variant, seed, beta, store=seed == 0 and beta == 0.04)
    for variant, state in zip(VARIANTS, ("done", "failed", "partial", "new"), strict=True):
        write_cell(rng, root / "partial", variant, 0, 0.04, state=state, old=True)


if __name__ == "__main__":
    main()
