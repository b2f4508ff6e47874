"""Named points: one more axis of cells, each of whose values is a name that stands for several keys at once.

A preset defines them, `points: {bf16: {train.dtype: bfloat16}, fp16: {train.dtype: float16}}`; the command line selects
among them (`points=bf16,fp16`, `points=none`). Keys are written as anywhere else, and a point wins over what the preset
sets outside of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ablate import keys
from ablate.errors import ConfigError, unknown
from ablate.schema import is_execution

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")  # it becomes part of a folder's name

Points = dict[str, dict[str, keys.Setting]]  # name -> schema key -> setting


def read(schema: keys.Schema, preset: keys.Setting | None, given: keys.Setting | None) -> Points:
    """The points that a preset defines, or those of them that the command line selects, in its order.

    Raises ConfigError for what is no mapping of names to keys, for unknown keys and for a selected name that is not
    defined, with the nearest names.
    """
    tree = preset.value if preset is not None and preset.value is not None else {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"points: a preset defines them, NAME: {{KEY: VALUE, ...}}; found {tree!r}")
    defined = {str(name): _point(schema, str(name), body) for name, body in tree.items()}
    if given is None:
        return defined
    chosen = [str(name) for name in keys.unwrapped(keys.split_list(given.value)) if name not in (None, "none")]
    for name in chosen:
        if not defined:
            raise ConfigError(f"points={name}: the preset defines none")
        if name not in defined:
            raise unknown("points", name, defined, "the preset defines")
        if chosen.count(name) > 1:
            raise ConfigError(f"points: {name} is there twice")
    return {name: defined[name] for name in chosen}


def _point(schema: keys.Schema, name: str, body: Any) -> dict[str, keys.Setting]:
    where = f"points.{name}"
    if not NAME.fullmatch(name) or name == "none":
        raise ConfigError(f"{where}: a name is made of letters, digits and . _ + - and is not 'none'")
    if body is not None and not isinstance(body, Mapping):
        raise ConfigError(f"{where}: write the keys that it sets, {{KEY: VALUE, ...}}; found {body!r}")
    try:
        found = keys.collect(schema, schema.flatten(body or {}), source=where)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    for key, setting in found.items():
        if is_execution(key):
            raise ConfigError(f"{where}: {setting.written} cannot be set by a point{keys.axis_hint(key)}")
    return found


def refuse_twice(points: Points, values: Mapping[str, Any], given: Mapping[str, keys.Setting]) -> None:
    """Refuse a key that a point sets and that the grid or the command line sets as well."""
    for name, settings in points.items():
        for key, setting in settings.items():
            if "grid." + key in values:
                raise ConfigError(f"{key} is set twice, by points.{name} and by grid.{key}: keep one")
            if key in given:
                raise ConfigError(
                    f"{given[key].written} is set, but points.{name} sets {setting.written} too: leave it out, or "
                    "select other points (points=a,b), or none (points=none)"
                )
