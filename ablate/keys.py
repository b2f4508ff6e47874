"""From what a user writes to keys of the schema: nested keys, bare names, other names for one thing, lists, merging.

Every source (a preset, the command line) is first brought to schema keys on its own. Within one source a thing is set
once: by two different names it is refused, since nobody could say which of them was meant. The command line then wins
over the preset.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from ablate import aliases
from ablate.errors import ConfigError, nearest, unknown
from ablate.schema import is_execution

OPEN_GROUPS = ("trl", "peft", "sampling", "vllm", "wandb", "task_options", "loss.params")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # so called in GRPOConfig and every engine
MOST_CELLS = 1_000  # of one variant: more is a slip of the pen, and planning them would take minutes
AXES = ("grid", "points")  # these hold keys of the schema themselves


def check_device(name: str) -> None:
    """Raise ConfigError for a `device=` that is none, whether or not this machine has it."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise unknown("device", name, ("auto", "cpu", "cuda", "cuda:0"))


@dataclasses.dataclass
class Setting:
    """One value as a source gives it: the name that was written, and the value."""

    written: str
    value: Any


class Schema:
    """The keys of a dataclass tree: `leaves` maps each key to its type."""

    def __init__(self, root: type) -> None:
        self.leaves: dict[str, Any] = {}
        self.groups: set[str] = set()
        self._visit(root, "")

    def _visit(self, node: type, prefix: str) -> None:
        hints = typing.get_type_hints(node)
        for entry in dataclasses.fields(node):
            key, kind = prefix + entry.name, hints[entry.name]
            if dataclasses.is_dataclass(kind):
                self.groups.add(key)
                self._visit(typing.cast(type, kind), key + ".")
            elif key not in OPEN_GROUPS and key not in AXES:
                self.leaves[key] = kind

    def flatten(self, tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        """(key, value) pairs of a preset; below an open group only the first level is a name, the rest is its value."""
        for name, value in tree.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and not in_open_group(key) and key != "points" and value:
                yield from self.flatten(value, key + ".")
            else:
                yield key, value

    def bare(self, name: str) -> list[str]:
        """The schema keys whose last part is `name`."""
        return [key for key in self.leaves if key.rpartition(".")[2] == name]

    def short(self, key: str) -> str:
        """The shortest name that stands for `key` alone: how a grid axis is called in cells and tables."""
        own = key.removeprefix("loss.params.")
        if own != key:
            return own if not self.bare(own) else key
        leaf = key.rpartition(".")[2]
        return leaf if self.bare(leaf) == [key] else key

    def resolve(self, written: str) -> str:
        """The schema key that a written name stands for. Raises ConfigError with the nearest names."""
        if written.startswith("grid."):
            key = self.resolve(written.removeprefix("grid."))
            if is_execution(key):
                raise ConfigError(f"{written}: {key} cannot be an axis of the grid{axis_hint(key)}")
            return "grid." + key
        if written in self.leaves or written in AXES:
            return written
        if written.startswith("points."):
            raise ConfigError(f"{written}: points are defined in a preset, points: {{NAME: {{KEY: VALUE}}}}")
        for group in OPEN_GROUPS:
            if written.startswith(group + "."):
                return aliases.canonical(written)
        if written in self.groups or written in OPEN_GROUPS:
            raise ConfigError(
                f"{written} is a group of keys: set one of them, {written}.NAME=value{self._members(written)}"
            )
        matches = self.bare(written)
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise ConfigError(f"{written} may be {' or '.join(matches)}: write which")
        return self._registered(written)

    def _registered(self, written: str) -> str:
        """Names that registries know: a task's options, a variant's own parameters. They are imported only here."""
        head, _, rest = written.partition(".")
        if rest:
            from ablate import tasks

            if head in tasks.names():
                return f"task_options.{rest}"
        own = written.removeprefix("loss.")
        known = [*self.leaves, *OPEN_GROUPS, *AXES]
        if "." not in written:
            known += [key.rpartition(".")[2] for key in self.leaves]
        if "." not in own:
            own_params = _own_params()
            if own in own_params:
                return f"loss.params.{own}"
            known += own_params
            known += [f"sampling.{name}" for name in SAMPLING]
        close = nearest(written, known) or nearest(written.rpartition(".")[2], known)
        if not close and head in self.groups:
            raise ConfigError(f"unknown key '{written}'{self._members(head)}")
        hint = f"; did you mean {' or '.join(close)}?" if close else "; `python -m ablate run --help` lists the keys"
        raise ConfigError(f"unknown key '{written}'{hint}")

    def _members(self, group: str) -> str:
        members = [key for key in self.leaves if key.startswith(group + ".")]
        return f" ({', '.join(members)})" if members else ""


def _own_params() -> list[str]:
    import losses

    return sorted({param.name for name in losses.names() for param in losses.get(name).params})


def axis_hint(key: str) -> str:
    """Why a key that says how cells run is no axis, as the end of a message."""
    return {
        "seeds": ": seeds are an axis already (seeds=0,1,7)",
        "variants": ": variants are an axis already (variants=a,b)",
        "grid": ": it is an axis already",
        "points": ": points are an axis already (points=a,b)",
    }.get(key.split(".")[0], ": it does not change what a cell computes")


def in_open_group(key: str) -> bool:
    """Whether a key lies in a group whose names another library fixes."""
    return any(key.startswith(group + ".") for group in OPEN_GROUPS)


def help_of(key: str, root: type) -> str:
    """What a key means, from its dataclass field."""
    node: Any = root
    for part in key.split("."):
        entry = {f.name: f for f in dataclasses.fields(node)}.get(part)
        if entry is None:
            break
        kind = typing.get_type_hints(node)[part]
        if not dataclasses.is_dataclass(kind):
            return str(entry.metadata.get("help", part))
        node = kind
    return "a key of the configuration"


# values


def split_override(text: str) -> tuple[str, str]:
    """('train.steps', '80') of 'train.steps=80'. Raises ConfigError where there is no '='."""
    if "\0" in text or text != text.encode(errors="replace").decode():
        raise ConfigError(f"{ascii(text)}: not valid UTF-8 text")
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(
            f"'{text}' is no override: write key=value, e.g. train.steps=80 (`python -m ablate run --help`)"
        )
    return key, value.strip()


def parse(text: str) -> Any:
    """The value that YAML reads in a text; words that YAML cannot read stay text."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[index,call-overload]
    except Exception:  # the YAML library's errors are not part of OmegaConf's interface
        return text


def split_list(value: Any) -> list[Any]:
    """A list of what is written as a list, as 'a,b' (commas within brackets or quotes do not count), or alone."""
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, str):
        return [value]
    parts, depth, quote = [""], 0, ""
    for character in value:
        if character in "'\"" and quote in ("", character):
            quote = "" if quote else character
        elif not quote:
            depth += (character in "[{(") - (character in "]})")
        if character == "," and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [parse(part.strip()) for part in parts if part.strip()]


def unwrapped(values: list[Any]) -> list[Any]:
    """The values of a list that was written in brackets: [a,b] beside a,b."""
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def seeds(value: Any) -> list[int]:
    """Seeds of a count (3), a list (0,1,7) or one seed (7,). Raises ConfigError."""
    if isinstance(value, str) and "," not in value:
        value = parse(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise ConfigError(
                f"seeds={value}: a count is at least 1; one seed of that number is written seeds={value},"
            )
        if value > MOST_CELLS:
            raise ConfigError(f"seeds={value}: at most {MOST_CELLS} seeds; one seed of that number is written {value},")
        return list(range(value))
    listed = unwrapped(split_list(value)) if isinstance(value, str | list | tuple) else [value]
    if not listed or any(isinstance(seed, bool) or not isinstance(seed, int) for seed in listed):
        raise ConfigError(f"seeds={value}: a count (3) or a list of whole numbers (0,1,7)")
    return listed


# sources


def collect(schema: Schema, pairs: Iterable[tuple[str, Any]], source: str, texts: bool = False) -> dict[str, Setting]:
    """The settings of one source by schema key.

    Args:
        pairs: (written name, value); with `texts` the values are those of a command line, still to be read.
        source: for messages.

    Raises ConfigError for unknown names, and where one thing is set by two names.
    """
    found: dict[str, Setting] = {}
    for written, raw in pairs:
        key = schema.resolve(written)
        value = _typed(schema, key, raw, texts)
        for other, setting in found.items():
            same = key.removeprefix("grid.") == other.removeprefix("grid.")
            if same and setting.written != written:
                raise ConfigError(
                    f"{source} sets {key.removeprefix('grid.')} twice, as {setting.written} and as {written}: keep one"
                )
        found[key] = Setting(written, value)
    return found


def _typed(schema: Schema, key: str, raw: Any, is_text: bool) -> Any:
    if key == "seeds":
        return seeds(raw)
    if key in ("variants", "variants_all"):
        return [str(name) for name in unwrapped(split_list(raw))]
    if key.startswith("grid."):
        return unwrapped(split_list(raw))
    if key == "grid":
        if raw not in ("", "none", "null", "{}", None) and raw != {}:
            raise ConfigError(
                f"grid={raw}: write an axis as grid.KEY=a,b (grid.beta=0.04,1.0), or grid=none for no axes"
            )
        return None
    kind = schema.leaves.get(key)
    if not is_text or kind is str:
        return raw
    value = parse(raw)
    if value is None and kind is not None and type(None) not in typing.get_args(kind):
        raise ConfigError(f"{key}: no value given")
    return value


def merge(preset: Mapping[str, Setting], given: Mapping[str, Setting]) -> dict[str, Any]:
    """Values by schema key, `given` over `preset`; a value given for a key also replaces the preset's axis over it."""
    values = {key: setting.value for key, setting in preset.items()}
    if "grid" in given:
        values = {key: value for key, value in values.items() if not key.startswith("grid.")}
    for key, setting in given.items():
        values.pop("grid." + key, None)
        values[key] = setting.value
    values.pop("grid", None)
    return values


def check_task_options(values: Mapping[str, Any], *sources: Any) -> None:
    """Refuse TASK.option= for a task that is not the one in use. The last of `sources` is the default task."""
    *settings, default = sources
    task = values.get("task", default)
    axis = values.get("grid.task", [task])
    for source in settings:
        for key, setting in source.items():
            head = setting.written.removeprefix("grid.").partition(".")[0]
            if key.removeprefix("grid.").startswith("task_options.") and head not in ("task_options", *axis):
                raise ConfigError(f"{setting.written} is set but the task is {task}: say task={head}, or leave it out")


def select(tree: Mapping[str, Any], key: str) -> Any:
    """The value at a nested key of a plain dict; None where there is none."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node
