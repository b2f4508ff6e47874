"""The notebook: a section per experiment, made from run files, executed and kept current.

Its cells only call functions of `analysis`, so that a reader can go on from any of them. Which cells a section has
depends on what its runs hold (a mismatch of the sampler, a replay).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis import load, replay, scores, tables
from analysis.files import write_atomic
from analysis.formats import escape_markdown

if TYPE_CHECKING:
    from nbformat import NotebookNode

INTRODUCTION = """# What the runs show

Every number, figure and sentence in the outputs below is made by a function of `analysis` from run files. To see runs
of your own: `python -m ablate report runs/default --page my.ipynb`.
"""
MODULES = ("costs", "load", "plots", "replay", "samples", "scores", "stats", "tables", "words")
BAND = "Thin lines are seeds, the thick line is their mean, the band is mean ± sd."
TIMEOUT = 600  # seconds for a cell
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def build(folders: Sequence[Path]) -> NotebookNode:
    """The notebook of experiments' folders, not executed."""
    import nbformat

    notebook = nbformat.v4.new_notebook(metadata=_METADATA)
    sections = [part for folder in folders for part in _section(folder)]
    code = "\n".join(source for kind, source in sections if kind == "code")
    imports = f"from analysis import {', '.join(name for name in MODULES if f'{name}.' in code)}"
    parts = [("markdown", INTRODUCTION), ("code", imports), *sections]
    for number, (kind, source) in enumerate(parts):
        make = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
        notebook.cells.append(make(source.strip(), id=f"cell-{number}"))
    return notebook


def execute(notebook: NotebookNode, folder: Path | None = None) -> NotebookNode:
    """The notebook with its outputs, nothing in them that differs from one run to the next. folder: to run it in.

    Raises nbclient's CellExecutionError where a cell fails.
    """
    import nbclient
    import nbformat

    where = folder or Path.cwd()
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    client = nbclient.NotebookClient(
        nbformat.from_dict(notebook),
        timeout=TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(where)}},
    )
    client.create_kernel_manager().transport = "ipc"  # no port that others on the machine could read
    done = client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))})
    done["metadata"] = nbformat.from_dict(_METADATA)
    for cell in done.cells:
        for output in cell.get("outputs", []):
            if len(data := output.get("data", {})) > 1:  # the plain text is only the object's name then
                data.pop("text/plain", None)
    return done


def update(page: Path, folders: Sequence[Path]) -> bool:
    """Writes the executed notebook of `folders`; whether anything in it changed.

    Raises ValueError where there are none, or where Jupyter is not installed.
    """
    if not folders:
        raise ValueError(f"{page}: no experiment to show; name folders of runs")
    try:
        import nbclient  # noqa: F401
        import nbformat
    except ImportError as error:
        raise ValueError(f"{page}: a notebook needs {error.name}: pip install 'grpo-ablation[notebook]'") from error
    known = page.read_text(encoding="utf-8") if page.exists() else None
    if known is not None:
        _refuse_own(page, known)
    text = nbformat.writes(execute(build(folders))) + "\n"
    if known == text:
        return False
    write_atomic(page, text)
    return True


def _refuse_own(page: Path, text: str) -> None:
    """Raise ValueError where a page is no notebook of `update`, or has cells that someone added: they would be lost."""
    try:
        cells = json.loads(text)["cells"]
        made = all(re.fullmatch(r"cell-\d+", cell["id"]) for cell in cells) and bool(cells)
    except (ValueError, TypeError, LookupError):
        made = False
    if not made:
        raise ValueError(f"{page}: holds cells that `report --page` did not write; move it away or give another name")


def texts(notebook: NotebookNode) -> list[tuple[str, str]]:
    """(source, what a reader reads of its outputs) of every cell; pictures count as being there."""
    found = []
    for cell in notebook.cells:
        shown = []
        for output in cell.get("outputs", []):
            data: dict[str, Any] = output.get("data", {})
            words = data.get("text/markdown") or data.get("text/plain") or output.get("text", "")
            shown.append("(picture)" if "image/png" in data else words)
        found.append((cell.source, "\n".join(shown)))
    return found


def _section(folder: Path) -> Iterator[tuple[str, str]]:
    """(kind of cell, source) of an experiment's section."""
    runs = load.load(folder)
    inside = folder.resolve().parent == load.RESULTS
    path = f"load.committed({json.dumps(folder.name)})" if inside else json.dumps(folder.as_posix(), ensure_ascii=False)
    finished = f"{len(runs.done)} of {runs.planned} runs finished"
    grid = f", grid over {', '.join(runs.axes)}" if runs.axes else ""
    variants = f"{len(runs.variants)} variant{'s' if len(runs.variants) != 1 else ''}"
    seeds = f"{len(runs.seeds)} seed{'s' if len(runs.seeds) != 1 else ''}"
    title = escape_markdown(f"{runs.experiment}: {runs.primary_label}")
    yield "markdown", f"## {title}\n\n{variants}, {seeds}{escape_markdown(grid)}; {finished}."
    yield "code", f'runs = load.load({path})\nprint(*runs.problems or ["No problem with the run files."], sep="\\n")'
    yield "markdown", "What is resolved, and what is not:"
    yield "code", "words.verdicts(runs)"
    yield "code", "tables.comparison_table(runs)"
    yield "code", "plots.differences(runs)"
    yield "markdown", f"### Learning curves\n\n{BAND}"
    yield "code", "plots.learning_curves(runs)"
    if scores.score_table(runs):
        yield "code", "scores.score_table(runs)"
    yield "markdown", "### What a number of seeds resolves"
    yield "code", "words.Lines(words.power_notes(stats.compare(runs)))"
    yield "code", "tables.power_table(runs)"
    yield "markdown", "### Rewards, by function"
    yield "code", "tables.reward_table(runs)"
    yield "code", "plots.rewards(runs)"
    yield "markdown", "### KL, entropy, length, distance of the weights from their start"
    for figure in ("kl", "entropy", "lengths", "weight_distance"):
        yield "code", f"plots.{figure}(runs)"
    if tables.mismatch_table(runs):
        yield "markdown", "### Sampler and trainer"
        yield "code", "tables.mismatch_table(runs)"
    for index in range(len(replay.find(runs)[0])):
        yield "markdown", "### One batch through every variant"
        yield "code", f"replayed = replay.find(runs)[0][{index}]\nwords.Lines(replay.sentences(replayed))"
        yield "code", "replay.summary_table(replayed)"
        yield "code", "replay.cosine_matrix(replayed)"
    yield "markdown", "### Time, memory, and what a repetition takes"
    yield "code", "costs.timing_table(runs)"
    yield "code", "plots.cost(runs)"
    yield "code", "costs.repeat_table(runs)"
    yield "markdown", "### Runs and pairing"
    yield "code", "tables.pairing_table(runs)"
    yield "code", "tables.cells_table(runs)"
    if any(folder.glob("*/rollouts/*.parquet")):
        yield "markdown", "### Completions"
        yield "code", "samples.table(runs)"
        known = [found["task"] for found in runs.environments.values() if isinstance(found.get("task"), dict)]
        if any(task.get("name") == "sums" for task in known):
            yield "markdown", "Sums of three numbers: stored completions that take two steps, right or wrong, by seed:"
            yield "code", "samples.matching(runs, *samples.BOTH_STEPS)"
