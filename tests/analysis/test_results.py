"""The committed results: every number in a page is what the committed run files give."""

import shutil
from pathlib import Path

import pytest

from analysis import embed
from analysis.load import load
from analysis.render import gather

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = embed.committed(ROOT)
PAGES = [ROOT / page for page in embed.PAGES if page.endswith(".md")]


def test_there_are_results() -> None:
    shown = [match["folder"] for match in embed.MARKERS.finditer(PAGES[0].read_text(encoding="utf-8"))]
    assert [f.relative_to(ROOT).as_posix() for f in EXPERIMENTS][: len(shown)] == shown != []
    assert len(EXPERIMENTS) > len(shown)  # those that only the log and the notebook show


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_hold_what_the_run_files_give(page: Path) -> None:
    assert embed.render(page.read_text(encoding="utf-8"), ROOT) == page.read_text(encoding="utf-8"), (
        "python -m ablate report --committed"
    )


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_tables_are_made_again_from_the_run_files(folder: Path) -> None:
    runs = load(folder)
    assert len(runs.done) == len(runs.cells) > 0
    assert not [problem for problem in runs.problems if problem.severity == "error"]
    assert gather(runs).markdown() == (folder / "report" / "table.md").read_text(), (
        "python -m ablate report --committed"
    )


def test_a_number_typed_by_hand_is_found(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    match = embed.MARKERS.search(text)
    assert match is not None
    edited = text.replace("0.369", "0.396", 1)
    assert edited != text and embed.render(edited, ROOT) == text


def test_a_page_without_markers_or_runs_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no block"):
        embed.update(page, ROOT)
    page.write_text("<!-- results runs/none -->\n<!-- end of results -->\n")
    with pytest.raises(ValueError, match="no such folder"):
        embed.update(page, ROOT)


def test_update_writes_only_what_changed(tmp_path: Path) -> None:
    folder = next(folder for folder in EXPERIMENTS if folder.name == "default")
    shutil.copytree(folder, tmp_path / "default")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results default -->\nof yesterday\n<!-- end of results -->\nafter\n")
    assert embed.update(page, tmp_path) and not embed.update(page, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "of yesterday" not in text and "no_detach" in text
