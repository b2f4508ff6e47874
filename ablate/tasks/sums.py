"""Chain sums, generated: 'What is 7 + 5 - 3?', worked out one step at a time; a first task for a small instruct model.

Every prompt shows how a solution looks, by worked examples as earlier turns. A sum is held out together with all sums
of the same signed numbers in another order, so that 5 + 3 does not give away 3 + 5. Everything is drawn from a fixed
seed: problems are the same on every machine, only the order of the training prompts depends on the run's seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from ablate.tasks import Prompt, positive, register
from ablate.tasks.solution import Problem, SolutionTask

SYSTEM_PROMPTS = {
    "plain": (
        "Think first, then answer. Respond in exactly this form, the number in a line of its own:\n"
        "your steps\n#### the number"
    ),
    "think": (
        "Think first, then answer. Respond in exactly this form:\n"
        "<reasoning>your steps</reasoning><answer>the number</answer>"
    ),
}
EXAMPLES = ((3, 4, -2), (8, 6), (5, 7, 2, -4))
MOST = 1_000_000  # problems: they are all made in memory
HELD_OUT = 0.25  # of the sums of one length, at most


@register
@dataclass(frozen=True)
class Sums(SolutionTask):
    """Options, beside those of `SolutionTask`.

    terms: the most numbers in a sum; lengths from 2 to this are equally frequent.
    largest: the largest number in a sum.
    examples: worked examples in front of every question, 0 to 3.
    train_size: training prompts; short sums come again where there are not enough different ones.
    eval_size: held-out sums, all different; fewer where there are not enough.
    """

    name: ClassVar[str] = "sums"

    form: str = "think"
    max_completion_length: int = 64
    terms: int = 3
    largest: int = 9
    examples: int = 2
    train_size: int = 2000
    eval_size: int = 300

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(
            self.name, terms=self.terms, largest=self.largest, train_size=self.train_size, eval_size=self.eval_size
        )
        if not 2 <= self.terms <= 20:
            raise ValueError(f"sums.terms must be between 2 and 20, got {self.terms}")
        if self.largest < 2:
            raise ValueError(f"sums.largest must be at least 2, got {self.largest}")
        for name in ("train_size", "eval_size"):
            if getattr(self, name) > MOST:
                raise ValueError(f"sums.{name} must be at most {MOST}, got {getattr(self, name)}")
        if isinstance(self.examples, bool) or self.examples not in range(len(EXAMPLES) + 1):
            raise ValueError(f"sums.examples must be between 0 and {len(EXAMPLES)}, got {self.examples!r}")

    def prompt(self, problem: Problem) -> Prompt:
        """The prompt for one problem: worked examples, then the sum."""
        shown = [(question(sum_), solution(sum_, self.form)) for sum_ in EXAMPLES[: self.examples]]
        if not self.conversational:
            worked = "".join(f"Problem: {asked}\nSolution: {answer}\n\n" for asked, answer in shown)
            return f"{SYSTEM_PROMPTS[self.form]}\n\n{worked}Problem: {problem.question}\nSolution: "
        turns = [{"role": "system", "content": SYSTEM_PROMPTS[self.form]}]
        for asked, answer in shown:
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return [*turns, {"role": "user", "content": problem.question}]

    def problems(self) -> tuple[list[Problem], list[Problem]]:
        """(training, held-out) problems, lengths taking turns."""
        train, held_out = _problems(self.terms, self.largest, self.train_size, self.eval_size)
        return list(train), list(held_out)


def question(terms: tuple[int, ...]) -> str:
    """(3, 4, -2) as 'What is 3 + 4 - 2?'."""
    return f"What is {_text(terms)}?"


def _text(terms: tuple[int, ...]) -> str:
    return str(terms[0]) + "".join(f" {'-' if term < 0 else '+'} {abs(term)}" for term in terms[1:])


def solution(terms: tuple[int, ...], form: str) -> str:
    """The worked solution in one of `solution.FORMS`."""
    steps, total = [], terms[0]
    for term in terms[1:]:
        steps.append(f"{_text((total, term))} = {total + term}")
        total += term
    if form == "plain":
        return "\n".join([*steps, f"#### {total}"])
    return f"<reasoning>{', '.join(steps)}</reasoning><answer>{total}</answer>"


@lru_cache(maxsize=8)
def _problems(terms: int, largest: int, train_size: int, eval_size: int) -> tuple[tuple[Problem, ...], ...]:
    lengths = range(2, terms + 1)
    shares = [-(-size // len(lengths)) for size in (train_size, eval_size)]
    drawn = [_drawn(length, largest, *shares) for length in lengths]
    train, held_out = [part for part, _ in drawn], [part for _, part in drawn]
    longest = max(map(len, held_out))
    return (
        tuple(part[index % len(part)] for index in range(shares[0]) for part in train)[:train_size],
        tuple(part[index] for index in range(longest) for part in held_out if index < len(part))[:eval_size],
    )


def _drawn(length: int, largest: int, train_size: int, eval_size: int) -> tuple[list[Problem], list[Problem]]:
    """Different sums of one length, (training, held-out), the order of the numbers never telling the two apart."""
    generator = random.Random(f"sums {length} {largest}")
    sums: dict[tuple[int, ...], None] = {}
    for _ in range(20 * (train_size + eval_size)):
        sums.setdefault(_sum(generator, length, largest))
    train: list[Problem] = []
    held_out: list[Problem] = []
    chosen = {tuple(sorted(example)): False for example in EXAMPLES}  # key -> whether it is held out
    most = min(eval_size, int(HELD_OUT * len(sums)))
    for drawn in sums:
        key = tuple(sorted(drawn))
        if key not in chosen:
            chosen[key] = len(held_out) < most
        (held_out if chosen[key] else train).append(Problem(question(drawn), str(sum(drawn)), length - 1))
    return train, held_out


def _sum(generator: random.Random, length: int, largest: int) -> tuple[int, ...]:
    """Numbers from 1 to `largest`, signs drawn so that no step falls below 0."""
    terms = [generator.randint(1, largest)]
    while len(terms) < length:
        term = generator.randint(1, largest)
        minus = term <= sum(terms) and generator.random() < 0.5
        terms.append(-term if minus else term)
    return tuple(terms)
