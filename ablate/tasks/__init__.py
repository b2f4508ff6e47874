"""Tasks: where prompts, rewards and held-out scores come from.

A task is a dataclass in a file of its own: its fields are its options, `@register` puts it into the registry,
and the import list at the end of this file makes it known. Nothing else has to change for a new one.

    task = tasks.get("gsm8k", path="data/gsm8k", form="think").bind(tokenizer)
    trainer = GRPOTrainer(..., reward_funcs=task.reward_functions, train_dataset=task.train_dataset(seed=0))
    task.evaluate(tasks.EvalContext(model, tokenizer, generate, batch_size=64))

This module and the task files import neither torch nor datasets before a task is used, so that checking the
options of a run stays quick.
"""

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompt = str | list[dict[str, str]]
"""A prompt: plain text, or a conversation that the tokenizer's chat template renders."""

Reward = Callable[..., list[float | None]]
"""TRL's reward function: (prompts, completions, completion_ids, **columns) -> one float or None per completion."""

Generate = Callable[[list[Prompt], int], list[list[int]]]
"""Greedy generation: (prompts, max_new_tokens) -> completion token ids, the stop token included where it was drawn."""


@dataclass(frozen=True)
class EvalContext:
    """What an evaluation may use.

    model: the policy; only tasks that score given answers run it directly, without gradients.
    tokenizer: of the model.
    generate: the rollout engine, greedy.
    batch_size: prompts per forward pass or generation call.
    prompts: score the first so many held-out prompts; None = all there are.
    progress: called with (prompts done, prompts in all) after each batch.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    generate: Generate
    batch_size: int = 64
    prompts: int | None = None
    progress: Callable[[int, int], None] | None = None

    def batches(self, rows: Sequence[Any]) -> Iterable[list[Any]]:
        """The first `prompts` of `rows` in batches, with progress reported after each.

        Raises ValueError when `batch_size` or `prompts` is not positive.
        """
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.prompts is not None and self.prompts < 1:
            raise ValueError(f"prompts must be at least 1, or None for all held-out prompts, got {self.prompts}")
        chosen = list(rows[: self.prompts])
        for start in range(0, len(chosen), self.batch_size):
            batch = chosen[start : start + self.batch_size]
            yield batch
            if self.progress is not None:
                self.progress(start + len(batch), len(chosen))


class Task(Protocol):
    """What the runner needs of a task. Options are the constructor's keyword arguments."""

    @property
    def name(self) -> str:
        """Name in the registry, and prefix of the options."""
        ...

    @property
    def primary_metric(self) -> str:
        """Key of `evaluate` that the results table compares."""
        ...

    @property
    def primary_label(self) -> str:
        """The same in words, for table heads and plots."""
        ...

    @property
    def max_completion_length(self) -> int:
        """Tokens a completion may have unless the run says otherwise."""
        ...

    @property
    def plain_text_option(self) -> str:
        """The option that turns conversations off, as key=value."""
        ...

    @property
    def conversational(self) -> bool:
        """Whether prompts are conversations, which need a chat template."""
        ...

    @property
    def reward_functions(self) -> list[Reward]:
        """Reward functions in TRL's form; `__name__` is the logged name. Their sum is the reward.

        None of them raises, whatever the model wrote. Raises ValueError on a task that was not bound.
        """
        ...

    def bind(self, tokenizer: "PreTrainedTokenizerBase") -> Self:
        """The same task for one tokenizer: its end-of-sequence token decides whether a completion ended.

        Raises ValueError where the two do not fit (see `check_model`).
        """
        ...

    def train_dataset(self, seed: int) -> "Dataset":
        """Training prompts (column "prompt") and the columns the rewards read, in an order drawn from `seed`."""
        ...

    def fingerprint(self) -> str:
        """sha256 of everything that decides prompts, answers and held-out set; the same for every seed."""
        ...

    def check_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raises ValueError when this tokenizer cannot express the task."""
        ...

    def evaluate(self, context: EvalContext) -> dict[str, float]:
        """Scores on held-out prompts, keys without prefix."""
        ...


T = TypeVar("T", bound=type)
_REGISTRY: dict[str, type] = {}


def register(cls: T) -> T:
    """Class decorator: makes a task known under its `name`. Raises ValueError on a name already taken."""
    name = cls.name  # type: ignore[attr-defined]
    if name in _REGISTRY:
        raise ValueError(f"task {name!r} is registered twice: by {_REGISTRY[name].__module__} and {cls.__module__}")
    _REGISTRY[name] = cls
    return cls


def names() -> list[str]:
    """Names of all registered tasks, sorted."""
    return sorted(_REGISTRY)


def options(name: str) -> dict[str, Any]:
    """A task's options with their defaults. Raises ValueError on an unknown task."""
    return {field.name: field.default for field in dataclasses.fields(_task_class(name)) if field.init}


def get(name: str, **task_options: Any) -> Task:
    """The task called `name` with these options.

    Raises ValueError on an unknown task or option (nearest names are given) and on values a task refuses.
    """
    cls = _task_class(name)
    known = list(options(name))
    for option in task_options:
        if option not in known:
            raise ValueError(f"task {name!r} has no option {option!r}{nearest(option, known)}")
    return cls(**task_options)


def check_model(task: Task, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Checks that a tokenizer can serve a task.

    Raises ValueError for a conversational task and a tokenizer without chat template, for a tokenizer without
    end-of-sequence token, and for whatever the task itself refuses; each message names the tokenizer and the way out.
    """
    label = tokenizer_label(tokenizer)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer {label} has no eos_token, so no completion can be seen to end; set eos_token in its "
            "tokenizer_config.json"
        )
    if task.conversational and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"task {task.name!r} asks with conversations, but tokenizer {label} has no chat template (a base model?). "
            "Take the instruct version of the model, put a chat_template.jinja beside its tokenizer, or ask in plain "
            f"text ({task.name}.{task.plain_text_option})"
        )
    task.check_tokenizer(tokenizer)


def tokenizer_label(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Name or path of a tokenizer, for messages."""
    return repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name: the nearest known ones, or all of them."""
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(repr(other) for other in close)}?"
    return f"; known: {', '.join(sorted(known)) or 'none'}"


def digest(*parts: Any) -> str:
    """sha256 of JSON-serialisable parts, independent of key order."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def positive(task: str, optional: bool = False, **values: Any) -> None:
    """Raises ValueError unless every value is an integer of at least 1, or None where `optional`."""
    for option, value in values.items():
        if not (optional and value is None) and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{task}.{option} must be an integer of at least 1, got {value!r}")


def choice(task: str, option: str, value: Any, allowed: Sequence[str]) -> None:
    """Raises ValueError with the nearest names unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{task}.{option} must be one of {', '.join(allowed)}, got {value!r}{nearest(value, allowed)}")


def _task_class(name: str) -> type:
    if name not in _REGISTRY:
        raise ValueError(f"unknown task {name!r}{nearest(name, names())}")
    return _REGISTRY[name]


# The import list: a new task is a new file and its name here. At the end, because tasks use what stands above.
from ablate.tasks import arithmetic, gsm8k, sums  # noqa: E402

__all__ = [
    "EvalContext",
    "Generate",
    "Prompt",
    "Reward",
    "Task",
    "arithmetic",
    "check_model",
    "get",
    "gsm8k",
    "names",
    "options",
    "register",
    "sums",
]
