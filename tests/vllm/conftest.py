"""One process, one engine: every test here shares the process with vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny() -> Path:
    """Folder of the warm-started tiny model."""
    from ablate.models.tiny import build_tiny

    return build_tiny()


@pytest.fixture
def lora(tiny: Path) -> tuple[Any, Any]:
    """The engine, and a model with an adapter on views of its weights."""
    from tests.vllm.engines import adapted, live_engine

    live = live_engine(tiny, rank=8)
    return live, adapted(live.shared_model(), 0.1)


@pytest.fixture(scope="session", autouse=True)
def end_of_engine():
    yield
    from ablate.rollout import vllm_live

    vllm_live.release()
