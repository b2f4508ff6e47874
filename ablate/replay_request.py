"""What a replay is asked for: `key=value` words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import losses
from ablate.errors import ConfigError, unknown
from ablate.keys import check_device
from losses.backends.resolve import BACKENDS

KEYS = ("run", "variants", "step", "policy", "device", "micro_batch_size", "tolerance", "backends")


@dataclass(frozen=True)
class Request:
    """What to replay. step None: the last that can be. policy: drawn, final or a step. params: beta, epsilon, ... that
    replace the run's. tolerance: nats, see `replay.TOLERANCE`; None: that of the run's precision. backends: two or more
    loss backends whose gradients are compared instead.
    """

    run: Path
    variants: str = "all"
    step: int | None = None
    policy: str = "drawn"
    device: str = "auto"
    micro_batch_size: int | None = None
    tolerance: float | None = None
    backends: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)


def parse(overrides: Sequence[str]) -> Request:
    """A `Request` from `key=value` words. Raises ConfigError naming the key, with the nearest names for a typo."""
    known_params = {p.name: p for name in losses.names() for p in losses.get(name).all_params}
    values: dict[str, Any] = {}
    params: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not value:
            raise ConfigError(
                f"{text}: write key=value; keys: {', '.join(KEYS)}, beta and the variants' other parameters"
            )
        if key not in KEYS and key not in known_params:
            raise unknown("replay", key, [*KEYS, *known_params], "keys")
        if key in values or key in params:
            raise ConfigError(f"{key}: given twice")
        if key in known_params:
            params[key] = _parameter(known_params[key], value)
        elif key in ("step", "micro_batch_size"):
            values[key] = None if (key, value) == ("step", "last") else _number(key, value, int, 1)
        elif key == "backends":
            values[key] = _backends(value)
        else:
            values[key] = _number(key, value, float, 0.0) if key == "tolerance" else value
    if "run" not in values:
        raise ConfigError("run=FOLDER is needed: an experiment or one of its cells, such as runs/default")
    check_device(values.get("device", Request.device))
    return Request(**{**values, "run": Path(values["run"]).expanduser()}, params=params)


def _number(key: str, text: str, kind: Callable[[str], Any], least: float) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not value >= least:
        what = f"a whole number from {least} up" + (", or last" if key == "step" else "")
        raise ConfigError(f"{key}={text}: must be {what if kind is int else f'a number from {least:g} up'}")
    return value


def _backends(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in BACKENDS:
            raise unknown("backends", name, BACKENDS)
    if len(set(names)) != len(names) or len(names) < 2:
        raise ConfigError(f"backends={text}: give two or more different ones of {', '.join(BACKENDS)}")
    return names


def _parameter(param: losses.Param, text: str) -> Any:
    value: Any = text
    if not param.choices:
        try:
            value = None if text.lower() in ("none", "null") else float(text)
        except ValueError:
            raise ConfigError(f"{param.name}={text}: not a number") from None
    try:
        return param.check(value)
    except ValueError as error:
        raise ConfigError(str(error)) from error
