"""What `--help` says of the keys: every key of the schema, and the options of every task."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

from ablate.config import Config

OPTION = re.compile(r"(\w+(?:, \w+)*): (.*)")  # a line of a task's docstring: its options, and what they mean


def key_lines() -> list[tuple[str, str, str]]:
    """(key, default, meaning) of every key, in the order of the schema."""
    rows: list[tuple[str, str, str]] = []

    def visit(node: Any, prefix: str) -> None:
        for entry in fields(node):
            value = getattr(node, entry.name)
            if hasattr(value, "__dataclass_fields__"):
                visit(value, f"{prefix}{entry.name}.")
            elif isinstance(value, dict) and entry.name not in ("grid", "points"):
                rows.append((f"{prefix}{entry.name}.*", "", entry.metadata["help"]))
            else:
                rows.append((prefix + entry.name, shown(value), entry.metadata["help"]))

    visit(Config(), "")
    return rows


def task_lines() -> list[tuple[str, str, str]]:
    """(TASK.option, default, meaning) of every option of every task; the meaning is what the docstring has for it."""
    from ablate import tasks

    rows = []
    for name in tasks.names():
        meanings: dict[str, str] = {}
        for kind in type(tasks.get(name)).__mro__:
            for line in inspect.cleandoc(kind.__dict__.get("__doc__") or "").splitlines():
                if found := OPTION.fullmatch(line):
                    meanings = dict.fromkeys(found[1].split(", "), found[2]) | meanings
        rows += [(f"{name}.{key}", shown(value), meanings.get(key, "")) for key, value in tasks.options(name).items()]
    return rows


def shown(value: Any) -> str:
    """A default as it would be typed."""
    if value is None:
        return "null"
    if isinstance(value, list | dict):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
