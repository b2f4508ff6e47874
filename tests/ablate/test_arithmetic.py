"""The arithmetic task: its splits, its rewards on any output, and its scores against plain computations."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ablate import tasks
from ablate.models.tiny import CHARACTERS, EOS, TinySettings, tiny_model, tiny_tokenizer
from ablate.tasks.arithmetic import SPLITS, Arithmetic, Pair, _score, split_pairs

STOP = CHARACTERS.index(EOS)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer("heldout")


@pytest.fixture(scope="module")
def task(tokenizer: Any) -> Arithmetic:
    return Arithmetic().bind(tokenizer)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(TinySettings(seed=3, initializer_range=0.3))


def encode(text: str, stop: bool = True) -> list[int]:
    return [CHARACTERS.index(character) for character in text] + [STOP] * stop


def reward(task: Arithmetic, completions: list[Any], completion_ids: Any, answers: Any = None) -> dict[str, list[Any]]:
    columns = {} if answers is None else {"answer": answers}
    prompts = ["07+35="] * len(completions)
    return {
        function.__name__: function(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        for function in task.reward_functions
    }


def test_splits_are_of_the_stated_sizes_disjoint_and_complete() -> None:
    everything = {Pair(a, b) for a in range(50) for b in range(50)}
    held_out_sets = []
    for split in SPLITS:
        train, held_out = split_pairs(split)
        assert (len(train), len(held_out)) == (2244, 256)
        assert set(train) | set(held_out) == everything
        assert len(set(train)) == 2244
        assert split_pairs(split) == (train, held_out)
        held_out_sets.append(set(held_out))
    assert not held_out_sets[0] & held_out_sets[1], (
        "settings must not be chosen on the pairs that results are claimed on"
    )


def test_prompts_and_answers() -> None:
    assert (Pair(7, 35).question, Pair(7, 35).answer) == ("07+35=", "42")
    assert (Pair(0, 3).question, Pair(0, 3).answer) == ("00+03=", "03")
    chat = Arithmetic(form="chat").prompt(Pair(7, 35))
    assert isinstance(chat, list) and chat[-1] == {"role": "user", "content": "07+35="}


def test_the_seed_orders_the_same_rows() -> None:
    first, again, other = (Arithmetic().train_dataset(seed) for seed in (0, 0, 1))
    assert first.column_names == ["prompt", "answer"]
    assert first["prompt"][:] == again["prompt"][:]
    assert first["prompt"][:] != other["prompt"][:]
    assert sorted(first["prompt"]) == sorted(other["prompt"])
    for row in first.select(range(50)):
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(a) + int(b) == int(row["answer"])


def test_fingerprint_tells_data_apart_but_not_length(tokenizer: Any) -> None:
    plain = Arithmetic().fingerprint()
    assert plain == Arithmetic(max_completion_length=8).fingerprint() == Arithmetic().bind(tokenizer).fingerprint()
    assert len({plain, Arithmetic(split="validation").fingerprint(), Arithmetic(form="chat").fingerprint()}) == 3


@pytest.mark.parametrize(
    ("text", "stop", "correct", "format", "penalty"),
    [
        ("42", True, 1.0, 0.2, 0.0),
        ("42", False, 0.0, 0.0, 0.0),
        ("43", True, 0.0, 0.2, 0.0),
        ("4", True, 0.0, 0.0, 0.0),
        ("421", True, 0.0, 0.0, -0.1),
        ("42+=", False, 0.0, 0.0, -0.2),
        ("4=", True, 0.0, 0.0, 0.0),
        ("", True, 0.0, 0.0, 0.0),
    ],
)
def test_rewards(task: Arithmetic, text: str, stop: bool, correct: float, format: float, penalty: float) -> None:
    rewards = reward(task, [text], [encode(text, stop)], ["42"])
    assert rewards == {"correct": [correct], "format": [format], "surplus_penalty": [pytest.approx(penalty)]}


def test_rewards_without_ids_or_answers(task: Arithmetic) -> None:
    assert reward(task, ["42"], None, ["42"])["correct"] == [0.0]
    assert reward(task, ["42", "42"], [encode("42")] * 2, ["42", None])["correct"] == [1.0, None]
    assert reward(task, ["42"], [encode("42")])["correct"] == [None]
    assert reward(task, [], [], []) == {"correct": [], "format": [], "surplus_penalty": []}


@given(st.lists(st.tuples(st.text(max_size=30), st.lists(st.integers(0, 20), max_size=4)), max_size=5), st.booleans())
def test_rewards_never_raise_and_stay_bounded(pairs: list[tuple[str, list[int]]], chat: bool) -> None:
    task = Arithmetic().bind(tiny_tokenizer("heldout"))
    completions: list[Any] = [[{"role": "assistant", "content": text}] if chat else text for text, _ in pairs]
    rewards = reward(task, completions, [ids for _, ids in pairs], ["42"] * len(pairs))
    assert all(len(values) == len(pairs) for values in rewards.values())
    total = [sum(values) for values in zip(*rewards.values(), strict=True)]
    assert all(-0.5 <= value <= 1.2 for value in total)
    for (text, ids), value in zip(pairs, total, strict=True):
        assert (value == 1.2) == (text == "42" and ids[-1:] == [STOP])


def test_scores_are_the_plain_products(task: Arithmetic, model: Any, tokenizer: Any) -> None:
    """Probability as a product of one softmax at a time, accuracy as greedy decoding, one prompt at a time."""
    _, held_out = split_pairs("heldout")
    probability, right = 0.0, 0
    for pair in held_out[:40]:
        ids = encode(pair.question, stop=False)
        p = 1.0
        for target in encode(pair.answer):
            with torch.no_grad():
                p *= float(model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)[target])
            ids.append(target)
        greedy = encode(pair.question, stop=False)
        for _ in range(3):
            greedy.append(int(model(torch.tensor([greedy])).logits[0, -1].argmax()))
        probability += p
        right += greedy == ids
    scores = task.evaluate(tasks.EvalContext(model, tokenizer, lambda *_: [], 16, 40))
    assert scores["probability"] == pytest.approx(probability / 40, rel=1e-5)
    assert scores["accuracy"] == right / 40
    assert scores["prompts"] == 40


def test_evaluation_leaves_the_model_and_the_random_state_alone(task: Arithmetic, model: Any, tokenizer: Any) -> None:
    model.train()
    before = torch.get_rng_state()
    context = tasks.EvalContext(model, tokenizer, lambda *_: [], 64)
    first = task.evaluate(context)
    assert model.training
    assert torch.equal(before, torch.get_rng_state())
    assert first == task.evaluate(context)
    assert first["prompts"] == 256
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4), st.integers(0, 2**31))
def test_padding_does_not_change_scores(shapes: list[tuple[int, int]], seed: int) -> None:
    model = tiny_model(TinySettings(seed=3, initializer_range=0.3))
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(len(CHARACTERS), (length,), generator=generator).tolist()

    sequences = [(draw(prompt), draw(target)) for prompt, target in shapes]
    together, hits = _score(model, sequences)
    for row, sequence in enumerate(sequences):
        alone, hit = _score(model, [sequence])
        assert math.isclose(float(together[row]), float(alone[0]), rel_tol=1e-5, abs_tol=1e-5)
        assert bool(hits[row]) == bool(hit[0])


def test_the_chat_form_is_scored_after_the_chat_template(model: Any) -> None:
    tokenizer = tiny_tokenizer("heldout")
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    chat = Arithmetic(form="chat").bind(tokenizer)
    plain = Arithmetic().bind(tokenizer)
    context = tasks.EvalContext(model, tokenizer, lambda *_: [], 64, 64)
    assert chat.evaluate(context) == plain.evaluate(context)


def test_the_tiny_model_of_another_split_is_refused() -> None:
    with pytest.raises(ValueError, match="take model=tiny-validation"):
        Arithmetic(split="validation").bind(tiny_tokenizer("heldout"))
    with pytest.raises(ValueError, match="take model=tiny$"):
        Arithmetic().bind(tiny_tokenizer("validation"))


def test_a_tokenizer_that_loses_digits_is_refused() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "hello": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    with pytest.raises(ValueError, match="sums cannot be asked"):
        Arithmetic().bind(tokenizer)
