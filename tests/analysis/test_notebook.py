"""The committed notebook is executed, holds what the committed run files give, and its cells only call functions."""

import ast
import copy
import re
from pathlib import Path

import nbformat
import pytest

from analysis import embed, load, notebook

ROOT = Path(notebook.__file__).resolve().parents[1]
PAGE = ROOT / "analysis" / "report.ipynb"
PICTURES = ("plots.", "replay.cosine_matrix(")
CURE = "python -m ablate report --committed"
MAX_BYTES = 2 * 2**20


@pytest.fixture(scope="module")
def committed() -> nbformat.NotebookNode:
    return nbformat.read(PAGE, as_version=4)


def draws(cell: nbformat.NotebookNode) -> bool:
    return cell.source.startswith(PICTURES)


def test_it_is_executed_and_small(committed: nbformat.NotebookNode) -> None:
    nbformat.validate(committed)
    assert PAGE.stat().st_size < MAX_BYTES
    for cell in committed.cells:
        if cell.cell_type == "code":
            assert cell.execution_count
            assert len(cell.outputs) == (not cell.source.startswith("from ")), cell.source
            for output in cell.outputs:
                assert output.output_type != "error" and output.get("name") != "stderr"
                assert set(output.get("data", {})) <= {"image/png" if draws(cell) else "text/markdown"}


def test_cells_only_call(committed: nbformat.NotebookNode) -> None:
    logic = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.Lambda, ast.comprehension, ast.BinOp)
    for cell in committed.cells:
        if cell.cell_type == "code":
            assert not [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, logic)]


def test_every_committed_experiment_has_its_section(committed: nbformat.NotebookNode) -> None:
    sections = [cell.source for cell in committed.cells if cell.source.startswith("## ")]
    names = [load.load(folder).experiment for folder in embed.committed(ROOT)]
    assert [re.match(r"## (\S+):", source)[1] for source in sections] == names  # type: ignore[index]
    assert "replay.cosine_matrix(replayed)" in [cell.source for cell in committed.cells]


def test_it_holds_what_the_run_files_give(committed: nbformat.NotebookNode) -> None:
    """Made and executed anew; of the pictures, which test_plots and test_results draw, the first two."""
    made = notebook.build(embed.committed(ROOT))
    assert [cell.source for cell in made.cells] == [cell.source for cell in committed.cells], CURE
    drawn = [cell for cell in made.cells if draws(cell)]
    made.cells = [cell for cell in made.cells if cell not in drawn[2:]]
    fresh = notebook.texts(notebook.execute(made, ROOT))
    assert fresh == [text for cell, text in pairs(committed) if not draws(cell) or cell.id in ids(drawn[:2])], CURE


def pairs(done: nbformat.NotebookNode) -> list[tuple[nbformat.NotebookNode, tuple[str, str]]]:
    return list(zip(done.cells, notebook.texts(done), strict=True))


def ids(cells: list[nbformat.NotebookNode]) -> set[str]:
    return {cell.id for cell in cells}


def test_a_stale_number_would_be_found(committed: nbformat.NotebookNode) -> None:
    edited = copy.deepcopy(committed)
    shown = [output for cell in edited.cells for output in cell.get("outputs", []) if "data" in output]
    table = next(o for o in shown if "0.369" in o.data.get("text/markdown", ""))
    table.data["text/markdown"] = table.data["text/markdown"].replace("0.369", "0.396")
    assert notebook.texts(edited) != notebook.texts(committed)


def test_runs_of_ones_own(points: Path, partial: Path, tmp_path: Path) -> None:
    """Other folders, with vLLM's mismatch in one and unfinished cells in the other; written once, then current."""
    page = tmp_path / "mine.ipynb"
    assert embed.update(page, ROOT, [points, partial])
    done = nbformat.read(page, as_version=4)
    texts = dict(notebook.texts(done))
    assert "| fp8_head |" in texts["tables.mismatch_table(runs)"].replace("reference ", "")
    outputs = [output for cell in done.cells for output in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    everything = "\n".join(text for _, text in notebook.texts(done))
    assert "fp8_head: reference learns less than at fp32" in everything
    assert "no_detach has no finished run (1 failed)" in everything


def test_nothing_to_show_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no experiment to show"):
        embed.update(tmp_path / "empty.ipynb", tmp_path)


@pytest.mark.parametrize("own", ["not JSON", "[]", '{"cells": [{"id": "cell-0"}, {"id": "4f2c"}]}'])
def test_a_notebook_with_cells_of_ones_own_is_not_written_over(demo: Path, tmp_path: Path, own: str) -> None:
    page = tmp_path / "mine.ipynb"
    page.write_text(own)
    with pytest.raises(ValueError, match="mine.ipynb: holds cells that"):
        embed.update(page, tmp_path, [demo])
    assert page.read_text() == own


def test_a_page_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    with pytest.raises(ValueError, match=r"page\.md cannot be read"):
        embed.update(page, tmp_path)
    page.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"page\.md cannot be read"):
        embed.update(page, tmp_path)
