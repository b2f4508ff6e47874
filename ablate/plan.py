"""From a config to cells: variants x seeds x named points x grid, each with its own resolved config, name and hash."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from dataclasses import dataclass, field
from typing import Any

from ablate import config as configs
from ablate import keys, schema
from ablate.config import Config
from ablate.errors import ConfigError

Scalar = float | int | str | bool | None
NAME_LIMIT = 120  # file systems allow 255 bytes; temporary names are longer than the cell's own


@dataclass(frozen=True)
class Cell:
    """One training run.

    name: also the name of its folder, like `reference-seed0-beta0.04`.
    point: name of its named point (`point`), then the value of every grid axis by its short name (`beta`), in order.
    config: the experiment's config with the point's values set; its `variants` and `seeds` are those of this cell
        alone, its `grid` and `points` are empty.
    axes: all values of every axis, by its short name, in the order in which they were given.
    """

    name: str
    variant: str
    seed: int
    point: dict[str, Scalar]
    config: Config
    axes: dict[str, list[Scalar]] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """SHA-256 of all that decides this cell's numbers."""
        return configs.config_hash(self.config, self.variant, self.seed)


def select_variants(config: Config) -> list[str]:
    """Names of `variants=`: 'all' is the preset's set, 'family' everything registered; order kept, each once."""
    chosen: list[str] = []
    for name in config.variants:
        if name == "all":
            chosen += config.variants_all
        elif name == "family":
            import losses

            chosen += losses.names()
        else:
            if name in chosen and not {"all", "family"} & set(config.variants):
                raise ConfigError(f"variants: {name} is there twice")
            chosen.append(name)
    return list(dict.fromkeys(chosen))


def cells(config: Config) -> list[Cell]:
    """All cells of an experiment: seed by seed, so that a sweep cut short leaves whole comparisons.

    Raises ConfigError where two cells would have the same name.
    """
    tree = keys.Schema(Config)
    axes = list(config.grid)
    shorts = [tree.short(key) for key in axes]
    bare = dataclasses.replace(config, seeds=config.seeds[:1])  # copied for every cell
    at_points = configs.at_points(bare)
    named = [name for name in at_points if name]
    orders: dict[str, list[Scalar]] = {schema.POINT_AXIS: [*named]} if named else {}
    orders |= {short: list(config.grid[key]) for short, key in zip(shorts, axes, strict=True)}
    takes = {name: _own_parameters(shared) for name, shared in at_points.items()}
    planned: list[Cell] = []
    for seed, name, values in itertools.product(
        config.seeds, at_points, itertools.product(*(config.grid[key] for key in axes))
    ):
        shared = configs.set_values(at_points[name], dict(zip(axes, values, strict=True)))
        configs.validate(shared)
        short = {schema.POINT_AXIS: name} if name else {}
        short |= dict(zip(shorts, values, strict=True))
        for variant in select_variants(config):
            own = configs.set_values(shared, {"variants": [variant], "seeds": [seed], "grid": {}})
            own.loss.params = {k: v for k, v in own.loss.params.items() if variant in takes[name].get(k, (variant,))}
            planned.append(Cell(cell_name(variant, seed, short), variant, seed, short, own, orders))
    names = [cell.name.casefold() for cell in planned]  # as file systems compare them that know no case
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"grid: two cells would be called {twice[0]}; give the axis values that differ in letters or digits"
        )
    return planned


def _own_parameters(config: Config) -> dict[str, list[str]]:
    """Which variants take each of loss.params; the others run without it."""
    names = [
        *config.loss.params,
        *(key.removeprefix("loss.params.") for key in config.grid if key.startswith("loss.params.")),
    ]
    if not names:
        return {}
    import losses

    chosen = [losses.get(name) for name in select_variants(config)]
    return {name: [v.name for v in chosen if name in {p.name for p in v.all_params}] for name in names}


def cell_name(variant: str, seed: int, point: dict[str, Any]) -> str:
    """`<variant>-seed<seed>-<axis><value>...`, safe as a folder name on any file system."""
    parts = [variant, f"seed{seed}", *(f"{axis}{_value_text(value)}" for axis, value in point.items())]
    name = "-".join(re.sub(r"[^A-Za-z0-9._+]+", "_", part) for part in parts)
    if len(name) <= NAME_LIMIT:
        return name
    return f"{name[: NAME_LIMIT - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _value_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
