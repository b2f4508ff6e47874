"""The registry of tasks, the check of task against tokenizer, and the reading of numbers and completions."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ablate import tasks
from ablate.models.tiny import tiny_tokenizer
from ablate.tasks.text import completion_text, ended, numbers, the_number

JSONLIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text"]), inner),
    max_leaves=10,
)


def test_every_task_is_named_and_keeps_to_the_protocol() -> None:
    assert tasks.names() == ["arithmetic", "gsm8k", "sums"]
    for name in tasks.names():
        task = tasks.get(name)
        assert {member for member in vars(tasks.Task) if not member.startswith("_")} <= set(dir(type(task)))
        assert task.name == name
        key, _, value = task.plain_text_option.partition("=")
        plain = tasks.get(name, **{key: {"false": False}.get(value, value)})
        assert not plain.conversational


def test_a_new_task_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_REGISTRY", dict(tasks._REGISTRY))

    @tasks.register
    @dataclass(frozen=True)
    class Echo:
        name: ClassVar[str] = "echo"
        length: int = 3

    assert "echo" in tasks.names()
    assert tasks.options("echo") == {"length": 3}
    assert tasks.get("echo", length=5) == Echo(5)  # type: ignore[comparison-overlap]
    with pytest.raises(ValueError, match="registered twice"):
        tasks.register(Echo)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arithmetics", {}, "unknown task 'arithmetics'; did you mean 'arithmetic'?"),
        ("chess", {}, "known: arithmetic, gsm8k, sums"),
        ("gsm8k", {"pathh": "x"}, "no option 'pathh'; did you mean 'path'"),
        ("arithmetic", {"stop_token_ids": (1,)}, "no option 'stop_token_ids'"),
        (
            "arithmetic",
            {"form": "plane"},
            "must be one of plain, chat, got 'plane'; did you mean 'plain'",
        ),
        ("arithmetic", {"split": "test"}, "arithmetic.split"),
        (
            "arithmetic",
            {"max_completion_length": 0},
            "max_completion_length must be an integer of at least 1",
        ),
        ("arithmetic", {"max_completion_length": None}, "arithmetic.max_completion_length"),
        ("gsm8k", {"form": "thinking"}, "did you mean 'think'"),
        ("gsm8k", {"conversational": "no"}, "gsm8k.conversational must be true or false"),
        ("gsm8k", {"train_size": -1}, "gsm8k.train_size"),
        ("gsm8k", {"eval_size": 2.5}, "gsm8k.eval_size"),
        ("gsm8k", {"max_steps": True}, "gsm8k.max_steps"),
        ("gsm8k", {"max_completion_length": None}, "gsm8k.max_completion_length"),
        ("sums", {"terms": 1}, "sums.terms must be between 2 and 20"),
        ("sums", {"largest": 1}, "sums.largest must be at least 2"),
        ("sums", {"examples": 4}, "sums.examples must be between 0 and 3"),
        ("sums", {"examples": True}, "sums.examples"),
    ],
)
def test_wrong_names_and_values_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        tasks.get(name, **options)
    assert message in str(error.value)


@pytest.mark.parametrize(("name", "options"), [("gsm8k", {}), ("arithmetic", {"form": "chat"})])
def test_a_base_model_is_refused_on_conversations_with_the_way_out(name: str, options: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizer("heldout")
    tokenizer.name_or_path = "models/some-base-model"
    task = tasks.get(name, **options)
    for refuse in (lambda: task.bind(tokenizer), lambda: tasks.check_model(task, tokenizer)):
        with pytest.raises(ValueError) as error:
            refuse()
        for part in ("'models/some-base-model'", "no chat template", "instruct", f"{name}.{task.plain_text_option}"):
            assert part in str(error.value)


def test_a_tokenizer_without_eos_is_refused() -> None:
    tokenizer = tiny_tokenizer("heldout")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        tasks.check_model(tasks.get("arithmetic"), tokenizer)


def test_unbound_tasks_have_no_rewards() -> None:
    for name in tasks.names():
        with pytest.raises(ValueError, match=r"task\.bind\(tokenizer\)"):
            _ = tasks.get(name).reward_functions


def test_batches_cover_the_first_prompts_once_and_report_progress() -> None:
    seen: list[tuple[int, int]] = []
    context = tasks.EvalContext(None, None, lambda *_: [], 4, 10, lambda done, total: seen.append((done, total)))  # type: ignore[arg-type]
    batches = list(context.batches(range(25)))
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert seen == [(4, 10), (8, 10), (10, 10)]


@pytest.mark.parametrize(
    ("size", "prompts", "argument"), [(0, None, "batch_size"), (1, 0, "prompts"), (1, -3, "prompts")]
)
def test_batches_refuse_sizes_that_are_not_positive(size: int, prompts: int | None, argument: str) -> None:
    context = tasks.EvalContext(None, None, lambda *_: [], size, prompts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=argument):
        list(context.batches(range(3)))


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("abc", "abc"),
        ([{"role": "assistant", "content": "abc"}], "abc"),
        ([{"role": "assistant", "content": "a"}, {"role": "tool", "content": None}, {"content": "b"}], "ab"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}, "junk"]}], "a"),
        ([], ""),
        (None, ""),
        (3, ""),
    ],
)
def test_completion_text(completion: Any, text: str) -> None:
    assert completion_text(completion) == text


@given(JSONLIKE)
def test_completion_text_takes_anything(completion: Any) -> None:
    assert isinstance(completion_text(completion), str)


def test_ended_looks_at_the_last_token_only() -> None:
    assert ended([5, 1], (1,))
    assert not ended([1, 5], (1,))
    assert not ended([], (1,))
    assert not ended(None, (1,))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("18", ["18"]),
        ("$1,080.50 in all", ["1080.50"]),
        ("-$5, $-5, -\\$5 or \u22125", ["-5", "-5", "-5", "-5"]),
        ("5-3 and 5 - 3", ["5", "3", "5", "3"]),
        ("(4)-3", ["4", "3"]),
        ("18. Then 12%", ["18", "12"]),
        ("1,234,567 but 1,23", ["1234567", "1", "23"]),
        (".5 and 0.50", ["0.5", "0.50"]),
        ("80km/h", ["80"]),
        ("١٢ nothing ² here", []),
        ("", []),
    ],
)
def test_numbers(text: str, found: list[str]) -> None:
    assert [str(number) for number in numbers(text)] == found


@given(st.text())
def test_numbers_takes_anything(text: str) -> None:
    assert all(number.is_finite() for number in numbers(text))
    the_number(text)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9))
def test_the_number_reads_every_way_of_writing_one(value: Decimal) -> None:
    for text in (
        f"{value}",
        f"{value:,}",
        f"${value:,}".replace("$-", "-$"),
        f" {value} apples.",
        f"2 x 3 = {value}\n",
    ):
        assert the_number(text) == value


def test_a_list_of_guesses_is_no_number() -> None:
    assert the_number("1 2 3") is None
    assert the_number("17 or 18") is None
    assert the_number("none") is None
    # More digits than a float or the default decimal context can hold are compared exactly.
    assert the_number("9" * 400) != the_number("9" * 399 + "8")
