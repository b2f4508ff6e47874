"""Errors that a user can act on, and the nearest names for a typo."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = ["ConfigError", "RunFileError", "nearest", "unknown"]


class ConfigError(ValueError):
    """A key, a value or a name that cannot be run; the message names it and the way out."""


class RunFileError(ValueError):
    """A run file that is truncated, edited by hand or of another config; the message names the file and the way out."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first: those it is a part of, then similar spellings, in any case."""
    lower = name.lower()
    by_lower = {candidate.lower(): candidate for candidate in known}
    holding = [known for known in by_lower if len(lower) > 2 and lower in re.split(r"[._]", known)]
    similar = difflib.get_close_matches(lower, by_lower, n=count, cutoff=0.55)
    return [by_lower[match] for match in dict.fromkeys([*sorted(holding, key=len), *similar])][:count]


def unknown(key: str, name: str, known: Iterable[str], kind: str = "") -> ConfigError:
    """The error for a name that is none of `known`: the nearest ones, or all where none is near and they are few."""
    known = list(known)
    close = nearest(name, known)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    elif 0 < len(known) <= 30:
        hint = f"{kind or 'known'}: {', '.join(known)}"
    else:
        hint = f"none of the {len(known)} known names is near it"
    return ConfigError(f"{key}: unknown name '{name}'; {hint}")
