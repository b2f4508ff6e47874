"""Copies of the committed run files that a test may damage, and the report over them."""

import shutil
from pathlib import Path

import pytest

from analysis.render import Report, write_report
from tests.analysis import make_fixture

FIXTURE = Path(__file__).resolve().parent / "fixture"


@pytest.fixture(scope="session")
def demo() -> Path:
    """4 variants x 3 seeds x 2 betas, all done. Read only."""
    return FIXTURE / "demo"


@pytest.fixture(scope="session")
def partial() -> Path:
    """One cell each of done, failed, partial and new. Read only."""
    return FIXTURE / "partial"


@pytest.fixture(scope="session")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """reference at three named points x 3 seeds, on a GPU with vLLM. Read only."""
    return make_fixture.points(tmp_path_factory.mktemp("points"))


@pytest.fixture
def copied(demo: Path, tmp_path: Path) -> Path:
    """The demo's cells of beta 0.04, to be damaged."""
    target = tmp_path / "demo"
    target.mkdir()
    for folder in demo.glob("*-beta0.04"):
        shutil.copytree(folder, target / folder.name)
    return target


@pytest.fixture(scope="session")
def report(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return write_report(demo, tmp_path_factory.mktemp("report"))
