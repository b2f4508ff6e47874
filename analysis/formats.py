"""A table with its raw numbers, and the same table as Markdown, LaTeX, CSV and plain text."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

MISSING = "-"  # shown where there is no value

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "→": r"$\to$",
    "Δ": r"$\Delta$",
}


@dataclass(frozen=True)
class Table:
    """A finished table.

    name: file name without ending. title: one line. headers and rows: text as shown, unescaped, rows as long as
    headers. align: one of l, r, c per column. breaks: indices of rows that start a new block. frame: the raw values in
    full precision (what `csv` writes; its columns need not be those shown). notes: what a reader must know.
    """

    name: str
    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str
    frame: pd.DataFrame
    breaks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.align) != len(self.headers) or any(len(row) != len(self.headers) for row in self.rows):
            raise ValueError(f"table {self.name!r}: align and every row should have {len(self.headers)} entries")

    def csv(self) -> str:
        """Raw values, floats in shortest form that reads back the same."""
        return str(self.frame.to_csv(index=False, lineterminator="\n"))

    def _columns(self, kept: Sequence[str] | None) -> list[int]:
        return [i for i, header in enumerate(self.headers) if kept is None or header in kept]

    def markdown(self, *, notes: bool = True, columns: Sequence[str] | None = None) -> str:
        """A GitHub-flavoured table, padded so that it reads as plain text too. columns: headers to keep (None: all)."""
        keep = self._columns(columns)
        rows = [[escape_markdown(row[i]) for i in keep] for row in (self.headers, *self.rows)]
        widths = [max(3, *(width(row[i]) for row in rows)) for i in range(len(keep))]
        align = [self.align[i] for i in keep]
        marks = {"l": (":", "-"), "r": ("-", ":"), "c": (":", ":")}
        rule = "|".join(f" {marks[a][0]}{'-' * (w - 2)}{marks[a][1]} " for a, w in zip(align, widths, strict=True))
        lines = [
            "|" + "|".join(f" {_pad(t, w, a)} " for t, w, a in zip(r, widths, align, strict=True)) + "|" for r in rows
        ]
        text = "\n".join([lines[0], f"|{rule}|", *lines[1:]]) + "\n"
        if notes and self.notes:
            text += "\n" + "\n".join(f"- {escape_markdown(note)}" for note in self.notes) + "\n"
        return text

    def latex(self) -> str:
        """A floating table for booktabs; every text is escaped."""
        body = []
        for index, row in enumerate(self.rows):
            if index in self.breaks:
                body.append(r"\midrule")
            body.append(" & ".join(escape_latex(text) for text in row) + r" \\")
        notes = " ".join(escape_latex(note if note.endswith(".") else note + ".") for note in self.notes)
        return "\n".join(
            [
                r"% needs \usepackage{booktabs} and \usepackage[T1]{fontenc}",
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{escape_latex(self.title)}. {notes}}}".replace(". }", ".}"),
                rf"\label{{tab:{re.sub(r'[^A-Za-z0-9-]+', '-', self.name)}}}",
                rf"\begin{{tabular}}{{{self.align}}}",
                r"\toprule",
                " & ".join(escape_latex(text) for text in self.headers) + r" \\",
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )

    def text(self, columns: Sequence[str] | None = None) -> str:
        """Aligned plain text for a terminal. columns: headers to keep (None: all)."""
        keep = self._columns(columns)
        rows = [[row[i] for i in keep] for row in (self.headers, *self.rows)]
        widths = [max(width(row[i]) for row in rows) for i in range(len(keep))]
        align = [self.align[i] for i in keep]
        lines = ["  ".join(_pad(t, w, a) for t, w, a in zip(r, widths, align, strict=True)).rstrip() for r in rows]
        rule = "  ".join("-" * w for w in widths)
        out = [lines[0], rule]
        for index, line in enumerate(lines[1:]):
            if index in self.breaks:
                out.append("")
            out.append(line)
        return "\n".join(out) + "\n"

    def _repr_markdown_(self) -> str:
        return f"**{escape_markdown(self.title)}**\n\n{self.markdown()}"


def number(value: float, decimals: int = 3, *, signed: bool = False) -> str:
    """A number as shown in a table: fixed decimals, "0" for exactly zero, 1.2e-06 where the decimals would hide it."""
    if value is None or math.isnan(value):
        return MISSING
    sign = "+" if signed and value > 0 else ""
    if math.isinf(value):
        return f"{sign}{value}"
    if value == 0:
        return "0"
    if abs(value) < 0.5 * 10**-decimals or abs(value) >= 1e7:
        return f"{sign}{value:.1e}"
    return f"{sign}{value:.{decimals}f}"


def significant(value: float) -> str:
    """Two significant digits, without an exponent where that stays readable."""
    if not math.isfinite(value) or value == 0:
        return number(value)
    decimals = max(0, 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}" if decimals <= 6 else f"{value:.1e}"


def decimals_for(spread: float, least: int = 2, most: int = 6) -> int:
    """Decimals that show a spread (half width, sd) with one digit, two where it starts with 1 or 2."""
    if not spread > 0 or math.isinf(spread):
        return 3
    exponent = math.floor(math.log10(spread))
    leading = spread / 10**exponent
    return min(most, max(least, -exponent + (1 if leading < 2.95 else 0)))


def fixed(value: float, decimals: int, *, signed: bool = False) -> str:
    """Fixed decimals and nothing else, for a number beside its interval; no minus before zeros."""
    text = f"{value:+.{decimals}f}" if signed else f"{value:.{decimals}f}"
    return text if float(text) else f"{0:.{decimals}f}"


def width(text: str) -> int:
    """Columns that a text takes in a terminal."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def escape_latex(text: str) -> str:
    """Text that LaTeX prints as it is; a minus before a digit becomes a minus sign, line breaks become spaces."""
    escaped = "".join(_LATEX.get(c, c) for c in " ".join(text.split()))
    return re.sub(r"(?<![\w.\-])-(?=\d)", "$-$", escaped)


def escape_markdown(text: str) -> str:
    """Text that a Markdown table cell shows as it is; underscores inside words need no escape."""
    flat = " ".join(text.split())
    flat = re.sub(r"([\\`*|<>])", r"\\\1", flat)
    flat = re.sub(r"\](?=[(\[:])", r"\\]", flat)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", flat)


def _pad(text: str, size: int, align: str) -> str:
    space = size - width(text)
    if align == "r":
        return " " * space + text
    if align == "c":
        return " " * (space // 2) + text + " " * (space - space // 2)
    return text + " " * space
