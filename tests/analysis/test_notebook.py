"""The notebook runs from top to bottom over the committed run files, and holds no logic of its own."""

import ast
from pathlib import Path

import nbclient
import nbformat
import pytest

import analysis

NOTEBOOK = Path(analysis.__file__).with_name("report.ipynb")
ROOT = NOTEBOOK.parents[1]


@pytest.fixture(scope="module")
def notebook() -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_cells_only_call(notebook: nbformat.NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            for node in ast.walk(ast.parse(cell.source)):
                assert not isinstance(
                    node,
                    ast.FunctionDef
                    | ast.ClassDef
                    | ast.For
                    | ast.While
                    | ast.If
                    | ast.Lambda
                    | ast.comprehension
                    | ast.BinOp,
                )


@pytest.mark.parametrize("name", ["demo", "partial"])
def test_runs(
    notebook: nbformat.NotebookNode, name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if name == "demo":  # what is shown where nothing is set
        monkeypatch.delenv("ABLATE_RUN", raising=False)
    else:
        monkeypatch.setenv("ABLATE_RUN", str(request.getfixturevalue(name)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = nbclient.NotebookClient(
        nbformat.from_dict(notebook), timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    text = "".join(o.text for o in outputs if o.output_type == "stream")
    assert text.startswith(name)
    assert ("no_detach does not learn: -0.4" if name == "demo" else "no_detach has no finished run (1 failed)") in text
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 6
    assert sum("text/markdown" in o.get("data", {}) for o in outputs) == 7
