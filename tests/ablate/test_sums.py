"""The generated chain sums: what is asked, what is held out, and that the worked examples are right."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate import tasks
from ablate.models.tiny import tiny_tokenizer
from ablate.tasks.solution import is_correct, is_strict
from ablate.tasks.sums import EXAMPLES, Sums, question, solution


def terms(text: str) -> tuple[int, ...]:
    return tuple(int(term.replace(" ", "")) for term in re.findall(r"(?:[+-] )?\d+", text))


@pytest.mark.parametrize("form", ["plain", "think"])
@given(numbers=st.lists(st.integers(-20, 20).filter(bool), min_size=2, max_size=6))
def test_a_solution_is_right_in_its_own_form(form: str, numbers: list[int]) -> None:
    text = solution((abs(numbers[0]), *numbers[1:]), form)
    assert is_strict(text, form)
    assert is_correct(text, str(abs(numbers[0]) + sum(numbers[1:])), form)


@given(
    longest=st.integers(2, 5),
    largest=st.integers(2, 30),
    train_size=st.integers(1, 100),
    eval_size=st.integers(1, 40),
)
def test_problems(longest: int, largest: int, train_size: int, eval_size: int) -> None:
    task = Sums(terms=longest, largest=largest, train_size=train_size, eval_size=eval_size)
    train, held_out = task.problems()
    assert len(train) == train_size and len(held_out) <= eval_size
    for problem in train + held_out:
        numbers = terms(problem.question)
        assert question(numbers) == problem.question
        assert 2 <= len(numbers) <= longest and len(numbers) == problem.steps + 1
        assert all(1 <= abs(number) <= largest for number in numbers)
        assert all(sum(numbers[:count]) >= 0 for count in range(1, len(numbers) + 1))
        assert sum(numbers) == int(problem.answer)
    keys: list[set[Any]] = [{tuple(sorted(terms(row.question))) for row in part} for part in (train, held_out)]
    assert not keys[0] & keys[1]
    assert not {tuple(sorted(example)) for example in EXAMPLES} & keys[1]
    assert len({row.question for row in held_out}) == len(held_out)


def test_sizes_are_met_where_there_are_enough_sums() -> None:
    train, held_out = Sums().problems()
    assert len(held_out) >= 150
    assert [row.steps for row in train] == [1, 2] * 1000, "lengths take turns"
    assert len(Sums(terms=4, largest=50).problems()[1]) == 300


def test_prompts() -> None:
    task = Sums()
    problem = task.problems()[0][0]
    prompt = task.prompt(problem)
    assert isinstance(prompt, list)
    assert [turn["role"] for turn in prompt] == ["system", *["user", "assistant"] * 2, "user"]
    assert all(is_strict(turn["content"], "think") for turn in prompt if turn["role"] == "assistant")
    assert prompt[-1]["content"] == problem.question
    plain = Sums(conversational=False, form="plain", examples=1).prompt(problem)
    assert isinstance(plain, str) and plain.endswith(f"Problem: {problem.question}\nSolution: ")
    assert plain.count("####") == 2, "the form, and one worked example"
    assert len(Sums(examples=0).prompt(problem)) == 2


def test_order_follows_the_seed_and_the_fingerprint_does_not() -> None:
    task = Sums(train_size=50)
    first, again, other = (task.train_dataset(seed)["prompt"][:] for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(map(str, first)) == sorted(map(str, other))
    assert task.fingerprint() == Sums(train_size=50).fingerprint()
    assert task.fingerprint() != Sums(train_size=50, examples=1).fingerprint()


def test_evaluation_scores_what_the_prompts_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right solutions, as an oracle writes them, score 1; those of the next sum score 0."""
    tokenizer = tiny_tokenizer("heldout")
    monkeypatch.setattr(tokenizer, "chat_template", "x", raising=False)
    task = Sums(eval_size=12).bind(tokenizer)
    held_out = task.problems()[1]
    right = {row.question: f"<reasoning>so</reasoning><answer>{row.answer}</answer>" for row in held_out}

    class Spoken:
        """A tokenizer that only has to give back what `generate` meant."""

        @staticmethod
        def decode(ids: list[int], **_: Any) -> str:
            return right[held_out[ids[0]].question]

    def generate(prompts: list[Any], _: int) -> list[list[int]]:
        asked = [row.question for row in held_out]
        return [[asked.index(prompt[-1]["content"]), tokenizer.eos_token_id] for prompt in prompts]

    monkeypatch.setattr(type(task), "thinking_length", lambda *_: 1)
    context = tasks.EvalContext(None, Spoken(), generate)  # type: ignore[arg-type]
    scores = task.evaluate(context)
    assert (scores["accuracy"], scores["format_rate"], scores["prompts"]) == (1, 1, len(held_out))
    right.update({row.question: f"<answer>{int(row.answer) + 1}</answer>" for row in held_out})
    assert task.evaluate(context)["accuracy"] == 0


@pytest.mark.parametrize("name", ["train_size", "eval_size"])
def test_more_problems_than_memory_holds_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"sums.{name} must be at most 1000000"):
        Sums(**{name: 10**9})
