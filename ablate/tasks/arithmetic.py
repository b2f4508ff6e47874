"""Two-digit addition: 'AA+BB=' -> 'CC<eos>', a task small enough to train on a CPU in seconds.

Operands are 0..49, zero-padded, so that every prompt has six characters and every answer two. Of the 2,500 pairs
2,244 are for training and 256 held out. Which 256 is fixed by `split`:

- "heldout" (default): the pairs that results are claimed on. Never used to choose any setting.
- "validation": 256 other pairs, disjoint from those; settings are chosen here.

The primary metric is the mean teacher-forced probability of answer + end-of-sequence on the held-out prompts:
what sampling at temperature 1 would score on average, without the noise of sampling.
"""

import dataclasses
import inspect
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ablate.tasks import (
    EvalContext,
    Prompt,
    Reward,
    check_model,
    choice,
    digest,
    positive,
    register,
    tokenizer_label,
)
from ablate.tasks.text import completion_text, ended

if TYPE_CHECKING:
    import torch
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

OPERANDS = 50
HELD_OUT = 256
SPLITS = ("heldout", "validation")
SPLIT_SEED = 20261130
SYSTEM_PROMPT = "Add the two numbers. Answer with the two digits of the sum and nothing else."
ANSWER = re.compile(r"[0-9]{2}")
PENALTY_PER_CHARACTER = 0.1
LARGEST_PENALTY = 0.5


class Pair(NamedTuple):
    """One sum; `question` is 'AA+BB=' and `answer` 'CC'."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a:02d}+{self.b:02d}="

    @property
    def answer(self) -> str:
        return f"{self.a + self.b:02d}"


def split_pairs(split: str) -> tuple[list[Pair], list[Pair]]:
    """(training pairs, held-out pairs) of a split: 2,244 and 256 of the 2,500, in a fixed random order.

    Raises ValueError on an unknown split.
    """
    import numpy as np

    choice("arithmetic", "split", split, SPLITS)
    order = np.random.default_rng(SPLIT_SEED).permutation(OPERANDS * OPERANDS)
    pairs = [Pair(int(index) // OPERANDS, int(index) % OPERANDS) for index in order]
    start = SPLITS.index(split) * HELD_OUT
    return pairs[:start] + pairs[start + HELD_OUT :], pairs[start : start + HELD_OUT]


@register
@dataclass(frozen=True)
class Arithmetic:
    """Options.

    form: "plain" ('07+35=') or "chat" (a conversation).
    split: which part of the sums is held out, "heldout" or "validation".
    max_completion_length: tokens.
    """

    name: ClassVar[str] = "arithmetic"
    primary_metric: ClassVar[str] = "probability"
    primary_label: ClassVar[str] = "held-out probability of the right answer"
    plain_text_option: ClassVar[str] = "form=plain"

    form: str = "plain"
    split: str = "heldout"
    max_completion_length: int = 4
    stop_token_ids: tuple[int, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        choice(self.name, "form", self.form, ("plain", "chat"))
        choice(self.name, "split", self.split, SPLITS)
        positive(self.name, max_completion_length=self.max_completion_length)

    @property
    def conversational(self) -> bool:
        return self.form == "chat"

    def prompt(self, pair: Pair) -> Prompt:
        """The prompt for one pair."""
        if not self.conversational:
            return pair.question
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": pair.question}]

    def train_dataset(self, seed: int) -> "Dataset":
        """2,244 rows with columns "prompt" and "answer" (two digits), in an order drawn from `seed`."""
        import numpy as np
        from datasets import Dataset

        pairs, _ = split_pairs(self.split)
        order = np.random.default_rng(seed).permutation(len(pairs))
        rows = [pairs[index] for index in order]
        return Dataset.from_dict(
            {"prompt": [self.prompt(pair) for pair in rows], "answer": [pair.answer for pair in rows]}
        )

    def fingerprint(self) -> str:
        """sha256 over prompts and answers of both parts."""
        train, held_out = split_pairs(self.split)
        return digest(self.name, [[[self.prompt(pair), pair.answer] for pair in part] for part in (train, held_out)])

    def bind(self, tokenizer: "PreTrainedTokenizerBase") -> "Arithmetic":
        """The task for one tokenizer; raises ValueError where the two do not fit."""
        check_model(self, tokenizer)
        bound = dataclasses.replace(self)
        object.__setattr__(bound, "stop_token_ids", (int(tokenizer.eos_token_id),))
        return bound

    def check_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Refuses tokenizers that lose digits, '+' or '=', and the tiny model of another split."""
        sample = "0123456789+="
        if tokenizer.decode(tokenizer(sample, add_special_tokens=False)["input_ids"]).strip() != sample:
            raise ValueError(
                f"tokenizer {tokenizer_label(tokenizer)} does not give {sample!r} back after encoding and decoding, so "
                "sums cannot be asked or answered with it; take another model"
            )
        # The tiny model has seen demonstrations of its own split's training pairs.
        made_for = tokenizer.init_kwargs.get("arithmetic_split", self.split)
        if made_for != self.split:
            fitting = "tiny" if self.split == "heldout" else f"tiny-{self.split}"
            raise ValueError(
                f"arithmetic.split is {self.split!r}, but the model of tokenizer {tokenizer_label(tokenizer)} was "
                f"warm-started on the training pairs of {made_for!r} and may have seen these held-out pairs; "
                f"set arithmetic.split={made_for} or take model={fitting}"
            )

    @property
    def reward_functions(self) -> list[Reward]:
        """`correct` (0 or 1), `format` (0 or 0.2) and `surplus_penalty` (0 down to -0.5)."""
        if not self.stop_token_ids:
            raise ValueError("the arithmetic task is not bound to a tokenizer; call task.bind(tokenizer) first")
        stop, chat = self.stop_token_ids, self.conversational

        def text_of(completion: Any) -> str:
            text = completion_text(completion)
            return text.strip() if chat else text

        def correct(prompts: Any, completions: Any, completion_ids: Any = None, **columns: Any) -> list[float | None]:
            """1 for the right two digits followed by end-of-sequence; None where no answer is known."""
            answers = columns.get("answer") or [None] * len(completions)
            return [
                None if answer is None else float(text_of(completion) == answer and ended(ids, stop))
                for completion, answer, ids in zip(completions, answers, _ids(completion_ids, completions), strict=True)
            ]

        def format(prompts: Any, completions: Any, completion_ids: Any = None, **columns: Any) -> list[float | None]:
            """0.2 for exactly two digits followed by end-of-sequence."""
            return [
                0.2 * float(ANSWER.fullmatch(text_of(completion)) is not None and ended(ids, stop))
                for completion, ids in zip(completions, _ids(completion_ids, completions), strict=True)
            ]

        def surplus_penalty(
            prompts: Any, completions: Any, completion_ids: Any = None, **columns: Any
        ) -> list[float | None]:
            """-0.1 for each character beyond two, at most -0.5."""
            surplus = [max(0, len(text_of(completion)) - 2) for completion in completions]
            return [-min(LARGEST_PENALTY, PENALTY_PER_CHARACTER * count) if count else 0.0 for count in surplus]

        return [correct, format, surplus_penalty]

    def evaluate(self, context: EvalContext) -> dict[str, float]:
        """Teacher-forced scores on the held-out pairs.

        Returns probability (mean over prompts of p(answer, eos | prompt) at temperature 1), accuracy (share of
        prompts where greedy decoding gives answer and eos) and prompts (how many were scored). Answers are scored in
        the tokenizer's own spelling; float32 log-softmax, summed in float64.
        """
        _, held_out = split_pairs(self.split)
        probability = greedy = 0.0
        count = 0
        for batch in context.batches(held_out):
            sequences = [self._encode(context.tokenizer, pair) for pair in batch]
            log_probs, hits = _score(context.model, sequences)
            probability += float(log_probs.exp().sum())
            greedy += float(hits.sum())
            count += len(batch)
        return {"probability": probability / count, "accuracy": greedy / count, "prompts": float(count)}

    def _encode(self, tokenizer: "PreTrainedTokenizerBase", pair: Pair) -> tuple[list[int], list[int]]:
        prompt = self.prompt(pair)
        if isinstance(prompt, str):
            prompt_ids = tokenizer(prompt)["input_ids"]
        else:
            text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer_ids = tokenizer(pair.answer, add_special_tokens=False)["input_ids"]
        return list(prompt_ids), [*answer_ids, int(tokenizer.eos_token_id)]


def _ids(completion_ids: Any, completions: Any) -> Any:
    return completion_ids if completion_ids is not None else [None] * len(completions)


def _score(model: Any, sequences: list[tuple[list[int], list[int]]]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Log-probability (float64, nats) of each target after its prompt, and whether it is the greedy continuation.

    Left-padded, so that only the logits of the longest target are kept. Both results have shape (len(sequences),).
    """
    import torch

    longest = max(len(prompt) + len(target) for prompt, target in sequences)
    kept = max(len(target) for _, target in sequences)
    device = model.device
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    attended = torch.zeros_like(ids)
    scored = torch.zeros(len(sequences), kept, dtype=torch.bool)
    for row, (prompt, target) in enumerate(sequences):
        tokens = prompt + target
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        attended[row, longest - len(tokens) :] = 1
        scored[row, kept - len(target) :] = True
    ids, attended, scored = ids.to(device), attended.to(device), scored.to(device)
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if not bool(attended.all()):
        inputs |= {"attention_mask": attended, "position_ids": (attended.cumsum(-1) - 1).clamp(min=0)}
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        inputs["logits_to_keep"] = kept + 1
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(**inputs).logits[:, -kept - 1 : -1].float()
    finally:
        model.train(training)
    targets = ids[:, -kept:]
    log_probs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0].double()
    hits = (logits.argmax(-1) == targets) | ~scored
    return log_probs.masked_fill(~scored, 0.0).sum(-1), hits.all(-1)
