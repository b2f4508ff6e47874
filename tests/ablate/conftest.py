"""A model, and runs that several files replay; read only."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment whose one cell trained all weights for five steps; rollouts and policies of steps 1, 3 and 5."""
    from tests.ablate.replaying import FULL, train

    return train(tmp_path_factory.mktemp("full"), *FULL)


@pytest.fixture(scope="session")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an adapter; each batch of rollouts is used twice, so old log-probs are stored."""
    from tests.ablate.replaying import LORA, train

    return train(tmp_path_factory.mktemp("lora"), *LORA)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model whose next-token distributions are far from uniform."""
    from ablate.models.tiny import TinySettings, tiny_model

    path = tmp_path_factory.mktemp("model")
    tiny_model(TinySettings(initializer_range=0.2)).save_pretrained(path)
    return path
