"""GSM8K: grade-school word problems (Cobbe et al., 2021, arXiv:2110.14168), scored by the final number.

Rows are {"question": ..., "answer": "worked solution ... #### N"}, read from JSON lines (`path`) or, without a path,
from the hub's openai/gsm8k. Held-out is the test file. The forms of a solution: see `ablate.tasks.solution`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from ablate.tasks import Prompt, positive, register
from ablate.tasks.solution import MARK, Problem, SolutionTask
from ablate.tasks.text import the_number

SYSTEM_PROMPTS = {
    "plain": (
        "Solve the problem step by step. End with a line that holds #### and the final number, like this:\n#### 42"
    ),
    "think": (
        "Think first, then answer. Respond in exactly this form, with nothing before or after it:\n"
        "<reasoning>\nyour steps\n</reasoning>\n<answer>\nthe final number\n</answer>"
    ),
}


@register
@dataclass(frozen=True)
class GSM8K(SolutionTask):
    """Options, beside those of `SolutionTask`.

    path: folder with train.jsonl and test.jsonl; None = openai/gsm8k from the hub.
    train_size, eval_size: the first so many problems of each file (after `max_steps`); None = all.
    max_steps: only training problems whose worked solution has at most so many lines; None = all.
    """

    name: ClassVar[str] = "gsm8k"

    path: str | None = None
    train_size: int | None = None
    eval_size: int | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(
            self.name, optional=True, train_size=self.train_size, eval_size=self.eval_size, max_steps=self.max_steps
        )

    def prompt(self, problem: Problem) -> Prompt:
        """The prompt for one problem."""
        system = SYSTEM_PROMPTS[self.form]
        if self.conversational:
            return [{"role": "system", "content": system}, {"role": "user", "content": problem.question}]
        return f"{system}\n\nProblem: {problem.question}\n\nSolution:\n"

    def problems(self) -> tuple[list[Problem], list[Problem]]:
        """(training, held-out) problems; raises ValueError where the files cannot be read or leave none."""
        train, held_out = _load(self.path)
        if self.max_steps is not None:
            train = [problem for problem in train if problem.steps <= self.max_steps]
            if not train:
                raise ValueError(f"gsm8k.max_steps={self.max_steps} leaves no training problem; raise it")
        return train[: self.train_size], held_out[: self.eval_size]


def read_jsonl(path: Path) -> list[Problem]:
    """Problems of one JSON-lines file.

    Raises ValueError naming file and line for a line that is no JSON (a file cut off in its last line, say), no object,
    lacks "question" or "answer", or has no "#### N". Empty lines are skipped.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(
            f"gsm8k.path: cannot read {path} ({error.strerror}); the folder must hold train.jsonl and test.jsonl"
        ) from error
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            cut = " (the last line: is the file cut off?)" if number == len(lines) else ""
            raise ValueError(f"{where}: not a JSON object{cut}: {error}; repair or remove the line") from error
        problems.append(_problem(row, where))
    if not problems:
        raise ValueError(f"{path} holds no problems; each line must be {{'question': ..., 'answer': '... #### N'}}")
    return problems


def _problem(row: Any, where: str) -> Problem:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise ValueError(f"{where}: {key!r} is missing or not a text; each row needs 'question' and 'answer'")
        if row[key] != row[key].encode(errors="replace").decode():
            raise ValueError(f"{where}: {key!r} holds half a character (a lone surrogate); repair or remove the line")
    solution, mark, final = row["answer"].rpartition(MARK)
    if not mark or the_number(final) is None:
        raise ValueError(f"{where}: 'answer' does not end with '#### N', N a number")
    steps = sum(bool(line.strip()) for line in solution.split("\n"))
    return Problem(row["question"], final.strip(), steps)


@lru_cache(maxsize=8)
def _load_files(train_path: Path, test_path: Path, _stamp: tuple[int, ...]) -> tuple[list[Problem], list[Problem]]:
    return read_jsonl(train_path), read_jsonl(test_path)


def _load(path: str | None) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out) problems; raises ValueError where a question stands in both."""
    if path is None:
        train, held_out = _from_hub()
    else:
        files = [Path(path).expanduser() / name for name in ("train.jsonl", "test.jsonl")]
        for file in files:
            if not file.is_file():
                raise ValueError(f"gsm8k.path={path}: no file {file}; the folder must hold train.jsonl and test.jsonl")
        # Reading again is needed only when a file has changed.
        stamp = tuple(value for file in files for value in (file.stat().st_mtime_ns, file.stat().st_size))
        train, held_out = _load_files(files[0], files[1], stamp)
    both = {problem.question for problem in train} & {problem.question for problem in held_out}
    if both:
        raise ValueError(
            f"gsm8k: {len(both)} questions stand in both train and test, the first: {sorted(both)[0][:80]!r}; "
            "remove them from train, or the held-out score means nothing"
        )
    return train, held_out


def _from_hub() -> tuple[list[Problem], list[Problem]]:
    from datasets import load_dataset

    try:
        data = load_dataset("openai/gsm8k", "main")
    except Exception as error:  # whatever the network or the hub raises, the way out is the same
        raise ValueError(
            f"gsm8k: cannot load openai/gsm8k from the hub ({type(error).__name__}: {error}); without a network, give "
            "a folder with train.jsonl and test.jsonl as gsm8k.path=FOLDER"
        ) from error
    return _rows(data["train"], "train"), _rows(data["test"], "test")


def _rows(rows: Sequence[Any], split: str) -> list[Problem]:
    return [_problem(row, f"openai/gsm8k {split}, row {index}") for index, row in enumerate(rows)]
