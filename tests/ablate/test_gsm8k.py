"""The GSM8K task: reading files, rewards on any output in both forms, and greedy evaluation."""

import json
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ablate import tasks
from ablate.tasks.gsm8k import GSM8K, read_jsonl
from ablate.tasks.solution import final_number, is_strict, surplus_characters, thinking_part

TRAIN = [
    ("Ann has 2 pens and buys 3. How many?", "2 + 3 = <<2+3=5>>5 pens.\n#### 5"),
    ("A car costs $1,000 and its twin too. Both?", "Twice 1,000.\n2 x 1,000 = <<2*1000=2000>>2,000\n#### 2,000"),
    ("Five less than 3?", "3 - 5 = <<3-5=-2>>-2\n#### -2"),
]
TEST = [
    ("Bo has 4 cats and 4 dogs. Pets?", "4 + 4 = 8\n#### 8"),
    ("Half of 3?", "3 / 2 = 1.5\n#### 1.5"),
]
THINK = "<reasoning>\ntwo and three\n</reasoning>\n<answer>\n5\n</answer>"


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", TRAIN)
    write(tmp_path / "test.jsonl", TEST)
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, with an end-of-sequence token and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", clean_up_tokenization_spaces=False)
    made.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    return made


def rewards(task: GSM8K, text: str, answer: str = "5", stop: bool = True, **columns: Any) -> dict[str, float]:
    ids = task.tokenizer(text)["input_ids"] + [task.tokenizer.eos_token_id] * stop
    completion = [{"role": "assistant", "content": text}] if task.conversational else text
    return {
        function.__name__: function(
            prompts=["?"], completions=[completion], completion_ids=[ids], answer=[answer], **columns
        )[0]
        for function in task.reward_functions
    }


def test_rows_prompts_and_sizes(data: Path) -> None:
    task = GSM8K(path=str(data))
    rows = task.train_dataset(0)
    assert sorted(rows["answer"]) == ["-2", "2,000", "5"]
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert "####" in rows[0]["prompt"][0]["content"]
    assert "<reasoning>" in GSM8K(path=str(data), form="think").train_dataset(0)[0]["prompt"][0]["content"]
    plain = GSM8K(path=str(data), conversational=False).train_dataset(0)[0]["prompt"]
    assert isinstance(plain, str) and plain.endswith("Solution:\n")
    assert GSM8K(path=str(data), train_size=2).train_dataset(0).num_rows == 2
    assert sorted(GSM8K(path=str(data), max_steps=1).train_dataset(0)["answer"]) == ["-2", "5"]
    with pytest.raises(ValueError, match="max_steps"):
        write(data / "train.jsonl", TRAIN[1:2])
        GSM8K(path=str(data), max_steps=1).train_dataset(0)


def test_seed_and_fingerprint(data: Path) -> None:
    task = GSM8K(path=str(data))
    orders = {tuple(task.train_dataset(seed)["answer"]) for seed in range(20)}
    assert len(orders) > 1
    assert task.train_dataset(4)["answer"][:] == task.train_dataset(4)["answer"][:]
    before = task.fingerprint()
    assert before == GSM8K(path=str(data), max_completion_length=7).fingerprint()
    others = [
        GSM8K(path=str(data), form="think"),
        GSM8K(path=str(data), train_size=1),
        GSM8K(path=str(data), eval_size=1),
    ]
    assert len({before, *(other.fingerprint() for other in others)}) == 4
    # A file that changes is read again.
    write(data / "test.jsonl", TEST[:1])
    assert task.fingerprint() != before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a", "answer": "#### 5"', "line 2: not a JSON object"),
        ('["a"]', "line 2: expected a JSON object, got list"),
        ('{"question": "a"}', "line 2: 'answer' is missing"),
        ('{"question": 3, "answer": "#### 5"}', "line 2: 'question' is missing or not a text"),
        ('{"question": "a", "answer": "5"}', "line 2: 'answer' does not end with '#### N'"),
        ('{"question": "a", "answer": "#### five"}', "line 2: 'answer' does not end with '#### N'"),
        ('{"question": "a", "answer": "#### 5"} x', "line 2: not a JSON object"),
        ("[" * 100_000, "line 2: not a JSON object"),
        (r'{"question": "a\ud800", "answer": "#### 5"}', "line 2: 'question' holds half a character"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    good = json.dumps({"question": TRAIN[0][0], "answer": TRAIN[0][1]})
    file = tmp_path / "train.jsonl"
    file.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError) as error:
        read_jsonl(file)
    assert str(file) in str(error.value) and message in str(error.value)


@given(st.integers(1, 40))
def test_a_file_cut_off_in_its_last_line_is_told(tmp_path_factory: pytest.TempPathFactory, lost: int) -> None:
    """Wherever the cut falls, problems are never dropped in silence."""
    file = tmp_path_factory.mktemp("cut") / "train.jsonl"
    write(file, TRAIN)
    whole = file.read_bytes().rstrip(b"\n")
    file.write_bytes(whole[:-lost])
    with pytest.raises(ValueError, match="line 3: not a JSON object .the last line: is the file cut off"):
        read_jsonl(file)
    file.write_bytes(whole)
    assert len(read_jsonl(file)) == 3


def test_other_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(ValueError, match="line 1: not a JSON object"):
        read_jsonl(file)
    file.write_text("\n\n")
    with pytest.raises(ValueError, match="holds no problems"):
        read_jsonl(file)
    with pytest.raises(ValueError, match="must hold train.jsonl and test.jsonl"):
        read_jsonl(tmp_path)
    with pytest.raises(ValueError, match="no file .*test.jsonl; the folder must hold"):
        GSM8K(path=str(tmp_path)).fingerprint()
    # U+2028 is a line break to Python's splitlines, not to JSON lines.
    file.write_text(json.dumps({"question": "a\u2028b", "answer": "#### 5"}, ensure_ascii=False))
    assert read_jsonl(file)[0].question == "a\u2028b"


def test_held_out_questions_in_training_are_refused(data: Path) -> None:
    write(data / "train.jsonl", [*TRAIN, TEST[0]])
    with pytest.raises(ValueError, match="1 questions stand in both train and test"):
        GSM8K(path=str(data)).train_dataset(0)


def test_without_network_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*_: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match=r"no route.*gsm8k\.path=FOLDER"):
        GSM8K().fingerprint()


def test_the_hub_rows_are_read_like_the_files(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = {
        name: datasets.Dataset.from_list([{"question": q, "answer": a} for q, a in part])
        for name, part in (("train", TRAIN), ("test", TEST))
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: rows)
    assert GSM8K().fingerprint() == GSM8K(path=str(data)).fingerprint()


@pytest.mark.parametrize(
    ("text", "answer", "stop", "expected"),
    [
        (THINK, "5", True, (2.0, 0.5, 0.5, 0.0)),
        (THINK, "5", False, (2.0, 0.0, 0.5, 0.0)),
        (THINK, "6", True, (0.0, 0.5, 0.5, 0.0)),
        (THINK.replace("\n5\n", "$5.00 dollars"), "5", True, (2.0, 0.5, 0.5, 0.0)),
        (THINK + " I hope", "5", True, (2.0, 0.0, 0.5, -0.006)),
        ("Sure! " + THINK, "5", True, (2.0, 0.0, 0.5, -0.005)),
        (THINK + "x" * 9000, "5", True, (2.0, 0.0, 0.5, -0.5)),
        (THINK + THINK, "5", True, (0.0, 0.0, 0.0, None)),
        ("<answer>5</answer>", "5", True, (2.0, 0.0, 0.25, 0.0)),
        ("<answer>4 or 5</answer>", "5", True, (0.0, 0.0, 0.25, 0.0)),
        ("<reasoning>\nit is 5", "5", False, (0.0, 0.0, 0.125, 0.0)),
        ("5", "5", True, (0.0, 0.0, 0.0, 0.0)),
        ("", "5", True, (0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_rewards_of_the_think_form(
    tokenizer: Any, text: str, answer: str, stop: bool, expected: tuple[float | None, ...]
) -> None:
    got = rewards(GSM8K(form="think").bind(tokenizer), text, answer, stop)
    assert list(got) == ["correctness", "strict_format", "soft_format", "surplus_penalty"]
    for value, wanted in zip(got.values(), expected, strict=True):
        assert wanted is None or value == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("text", "answer", "stop", "expected"),
    [
        ("2 + 3 = 5\n#### 5", "5", True, (2.0, 0.5, 0.5, 0.0)),
        ("2 + 3 = 5\n#### 5", "5", False, (2.0, 0.0, 0.5, 0.0)),
        ("so\n#### $1,080 dollars", "1080", True, (2.0, 0.5, 0.5, 0.0)),
        ("so\n#### -2", "-2", True, (2.0, 0.5, 0.5, 0.0)),
        ("so\n#### 5\nBye", "5", True, (2.0, 0.0, 0.5, -0.003)),
        ("#### 4\n#### 5", "5", True, (2.0, 0.0, 0.0, -0.006)),
        ("so\n####", "5", True, (0.0, 0.0, 0.25, 0.0)),
        ("the answer is 5", "5", True, (2.0, 0.0, 0.0, 0.0)),
        ("", "5", True, (0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_rewards_of_the_plain_form(
    tokenizer: Any, text: str, answer: str, stop: bool, expected: tuple[float, ...]
) -> None:
    for conversational in (True, False):
        task = GSM8K(conversational=conversational).bind(tokenizer)
        assert list(rewards(task, text, answer, stop).values()) == pytest.approx(expected)


TAGGED = st.lists(
    st.sampled_from(["<reasoning>", "</reasoning>", "<answer>", "</answer>", "####", "\n", "5", "$1,0", "=", " "])
    | st.text(max_size=5)
).map("".join)


@given(TAGGED, st.sampled_from(["plain", "think"]), st.booleans(), st.booleans())
def test_rewards_never_raise_and_stay_bounded(
    tokenizer: Any, text: str, form: str, conversational: bool, stop: bool
) -> None:
    task = GSM8K(form=form, conversational=conversational).bind(tokenizer)
    got = rewards(task, text, "5", stop)
    assert got["correctness"] in (0.0, 2.0)
    assert got["strict_format"] in (0.0, 0.5)
    assert 0.0 <= got["soft_format"] <= 0.5
    assert -0.5 <= got["surplus_penalty"] <= 0.0
    if got["strict_format"]:
        assert stop and got["surplus_penalty"] == 0.0
    assert (got["correctness"] == 2.0) == (final_number(text, form) == Decimal(5))


@given(st.lists(st.none() | st.text() | st.lists(st.dictionaries(st.text(), st.none() | st.text()))))
def test_odd_completions_and_missing_columns(tokenizer: Any, completions: list[Any]) -> None:
    task = GSM8K(form="think").bind(tokenizer)
    for function in task.reward_functions:
        values = function(prompts=[], completions=completions)
        assert len(values) == len(completions)
        if function.__name__ == "correctness":
            assert values == [None] * len(completions)


def test_thinking_length_is_logged_in_tokens(tokenizer: Any) -> None:
    task = GSM8K(form="think").bind(tokenizer)
    logged: dict[str, float] = {}
    correctness = task.reward_functions[0]
    correctness(["?"] * 2, [THINK, "no tags"], answer=["5", "5"], log_metric=logged.__setitem__)
    assert logged == {"thinking_length": len("two and three") / 2}
    assert thinking_part("<reasoning> cut off", "think") == "cut off"
    assert thinking_part("a\n#### 5", "plain") == "a"


@pytest.mark.parametrize("form", ["plain", "think"])
@pytest.mark.parametrize("part", ["<answer>", "<reasoning>", "</reasoning>", "\n####1", "#", "-", "1,", "</answer>"])
def test_long_repetition_takes_linear_time(form: str, part: str) -> None:
    started = time.process_time()
    text = part * 20_000
    assert not is_strict(text, form)
    assert final_number(text, form) != Decimal(7)
    assert surplus_characters(text, form) >= 0
    assert time.process_time() - started < 1


def test_the_form_helpers_agree_with_the_prompt() -> None:
    """The example in each system prompt is itself of the asked form."""
    assert is_strict(THINK, "think")
    assert is_strict("steps\n#### 42", "plain")
    assert not is_strict(THINK.replace("<answer>", "<answer><answer>"), "think")
    assert surplus_characters("  " + THINK + "\n\n", "think") == 0


def test_evaluation_of_greedy_completions(data: Path, tokenizer: Any) -> None:
    task = GSM8K(path=str(data), form="think", max_completion_length=99).bind(tokenizer)
    texts = {TEST[0][0]: THINK.replace("5", "8"), TEST[1][0]: "1.5 it is"}
    asked: list[tuple[int, int]] = []

    def generate(prompts: list[Any], max_new_tokens: int) -> list[list[int]]:
        asked.append((len(prompts), max_new_tokens))
        found = [texts[prompt[-1]["content"]] for prompt in prompts]
        return [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * ("answer" in text) for text in found]

    scores = task.evaluate(tasks.EvalContext(None, tokenizer, generate, batch_size=1))  # type: ignore[arg-type]
    assert asked == [(1, 99), (1, 99)]
    right, wrong = texts.values()
    assert scores == {
        "accuracy": 0.5,
        "format_rate": 0.5,
        "ended_rate": 0.5,
        "mean_length": (len(right) + 1 + len(wrong)) / 2,
        "thinking_length": len("two and three") / 2,
        "reward": 1.5,
        "reward/correctness": 1.0,
        "reward/strict_format": 0.25,
        "reward/soft_format": 0.25,
        "reward/surplus_penalty": 0.0,
        "prompts": 2.0,
    }
    assert scores[task.primary_metric] == 0.5
    first = task.evaluate(tasks.EvalContext(None, tokenizer, generate, prompts=1))  # type: ignore[arg-type]
    assert (first["accuracy"], first["prompts"]) == (1.0, 1.0)
    with pytest.raises(ValueError, match="gave 0 completions for 2 prompts"):
        task.evaluate(tasks.EvalContext(None, tokenizer, lambda *_: []))  # type: ignore[arg-type]
