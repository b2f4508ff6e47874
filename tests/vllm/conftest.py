"""One process, one engine: every test here shares the process with vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny() -> Path:
    """Folder of the warm-started tiny model."""
    from ablate.models.tiny import build_tiny

    return build_tiny()


@pytest.fixture(scope="session", autouse=True)
def end_of_engine():
    yield
    from ablate.rollout import vllm_live

    vllm_live.release()
