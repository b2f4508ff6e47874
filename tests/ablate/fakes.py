"""A stand-in for the training of a cell, for tests of everything around it. Runs in workers, so it imports no torch.

It keeps to what a real cell does: metrics and evaluations per step, checkpoints, resume, one deterministic number that
each step makes from the one before. `FAKE_CELLS` (JSON: cell name -> what happens to it) plants faults, `FAKE_ENV`
(JSON) is what env.json says of the machine.
"""

import errno
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

from ablate import resolve

STEPS = 12
CHECKPOINT_EVERY = 4


def faults(cell: str) -> dict[str, Any]:
    return json.loads(os.environ.get("FAKE_CELLS", "{}")).get(cell, {})


def advance(value: float, variant: str, seed: int, step: int) -> float:
    text = f"{value!r}/{variant}/{seed}/{step}"
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) / 16**12


def once(folder: Path, name: str) -> bool:
    """True the first time, for faults that happen once."""
    mark = folder / name
    if mark.exists():
        return False
    mark.touch()
    return True


def run_cell(cell: Any, directory: Any, on_step: Any) -> dict[str, Any]:
    fault = faults(cell.name)
    pause = float(os.environ.get("FAKE_PAUSE", "0"))
    print(f"training {cell.name}", flush=True)
    machine = json.loads(os.environ.get("FAKE_ENV", "{}"))
    omp, visible = os.environ.get("OMP_NUM_THREADS"), os.environ.get("CUDA_VISIBLE_DEVICES", "none")
    with mock.patch.object(resolve, "cuda_devices", lambda: 0 if visible == "none" else visible.count(",") + 1):
        device = resolve.device(cell.config.device).name
    env = {"python": "3", "pid": os.getpid(), "omp": omp, "card": visible, "saw": device}
    directory.write_env({**env, **machine})
    found = directory.latest_checkpoint()
    start, value = 0, float(cell.seed)
    if found:
        start = found[0]
        value = json.loads((found[1] / "state.json").read_text())["value"]
    directory.rewind(start if found else -1)
    if not found:
        directory.append_eval({"step": 0, "eval/probability": 0.3})
    for step in range(start + 1, STEPS + 1):
        time.sleep(pause)
        if fault.get("at") == step:
            plant(fault, directory)
        value = advance(value, cell.variant, cell.seed, step)
        directory.append_metrics({"step": step, "loss": value, "reward": 1 - value, "kl": value / 7})
        if step % 5 == 1:
            directory.write_rollouts(step, [{"step": step, "completion_ids": [step, cell.seed], "advantage": value}])
        on_step(step, STEPS, {"reward": 1 - value})
        if step % CHECKPOINT_EVERY == 0:
            with directory.save_checkpoint(step) as folder:
                (folder / "state.json").write_text(json.dumps({"value": value}))
    directory.append_eval({"step": STEPS, "eval/probability": value})
    return {"steps": STEPS, "eval": {"eval/probability": value}, "pairing": {}}


def plant(fault: dict[str, Any], directory: Any) -> None:
    kind = fault["kind"]
    if kind == "raise":
        raise RuntimeError("the reward function 'digits' raised: boom")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "kill once" and once(directory.path, "killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "full disk":
        sync = os.fsync

        def full(handle: int) -> None:
            os.fsync = sync
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.fsync = full
