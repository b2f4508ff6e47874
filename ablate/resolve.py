"""What `auto` stands for, in one place: device, rollout engine, cells side by side, threads.

An explicit request never falls back: it is met, or a ConfigError names the key.

torch is imported only where a CUDA device is asked for by name or may be there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.errors import ConfigError, unknown

if TYPE_CHECKING:
    from ablate.config import Config

CARD = "ABLATE_CARD"  # environment variable of a worker that sees one CUDA device of several: that one's number
WORKER_BYTES = 2 << 30  # host memory that one worker is assumed to take: torch, TRL and a small model


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why in words."""

    name: str
    why: str


def cuda_devices() -> int:
    """Number of usable CUDA devices; 0 without loading torch where the machine has no NVIDIA driver."""
    driver = shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists() or Path("/dev/nvidiactl").exists()
    if "torch" not in sys.modules and not driver:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device(asked: str) -> Choice:
    """The device of `device=`. Raises ConfigError where a CUDA device that is not there is asked for.

    In a worker to which `cards` shows one device alone, that device's `cuda:N` is `cuda`.
    """
    count = 0 if asked == "cpu" else cuda_devices()
    if asked == "auto":
        return Choice("cuda", f"{count} CUDA device(s)") if count else Choice("cpu", "no CUDA device")
    if asked.startswith("cuda"):
        index = int(asked.partition(":")[2] or 0)
        if count == 0:
            raise ConfigError(
                f"device={asked}: there is no CUDA device that torch can use; say device=cpu or device=auto"
            )
        if count == 1 and os.environ.get(CARD) == str(index):
            return Choice("cuda", f"{asked}, the only one that this process sees")
        if index >= count:
            raise ConfigError(f"device={asked}: there are {count} CUDA devices, counted from 0")
    return Choice(asked, "asked for")


def rollout(asked: str, on: str = "auto") -> Choice:
    """The rollout engine of `rollout=` for a device. Raises ConfigError where vLLM is asked for and not there."""
    missing = ""
    if not (Path(__file__).parent / "rollout" / "vllm.py").is_file():  # find_spec would import the package
        missing = "this version has no vLLM engine"
    elif importlib.util.find_spec("vllm") is None:
        missing = "vLLM is not installed"
    if asked == "vllm" and missing:
        raise ConfigError(f"rollout=vllm: {missing}; say rollout=transformers or rollout=auto")
    if asked != "auto":
        return Choice(asked, "asked for")
    if missing:
        return Choice("transformers", missing)
    if device(on).name.startswith("cuda"):
        return Choice("vllm", "CUDA, and vLLM is installed")
    return Choice("transformers", "no CUDA device; rollout=vllm asks for vLLM on the CPU")


def backend(asked: str, on: str = "auto") -> Choice:
    """The loss backend of `loss.backend=`, as `losses` chooses it for a device; ConfigError where it cannot run."""
    if asked in ("reference", "chunked"):
        return Choice(asked, "asked for")
    where = device(on).name
    if asked == "auto" and where == "cpu":
        return Choice("chunked", "no CUDA device")
    import torch

    from losses.backends import resolve as backends

    try:
        name, why = backends.choose(asked, torch.device(where), torch.float32)
    except ValueError as error:
        raise ConfigError(f"loss.backend={asked}: {error}") from error
    if name == "triton" and where == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("loss.backend=triton: the kernels need a CUDA device; say loss.backend=chunked")
    return Choice(name, why)


def model(spec: str) -> None:
    """Refuse a model that cannot be one: a path that is not there, a misspelt name. Hub ids are not looked up."""
    from ablate import models

    path = Path(spec).expanduser()
    if spec in models.names() or (spec and path.exists()):
        return
    if spec and (spec[0] in "./~" or spec.endswith((".gguf", ".safetensors")) or spec.count("/") > 1 + spec.count("@")):
        raise ConfigError(f"model={spec}: there is no such file or folder")
    if not models.HUB_ID.fullmatch(spec):
        raise unknown("model", spec, [*models.names(), "a folder", "a .gguf file", "a hub id OWNER/NAME"], "it may be")


def is_tiny(config: Config) -> bool:
    """Whether cells train a model so small that a second thread only costs."""
    return config.model.partition("-")[0] == "tiny"


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cards(config: Config) -> list[dict[str, str]]:
    """The CUDA devices for workers to take turns on; of each, the variables that show it alone: TRL trains on one.

    `device=cuda:N` is one device, `auto` and `cuda` are all. Empty where there is no second one to be hidden. Raises
    ConfigError as `device` does, and where cells of one sweep name different ones.
    """
    own = [point.get("device", config.device) for point in config.points.values()]
    asked = set(config.grid.get("device", own or [config.device])) - {"cpu"}
    count = cuda_devices() if asked else 0
    if count < 2:
        return []
    found = {device(name).name.partition(":")[2] for name in asked}
    if len(found) > 1:
        raise ConfigError(f"device: {', '.join(sorted(asked))} in one sweep; name one CUDA device, or cuda for all")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else [str(n) for n in range(count)]
    if len(names) < count or not all(names):
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={visible}: names other devices than the {count} that CUDA sees")
    (index,) = found
    numbers = [int(index)] if index else range(count)
    return [{"CUDA_VISIBLE_DEVICES": names[n], CARD: str(n)} for n in numbers]


def jobs(config: Config, cells: int) -> int:
    """Cells side by side: `jobs=auto` is one per core for the tiny model on a CPU, as memory allows; one per GPU.

    Raises ConfigError for `jobs=0` where this process sees several CUDA devices: CUDA has counted them by now.
    """
    if config.jobs == 0 and (several := cards(config)):
        raise ConfigError(
            f"jobs=0: this process sees {cuda_devices()} CUDA devices, and cells train on one; start it with "
            f"CUDA_VISIBLE_DEVICES={several[0]['CUDA_VISIBLE_DEVICES']} in the environment and device=auto, or say "
            "jobs=1"
        )
    if isinstance(config.jobs, int):
        return min(config.jobs, cells)
    if not is_tiny(config) or device(config.device).name != "cpu":
        return min(max(1, len(cards(config))), cells)
    import psutil

    by_memory = int(psutil.virtual_memory().available // WORKER_BYTES)
    return max(1, min(cores(), by_memory, cells))


def threads(config: Config, workers: int) -> int | None:
    """CPU threads per cell for `threads=`; None leaves them to torch, or to OMP_NUM_THREADS where the user has set it.

    The tiny model always gets one, however many cells run: its numbers must not depend on `jobs`.
    """
    if config.threads is not None:
        return config.threads
    if "OMP_NUM_THREADS" in os.environ:
        return None
    if device(config.device).name != "cpu":
        return None
    return 1 if is_tiny(config) or workers > 1 else None
