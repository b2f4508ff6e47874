"""One look for all figures: which colour, line and marker a variant has, and matplotlib settings.

Reference is red, no_detach blue, full_reverse_kl yellow, forward_kl green. The tones are chosen so that their CIE
lightness differs by 14 or more (they stay apart in a grey print) and that they stay apart for protan, deutan and tritan
readers; line style and marker differ as well, so nothing rests on colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Style:
    """color: #RRGGBB; line and marker: as matplotlib takes them."""

    color: str
    line: Any
    marker: str


FOUNDING = {
    "reference": Style("#C1272D", "-", "o"),
    "no_detach": Style("#12408C", (0, (5, 1.5)), "s"),
    "full_reverse_kl": Style("#E3AA00", (0, (6, 1.5, 1.2, 1.5)), "^"),
    "forward_kl": Style("#2E9E6B", (0, (1.5, 1.2)), "D"),
}
_COLORS = ("#8E5BB5", "#5CB8E6", "#111111", "#E58FB8", "#777777", "#8A5A2B")
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_MARKERS = ("v", "P", "X", "<", "h", ">", "p", "*", "d")

# schema.PARTS: rollouts and weights on their way to the engine in blue, log-probs in violet, loss and optimizer.
# `logps` is what runs hold that did not time old and reference log-probs apart.
PARTS = {
    "rollout": "#3B6FA0",
    "sync": "#8FBAD9",
    "reward": "#111111",
    "old_logps": "#B9A3CC",
    "reference": "#7E62A3",
    "logps": "#9C82B8",
    "loss": "#C98A2B",
    "exact_kl": "#5B8F6B",
    "optimizer": "#EBCB93",
}
OTHER = "#8C8C8C"

RC: dict[str, Any] = {
    "text.parse_math": False,  # names are text, whatever signs they hold
    "font.family": "DejaVu Sans",  # comes with matplotlib, so a figure looks the same on every machine
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 3.4,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "grpo-ablation",  # the same ids, hence the same bytes, every time
}


def styles(variants: Sequence[str]) -> dict[str, Style]:
    """A style per variant: the founding four always have theirs; the others differ in colour, line or marker."""
    others = [name for name in variants if name not in FOUNDING]
    found = {name: FOUNDING[name] for name in variants if name in FOUNDING}
    for i, name in enumerate(others):
        line = _LINES[(i + i // len(_COLORS)) % len(_LINES)]
        found[name] = Style(_COLORS[i % len(_COLORS)], line, _MARKERS[i % len(_MARKERS)])
    return found
