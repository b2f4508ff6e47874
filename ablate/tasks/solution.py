"""What tasks with worked solutions share: the form of a solution, prompts, rewards and greedy evaluation.

Two forms:

- "plain": the solution ends with "#### N".
- "think": <reasoning>...</reasoning> then <answer>N</answer>.

Model output is only ever searched with regular expressions; numbers are compared as exact decimals.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from ablate.tasks import EvalContext, Prompt, Reward, check_model, choice, digest, positive
from ablate.tasks.text import completion_text, ended, numbers, the_number

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

FORMS = ("plain", "think")
TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
STRICT = {
    "plain": re.compile(r"\s*\S.*\n####[ \t]*[^\n#]*[0-9][^\n#]*\s*", re.DOTALL),
    "think": re.compile(r"\s*<reasoning>.*?</reasoning>\s*<answer>.*?</answer>\s*", re.DOTALL),
}
MARK = "####"

CORRECT_REWARD = 2.0
STRICT_REWARD = 0.5
SOFT_REWARD = 0.5
PENALTY_PER_CHARACTER = 0.001
LARGEST_PENALTY = 0.5


class Problem(NamedTuple):
    """The question, the final number as text, and the number of steps of the worked solution."""

    question: str
    answer: str
    steps: int


@dataclass(frozen=True)
class SolutionTask:
    """A task whose problems have a worked solution and a final number; a subclass gives the problems and the prompts.

    form: "plain" or "think".
    conversational: ask by chat template; False: the same in plain text, for base models.
    max_completion_length: tokens.
    """

    name: ClassVar[str]
    primary_metric: ClassVar[str] = "accuracy"
    primary_label: ClassVar[str] = "held-out accuracy (greedy)"
    plain_text_option: ClassVar[str] = "conversational=false"

    form: str = "plain"
    conversational: bool = True
    max_completion_length: int = 256
    tokenizer: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        choice(self.name, "form", self.form, FORMS)
        if not isinstance(self.conversational, bool):
            raise ValueError(f"{self.name}.conversational must be true or false, got {self.conversational!r}")
        positive(self.name, max_completion_length=self.max_completion_length)

    def problems(self) -> tuple[Sequence[Problem], Sequence[Problem]]:
        """(training, held-out) problems. Raises ValueError where there are none."""
        raise NotImplementedError

    def prompt(self, problem: Problem) -> Prompt:
        """The prompt for one problem."""
        raise NotImplementedError

    def train_dataset(self, seed: int) -> "Dataset":
        """Rows with columns "prompt" and "answer" (the final number as text), in an order drawn from `seed`."""
        import numpy as np
        from datasets import Dataset

        train, _ = self.problems()
        rows = [train[index] for index in np.random.default_rng(seed).permutation(len(train))]
        return Dataset.from_dict({"prompt": [self.prompt(row) for row in rows], "answer": [row.answer for row in rows]})

    def fingerprint(self) -> str:
        """sha256 over prompts and answers of both parts."""
        parts = [[[self.prompt(row), row.answer] for row in part] for part in self.problems()]
        return digest(self.name, self.form, parts)

    def bind(self, tokenizer: "PreTrainedTokenizerBase") -> Self:
        """The task for one tokenizer; raises ValueError where the two do not fit."""
        check_model(self, tokenizer)
        bound = dataclasses.replace(self)
        object.__setattr__(bound, "tokenizer", tokenizer)
        return bound

    def check_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Any tokenizer will do."""

    @property
    def reward_functions(self) -> list[Reward]:
        """`correctness` (0 or 2), `strict_format` (0 or 0.5), `soft_format` (0 to 0.5), `surplus_penalty` (0 to -0.5).

        `correctness` also logs the mean thinking length, in tokens, as "thinking_length" where TRL's `log_metric` is
        given.
        """
        if self.tokenizer is None:
            raise ValueError(f"the {self.name} task is not bound to a tokenizer; call task.bind(tokenizer) first")
        form, stop = self.form, (int(self.tokenizer.eos_token_id),)

        def correctness(
            prompts: Any,
            completions: Any,
            completion_ids: Any = None,
            log_metric: Callable[[str, float], None] | None = None,
            **columns: Any,
        ) -> list[float | None]:
            """2 where the stated final number equals the answer; None where no answer is known."""
            texts = [completion_text(completion) for completion in completions]
            if log_metric is not None and texts:
                log_metric("thinking_length", sum(map(self.thinking_length, texts)) / len(texts))
            answers = columns.get("answer") or [None] * len(texts)
            return [
                None if answer is None else CORRECT_REWARD * float(is_correct(text, answer, form))
                for text, answer in zip(texts, answers, strict=True)
            ]

        def strict_format(
            prompts: Any, completions: Any, completion_ids: Any = None, **columns: Any
        ) -> list[float | None]:
            """0.5 for exactly the asked form, ended by the model itself."""
            ids = completion_ids if completion_ids is not None else [None] * len(completions)
            return [
                STRICT_REWARD * float(is_strict(completion_text(completion), form) and ended(tokens, stop))
                for completion, tokens in zip(completions, ids, strict=True)
            ]

        def soft_format(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
            """0.5 shared out: for each tag that occurs exactly once (think), for one mark with one number (plain)."""
            return [SOFT_REWARD * soft_credit(completion_text(completion), form) for completion in completions]

        def surplus_penalty(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
            """-0.001 for each character before and after the asked form, at most -0.5."""
            surplus = [surplus_characters(completion_text(completion), form) for completion in completions]
            return [-min(LARGEST_PENALTY, PENALTY_PER_CHARACTER * count) if count else 0.0 for count in surplus]

        return [correctness, strict_format, soft_format, surplus_penalty]

    def thinking_length(self, text: str) -> int:
        """Tokens of the thinking part of a completion, in the bound tokenizer's count."""
        thinking = thinking_part(text, self.form)
        return len(self.tokenizer(thinking, add_special_tokens=False)["input_ids"]) if thinking else 0

    def evaluate(self, context: EvalContext) -> dict[str, float]:
        """Greedy completions of the held-out problems, scored.

        Returns accuracy, format_rate (exactly the asked form, ended), ended_rate, mean_length and thinking_length (both
        in tokens), reward and reward/<function> (means), and prompts (how many were scored). Raises ValueError when the
        task is not bound or `generate` gives the wrong number of completions.
        """
        functions = {function.__name__: function for function in self.reward_functions}
        _, held_out = self.problems()
        totals: dict[str, float] = dict.fromkeys(
            ["accuracy", "format_rate", "ended_rate", "mean_length", "thinking_length", "reward"], 0.0
        )
        totals |= {f"reward/{name}": 0.0 for name in functions}
        count = 0
        for batch in context.batches(held_out):
            prompts = [self.prompt(problem) for problem in batch]
            completion_ids = context.generate(prompts, self.max_completion_length)
            if len(completion_ids) != len(batch):
                raise ValueError(f"generate gave {len(completion_ids)} completions for {len(batch)} prompts")
            texts = [context.tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids]
            completions = [[{"role": "assistant", "content": text}] if self.conversational else text for text in texts]
            answers = [problem.answer for problem in batch]
            for name, function in functions.items():
                rewards = function(prompts, completions, completion_ids=completion_ids, answer=answers)
                total = sum(reward for reward in rewards if reward is not None)
                totals[f"reward/{name}"] += total
                totals["reward"] += total
                if name == "strict_format":
                    totals["format_rate"] += sum(bool(reward) for reward in rewards)
            stop = (int(self.tokenizer.eos_token_id),)
            pairs = zip(texts, answers, strict=True)
            totals["accuracy"] += sum(is_correct(text, answer, self.form) for text, answer in pairs)
            totals["ended_rate"] += sum(ended(ids, stop) for ids in completion_ids)
            totals["mean_length"] += sum(map(len, completion_ids))
            totals["thinking_length"] += sum(map(self.thinking_length, texts))
            count += len(batch)
        return {name: total / count for name, total in totals.items()} | {"prompts": float(count)}


def is_correct(text: str, answer: str, form: str) -> bool:
    """Whether the final number stated in `text` equals `answer`, as exact decimals ("1,080" = "1080.0")."""
    stated = final_number(text, form)
    return stated is not None and stated == the_number(answer)


def final_number(text: str, form: str) -> Decimal | None:
    """The final number a completion states, or None.

    think: the number inside the one <answer>...</answer>. plain: the number on the line of the last "####"; without a
    mark, the last number in the text, so that a right answer in the wrong form still counts.
    """
    if form == "think":
        # Cut after the last end tag, where every further tag would be searched for an end in vain.
        inside = re.findall(r"<answer>(.*?)</answer>", text[: text.rfind("</answer>") + len("</answer>")], re.DOTALL)
        return the_number(inside[0]) if len(inside) == 1 else None
    if MARK in text:
        return the_number(text.rsplit(MARK, 1)[1].strip().split("\n", 1)[0])
    found = numbers(text)
    return found[-1] if found else None


def is_strict(text: str, form: str) -> bool:
    """Whether a completion has exactly the asked form and nothing else."""
    # Counted first: with one of each the expression below takes time linear in the text.
    once = all(text.count(tag) == 1 for tag in TAGS) if form == "think" else text.count(MARK) == 1
    return once and STRICT[form].fullmatch(text) is not None


def soft_credit(text: str, form: str) -> float:
    """Credit between 0 and 1 for parts of the form: a quarter per tag, or half each for one mark and its number."""
    if form == "think":
        return sum(text.count(tag) == 1 for tag in TAGS) / len(TAGS)
    if text.count(MARK) != 1:
        return 0.0
    return 0.5 + 0.5 * (final_number(text, form) is not None)


def surplus_characters(text: str, form: str) -> int:
    """Characters, without outer white space, before and after the asked form. 0 where the form is not there at all."""
    if form == "think":
        before = text.split(TAGS[0], 1)[0] if TAGS[0] in text else ""
        after = text.split(TAGS[-1], 1)[1] if TAGS[-1] in text else ""
        return len(before.strip()) + len(after.strip())
    if MARK not in text:
        return 0
    rest = text.split(MARK, 1)[1].strip().split("\n", 1)
    return len(rest[1].strip()) if len(rest) == 2 else 0


def thinking_part(text: str, form: str) -> str:
    """What comes before the answer: inside <reasoning> (to the end where it is never closed), or before "####"."""
    if form == "think":
        return text.split(TAGS[0], 1)[1].split(TAGS[1], 1)[0].strip() if TAGS[0] in text else ""
    return text.split(MARK, 1)[0].strip()
