"""Writes a report: tables, figures and one self-contained HTML page, all from run files."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ablate import schema
from analysis import costs, plots, replay, scores, stats, tables, words
from analysis.files import Problem, write_atomic
from analysis.formats import Table, escape_markdown
from analysis.load import Runs, load, place
from analysis.samples import Samples, samples

TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True)
class Report:
    """What `write_report` made.

    table_text: the comparison as aligned plain text. sentences: the comparison in words, one per row, then what the
    seeds resolve. paths: every file written. problems: what is wrong with the run files, errors first. unfinished: a
    line for each cell that is not done.
    """

    table_text: str
    sentences: tuple[str, ...]
    paths: tuple[Path, ...]
    problems: tuple[Problem, ...] = ()
    unfinished: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """All of it for a terminal: table, sentences, unfinished cells, problems, and where the page is."""
        parts = [self.table_text, "\n".join(self.sentences)]
        if self.unfinished:
            parts.append("\n".join(self.unfinished))
        if self.problems:
            parts.append("\n".join(str(problem) for problem in self.problems))
        page = next((path for path in self.paths if path.suffix == ".html"), None)
        text = "\n\n".join([part.rstrip() for part in parts] + ([f"report: {page}"] if page else [])) + "\n"
        return "".join(sign if sign.isprintable() or sign == "\n" else "\ufffd" for sign in text)  # no escape codes


@dataclass(frozen=True)
class _Figure:
    name: str
    title: str
    caption: str
    draw: Callable[[Runs], plots.Plot]


_BAND = "Thin lines: seeds; thick: mean; band: mean ± sd over finished seeds; dotted with a cross: unfinished."
FIGURES = (
    _Figure("curves", "Learning curves", _BAND, plots.learning_curves),
    _Figure(
        "differences",
        "Paired differences",
        "Large marks: mean with Student's 95% interval, filled where it leaves zero out; small marks: seeds.",
        plots.differences,
    ),
    _Figure("rewards", "Rewards in training", _BAND, plots.rewards),
    _Figure("kl", "KL to the start", _BAND, plots.kl),
    _Figure("entropy", "Entropy", _BAND, plots.entropy),
    _Figure("lengths", "Completion length", _BAND, plots.lengths),
    _Figure("weight_distance", "Weight distance", _BAND, plots.weight_distance),
    _Figure("cost", "Time and memory of a step", "Medians over steps and seeds.", plots.cost),
    _Figure("evaluations", "All evaluations", _BAND, plots.evaluations),
)


OTHER_TABLES: tuple[Callable[[Runs], Table | None], ...] = (
    scores.score_table,
    tables.reward_table,
    tables.power_table,
    costs.timing_table,
    costs.repeat_table,
    tables.mismatch_table,
    tables.pairing_table,
    tables.cells_table,
)


@dataclass(frozen=True)
class Content:
    """What a report says, before any figure is drawn. others: tables beside the main one, that of the cells last."""

    runs: Runs
    main: Table
    others: list[Table]
    replays: list[replay.Replay]
    replayed: list[Table]
    results: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    shown: list[Samples]

    def markdown(self) -> str:
        """The tables and sentences as one Markdown text."""
        blocks = [f"# {escape_markdown(self.main.title)}"]
        if self.problems:
            blocks.append("\n".join(["**Problems**", "", *(f"- {escape_markdown(str(p))}" for p in self.problems)]))
        blocks += ["\n".join(f"- {escape_markdown(line)}" for line in self.results), self.main.markdown()]
        if self.notes:
            blocks.append("\n".join(f"- {escape_markdown(line)}" for line in self.notes))
        blocks += [
            f"## {escape_markdown(table.title)}\n\n{table.markdown()}" for table in (*self.others, *self.replayed)
        ]
        commits = sorted(self.runs.cells["git_sha"].dropna().unique())
        blocks.append(f"Code: {escape_markdown(', '.join(commits)) if commits else 'commit unknown'}.")
        return "\n\n".join(block.rstrip() for block in blocks) + "\n"


def gather(runs: Runs) -> Content:
    """Tables, sentences and problems of a report."""
    comparisons = stats.compare(runs)
    shown, unreadable = samples(runs)
    replays, damaged = replay.find(runs)
    together = words.multiplicity(comparisons)
    return Content(
        runs=runs,
        main=tables.comparison_table(runs),
        others=[table for make in OTHER_TABLES if (table := make(runs))],
        replays=replays,
        replayed=[replay.summary_table(item) for item in replays],
        results=(*words.sentences(runs, comparisons), *words.drift(runs, comparisons)),
        notes=(*([together] if together else []), *words.power_notes(comparisons)),
        problems=tuple(sorted((*runs.problems, *unreadable, *damaged), key=lambda p: p.severity)),
        shown=shown,
    )


def write_kept(experiment_dir: Path) -> None:
    """The part of a report that is kept with committed runs: table.md and curves.svg."""
    runs = load(experiment_dir)
    folder = experiment_dir / schema.REPORT_DIR
    write_atomic(folder / "table.md", gather(runs).markdown())
    plots.save(plots.learning_curves(runs), folder / "curves", kinds=("svg",))


def write_report(experiment_dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Report:
    """Read `experiment_dir` and write its report to `out` (None: `<experiment_dir>/report`).

    Files: table.md, table.csv, table.tex, one CSV for each other table, every figure as PNG and SVG, report.html.
    Tables come first, so a full disk costs figures before numbers. The same run files give the same bytes. Missing,
    failed and damaged cells are shown as such; they never stop a report.

    Raises ValueError where `experiment_dir` is no folder or `out` cannot be written.
    """
    runs = load(experiment_dir)
    folder = Path(out) if out is not None else Path(experiment_dir) / schema.REPORT_DIR
    content = gather(runs)
    main, others, replayed = content.main, content.others, content.replayed
    results, notes, problems = content.results, content.notes, content.problems
    paths = [
        write_atomic(folder / "table.md", content.markdown()),
        write_atomic(folder / "table.csv", main.csv()),
        write_atomic(folder / "table.tex", main.latex()),
        *(write_atomic(folder / f"{table.name}.csv", table.csv()) for table in (*others, *replayed)),
    ]
    pictures: dict[str, dict[str, Any]] = {}
    for figure in FIGURES:
        drawn = figure.draw(runs)
        saved = plots.save(drawn, folder / figure.name)
        paths += saved
        pictures[figure.name] = {"figure": figure, "uri": _embedded(saved), "width": round(120 * drawn.get_figwidth())}
    sections = []
    for item, table in zip(content.replays, replayed, strict=True):
        drawn = replay.cosine_matrix(item)
        saved = plots.save(drawn, folder / item.name)
        paths += saved
        sections.append({"replay": item, "lines": replay.sentences(item), "table": table, "uri": _embedded(saved),
                         "tables": replay.tables(item)[1:], "width": round(120 * drawn.get_figwidth())})  # fmt: skip
    page = _environment().get_template("report.html.j2").render(
        runs=runs, table=main, tables={t.name: t for t in others}, results=results, notes=notes, problems=problems,
        pictures=pictures, replays=sections, samples=content.shown, failures=runs.failures.to_dict("records"),
        settings=settings(runs.configs), provenance=settings(runs.environments), done=len(runs.done),
    )  # fmt: skip
    paths.append(write_atomic(folder / "report.html", page))
    text = main.text([*tables.TERMINAL, *runs.axes])
    unfinished = tuple(
        f"{row.cell}: {row.state}" + (f" ({row.problem})" if row.problem else "")
        for row in others[-1].frame.itertuples()
        if row.state != "done"
    )
    return Report(f"{main.title}\n\n{text}", (*results, *notes), tuple(paths), problems, unfinished)


def settings(trees: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Flat (key, value) pairs of the config or env.json of all cells; several values are listed with " | "."""
    values: dict[str, dict[str, None]] = {}
    for tree in trees.values():
        for key, value in schema.flatten(tree).items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            values.setdefault(key, {})[text] = None
    return [(key, _listed(list(texts))) for key, texts in values.items() if texts]


def _embedded(saved: list[Path]) -> str:
    """The smaller of a figure's files as a data URI: SVG where lines are few, PNG for long runs."""
    path = min(saved, key=lambda p: p.stat().st_size)
    kind = {".svg": "image/svg+xml", ".png": "image/png"}[path.suffix]
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def _listed(texts: list[str], most: int = 6) -> str:
    more = f" | {len(texts) - most} more" if len(texts) > most else ""
    return " | ".join(texts[:most]) + more


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["point"] = place
    return environment
