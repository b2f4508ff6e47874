"""Results inside a page: what stands between two markers is made from run files, so that no number is typed by hand.

<!-- results experiments/results/default -->
(table and sentences of that folder's runs)
<!-- end of results -->
"""

from __future__ import annotations

import re
from html import escape as escape_html
from pathlib import Path

from analysis import tables, words
from analysis.files import write_atomic
from analysis.formats import escape_markdown
from analysis.load import Runs, load
from analysis.stats import compare

MARKERS = re.compile(r"(<!-- results (?P<folder>[^\s]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def block(runs: Runs) -> str:
    """Table, sentences and origin of an experiment's runs as Markdown."""
    main = tables.comparison_table(runs)
    comparisons = compare(runs)
    sentences = [*words.sentences(runs, comparisons), words.multiplicity(comparisons)]
    commits = sorted(str(sha)[:12] for sha in runs.cells["git_sha"].dropna().unique())
    origin = f"{main.title}; {len(runs.done)} runs, commit {', '.join(commits) or 'unknown'}."
    table = main.markdown(notes=False, columns=[*tables.TERMINAL, *runs.axes])
    listed = "\n".join(f"- {escape_markdown(line)}" for line in sentences if line)
    return f"{table}\n<details><summary>{escape_html(origin)}</summary>\n\n{listed}\n\n</details>\n"


def render(text: str, root: Path) -> str:
    """The page with every block made anew; folders are relative to `root`. Raises ValueError where one has no runs."""

    def fill(match: re.Match[str]) -> str:
        folder = root / match["folder"]
        if not folder.is_dir():
            raise ValueError(f"the page asks for results of {match['folder']}, but there is no such folder in {root}")
        return f"{match[1]}{block(load(folder))}{match[3]}"

    return MARKERS.sub(fill, text)


def update(page: Path, root: Path) -> bool:
    """Writes the page where its results changed; whether it did. Raises ValueError where it has no markers."""
    text = page.read_text(encoding="utf-8")
    if not MARKERS.search(text):
        raise ValueError(f"{page} has no block that begins with <!-- results FOLDER -->")
    made = render(text, root)
    if made != text:
        write_atomic(page, made)
    return made != text
