"""Results inside a page: what stands between two markers is made from run files, so that no number is typed by hand.

<!-- results experiments/results/default -->
(table, sentences, step times of that folder's runs, and what it takes to repeat them)
<!-- end of results -->

A notebook is such a page as well: `analysis.notebook` makes it as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape as escape_html
from pathlib import Path

from ablate import schema
from analysis import costs, tables, words
from analysis.files import write_atomic
from analysis.formats import escape_markdown
from analysis.load import Runs, load
from analysis.stats import compare

PAGES = ("README.md", "experiments/LOG.md", "analysis/report.ipynb")  # that show committed results
MARKERS = re.compile(r"(<!-- results (?P<folder>[^\s]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def committed(root: Path) -> list[Path]:
    """The experiments whose run files are part of the repository at `root`: those that the README shows come first."""
    found = {path.parents[1] for path in root.glob(f"experiments/results/*/*/{schema.CONFIG_FILE}")}
    readme = root / PAGES[0]
    named = MARKERS.finditer(readme.read_text(encoding="utf-8")) if readme.is_file() else ()
    order = {root / match["folder"]: index for index, match in enumerate(named)}
    return sorted(found, key=lambda folder: (order.get(folder, len(order)), folder.name))


def block(runs: Runs) -> str:
    """Table, sentences, step times and what a repetition takes of an experiment's runs as Markdown."""
    main = tables.comparison_table(runs)
    comparisons = compare(runs)
    sentences = [*words.sentences(runs, comparisons), words.multiplicity(comparisons)]
    commits = sorted(str(sha)[:12] for sha in runs.cells["git_sha"].dropna().unique())
    origin = f"{main.title}; {len(runs.done)} runs, commit {', '.join(commits) or 'unknown'}."
    table = main.markdown(notes=False, columns=[*tables.TERMINAL, *runs.axes])
    listed = "\n".join(f"- {escape_markdown(line)}" for line in sentences if line)
    timing = costs.timing_table(runs)
    repeat = "\n".join(f"- {escape_markdown(f'{what}: {value}')}" for what, value in costs.repeat_table(runs).rows)
    parts = (listed, f"{timing.title}:", timing.markdown(notes=False), "To repeat:", repeat)
    inner = "\n\n".join(part.rstrip() for part in parts)
    return f"{table}\n<details><summary>{escape_html(origin)}</summary>\n\n{inner}\n\n</details>\n"


def render(text: str, root: Path) -> str:
    """The page with every block made anew; folders are relative to `root`. Raises ValueError where one has no runs."""

    def fill(match: re.Match[str]) -> str:
        folder = root / match["folder"]
        if not folder.is_dir():
            raise ValueError(f"the page asks for results of {match['folder']}, but there is no such folder in {root}")
        return f"{match[1]}{block(load(folder))}{match[3]}"

    return MARKERS.sub(fill, text)


def update(page: Path, root: Path, folders: Sequence[Path] = ()) -> bool:
    """Writes the page where its results changed; whether it did.

    folders: experiments of a notebook (none: the committed ones). Raises ValueError where a page has no markers, or a
    notebook no experiment or no Jupyter to run in.
    """
    if page.suffix == ".ipynb":
        from analysis import notebook

        return notebook.update(page, list(folders) or committed(root))
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--page {page} cannot be read: {error}; give a Markdown page or a notebook") from error
    if not MARKERS.search(text):
        raise ValueError(f"{page} has no block that begins with <!-- results FOLDER -->")
    made = render(text, root)
    if made != text:
        write_atomic(page, made)
    return made != text
