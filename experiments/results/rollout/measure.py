"""Rollouts by vLLM beside a trainer, measured on a CUDA device with random weights of known shapes.

    python experiments/results/rollout/measure.py --out DIR [--parts small,large,...]
    MEASURE_DEVICE=cpu python experiments/results/rollout/measure.py --out DIR      # tries all of it, tiny, on a CPU

The parts, most important first; `parts.py` holds them:

    small     SmolLM2-135M's shape, LoRA r = 16, 64 completions of 256 tokens a step: the loss by the Triton kernels in
              vLLM's process, then by the chunked backend; step time by part, adapter refresh
    large     Llama-3.1-8B's shape, bf16 LoRA: memory without KV cache, its release and wake, the step with shared
              weights and with a copy of the trainer's own
    fp8       tokens that a GiB of fp8 KV cache holds and the log-prob mismatch, to be compared with `small`'s bf16
    memory    two of SmolLM2's layers, 200 steps: device memory after steps 20 and 200; then full fine-tuning, on a
              second engine of the process
    stock     the step of `small` by TRL's GRPOTrainer with colocated vLLM and sleep mode
    four_bit  SmolLM2's shape in a bitsandbytes engine: the log-prob mismatch
    decode    what bounds a decode step of `small`: its kernels by name, and the host's time

Each part has a process of its own, since vLLM's sleep-mode allocator serves one engine a process, and a time limit.
All processes load their libraries at once, then have the device one after the other. DIR/<part>.json is written at
every stage of a part, so that one that is stopped leaves what it has. The whole ends after --seconds (470). Compare
only what one call has measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMITS = {
    "small": 150,
    "large": 130,
    "fp8": 60,
    "memory": 110,
    "stock": 110,
    "four_bit": 60,
    "decode": 90,
}  # seconds, engine's start included
LOADING = 90  # seconds for imports and for making models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(LIMITS))
    parser.add_argument("--seconds", type=float, default=470, help="after which no part runs on")
    parser.add_argument("--signals", type=Path, help=argparse.SUPPRESS)  # of one part's process: where it waits
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    asked = options.parts.split(",")
    if unknown := [part for part in asked if part not in LIMITS]:
        parser.error(f"no part {unknown[0]}; there are {', '.join(LIMITS)}")
    if options.signals is not None:
        measure(asked[0], options.out, options.signals)
        return
    with tempfile.TemporaryDirectory() as signals:
        supervise(asked, options.out, Path(signals), options.seconds)


def supervise(asked: list[str], out: Path, signals: Path, seconds: float) -> None:
    """Runs the parts' processes: loading side by side, measuring in turn, each ended at its limit."""
    started = time.monotonic()
    command = [sys.executable, __file__, "--out", str(out), "--signals", str(signals), "--parts"]
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "MEASURE_PARTS": ",".join(asked), "PYTHONPATH": path}
    processes = {part: subprocess.Popen([*command, part], start_new_session=True, env=environment) for part in asked}
    try:
        for part, process in processes.items():
            wait(process, LOADING + started - time.monotonic(), signals / f"{part}.ready")
            limit = min(LIMITS[part], started + seconds - time.monotonic())
            if limit < 20:
                print(f"{part}: not run, {seconds:.0f} s are over", flush=True)
                continue
            (signals / f"{part}.go").touch()
            if not wait(process, limit):
                end(process)
                note(out / f"{part}.json", f"ended at its limit of {limit:.0f} s")
            print(f"{part}: over after {time.monotonic() - started:.0f} s in all", flush=True)
            time.sleep(1)  # for its memory to be free
    finally:
        for process in processes.values():
            end(process)
    summary(out)


def wait(process: subprocess.Popen[bytes], seconds: float, file: Path | None = None) -> bool:
    """Whether the process ended within so many seconds, or the file came to be."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None or (file is not None and file.exists()):
            return True
        time.sleep(0.05)
    return False


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def note(file: Path, text: str) -> None:
    """Adds to a part's result that it was stopped."""
    result = json.loads(file.read_text()) if file.is_file() else {}
    write(file, result | {"stopped": text})


def write(file: Path, result: dict[str, Any]) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1, default=str) + "\n")
    partial.rename(file)


def measure(part: str, out: Path, signals: Path) -> None:
    """The process of one part: loads, waits for its turn, measures, and ends at once, so that its memory is free."""
    import parts

    parts.load(part)
    (signals / f"{part}.ready").touch()
    while not (signals / f"{part}.go").exists():
        time.sleep(0.05)
    started = time.perf_counter()
    command = f"python experiments/results/rollout/measure.py --out OUT --parts {os.environ['MEASURE_PARTS']}"
    result: dict[str, Any] = {"part": part, "command": command, **parts.provenance()}

    def save(**figures: Any) -> None:
        result.update(figures, wall_seconds=round(time.perf_counter() - started, 1))
        write(out / f"{part}.json", result)

    try:
        save()
        parts.PARTS[part](save)
    except Exception:
        save(error=parts.failure())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def summary(out: Path) -> None:
    """The figures beside what they must reach, from the files that are there."""
    found = {part: json.loads(file.read_text()) for part in LIMITS if (file := out / f"{part}.json").is_file()}

    def show(text: str, *path: str, scale: float = 1, digits: int = 3) -> float | None:
        value: Any = found
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, int | float):
            print(f"{text:<58} {scale * value:.{digits}f}")
            return float(value)
        print(f"{text:<58} -")
        return None

    ours = show("small: step, Triton loss, s", "small", "triton", "step_seconds_median")
    show("small: step, chunked loss, s", "small", "chunked", "step_seconds_median")
    show("small: refresh, ms (25)", "small", "triton", "medians", "rollout/refresh_seconds", scale=1e3)
    theirs = show("stock: step, s", "stock", "step_seconds_median")
    if ours and theirs:
        print(f"{'small / stock (0.4)':<58} {ours / theirs:.3f}")
    show("large: memory without KV over the weights' bytes (1.1)", "large", "ratio")
    show("large: wake, ms (50 with release)", "large", "wake_ms")
    show("large: release, ms", "large", "release_ms")
    show("large: step shared over unshared (1.05)", "large", "shared_over_unshared")
    plain, small = (show(f"{part}: KV tokens a GiB", part, "tokens_per_gib", digits=0) for part in ("small", "fp8"))
    if plain and small:
        print(f"{'fp8 over bf16 (1.9)':<58} {small / plain:.3f}")
    mean = "sampling/sampling_logp_difference/mean"
    for part, stage in (("small", "triton"), ("fp8", "train"), ("four_bit", "train")):
        show(f"{part}: log-prob difference, mean", part, stage, "medians", mean, digits=4)
    show("memory: growth from step 20 to 200 (0.01)", "memory", "growth", digits=4)
    show("memory: full fine-tuning, step, s", "memory", "full_fine_tuning", "step_seconds_median")
    for part, result in found.items():
        for key in ("error", "stopped"):
            if key in result:
                print(f"{part}: {str(result[key]).strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
