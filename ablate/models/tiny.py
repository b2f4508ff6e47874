"""The tiny model: a Llama of 84,160 parameters that adds two-digit numbers, badly, after a short supervised start.

Hidden 64, intermediate 128, 2 layers, 2 heads of 32 (the smallest head that vLLM takes on a CPU), untied embeddings,
15 characters. It is warm-started on imperfect demonstrations of the arithmetic task's training pairs, so that it gets
about a third of held-out sums right when sampling: enough signal for GRPO, and far from the ceiling. Seeded, float32,
on one CPU thread: the same bytes each time on one machine and one version of torch.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.models.cache import cached, key_of
from ablate.tasks.arithmetic import SPLITS, Pair, split_pairs

if TYPE_CHECKING:
    import numpy as np
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CODE_VERSION = 2  # raise it when a change below alters the weights
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = [PAD, EOS, UNKNOWN, *"0123456789+="]
PROMPT_LENGTH = 6
LONGEST_ANSWER = 4
PARAMETERS = 84_160

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class TinySettings:
    """Everything that decides the weights."""

    split: str = "heldout"
    seed: int = 0
    hidden_size: int = 64
    intermediate_size: int = 128
    layers: int = 2
    heads: int = 2
    initializer_range: float = 0.04
    # Demonstrations: of `per_pair` for each training pair, `right` are right; of the errors `systematic` are one slip
    # (+1), the rest a dozen others. The more systematic the errors and the longer the start, the faster GRPO learns: on
    # the validation split 80 steps end at .57 with systematic .5, at .64 with .8, at .86 with .9 and 2,000 steps here.
    # 1,300 steps are too few for some seeds.
    per_pair: int = 20
    right: float = 0.37
    systematic: float = 0.90
    # Supervised steps
    steps: int = 2000
    batch_size: int = 64
    learning_rate: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.98)
    warmup_steps: int = 50
    weight_decay: float = 0.1


def build_tiny(settings: TinySettings | None = None, cache_dir: str | Path | None = None) -> Path:
    """Folder of the warm-started model and its tokenizer; trained where the cache does not have it (about 30 s).

    Raises ValueError on an unknown split or a cache that cannot be written.
    """
    import torch
    import transformers

    settings = settings or TinySettings()
    train_pairs, _ = split_pairs(settings.split)
    key = key_of(CODE_VERSION, dataclasses.asdict(settings), train_pairs, torch.__version__, transformers.__version__)

    def build(folder: Path) -> None:
        with _progress_bar(f"warm-starting the tiny model ({settings.steps} steps, once)") as progress:
            model = warm_start(settings, progress)
        model.save_pretrained(folder)
        tiny_tokenizer(settings.split).save_pretrained(folder)

    return cached(f"tiny-{settings.split}-{key}", build, cache_dir)


def tiny_tokenizer(split: str) -> "PreTrainedTokenizerFast":
    """The 15-character tokenizer: one token a character, no token added, nothing between tokens when decoding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({text: index for index, text in enumerate(CHARACTERS)}, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
        arithmetic_split=split,  # the arithmetic task refuses to score a split that this model has seen
    )


def tiny_model(settings: TinySettings) -> "LlamaForCausalLM":
    """The model before any training, float32; weights drawn from `settings.seed` without touching torch's own state."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.hidden_size // settings.heads,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=settings.initializer_range,
        pad_token_id=CHARACTERS.index(PAD),
        eos_token_id=CHARACTERS.index(EOS),
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return LlamaForCausalLM(config).float()


def demonstrations(settings: TinySettings) -> "np.ndarray[Any, Any]":
    """Token ids (rows, 10) of prompt, answer and end-of-sequence, right-padded; `per_pair` rows a training pair."""
    import numpy as np

    rng = np.random.default_rng(settings.seed)
    train_pairs, _ = split_pairs(settings.split)
    index = {text: number for number, text in enumerate(CHARACTERS)}
    rows = np.full((len(train_pairs) * settings.per_pair, PROMPT_LENGTH + LONGEST_ANSWER), index[PAD])
    for number in range(len(rows)):
        pair = train_pairs[number // settings.per_pair]
        ids = [index[character] for character in pair.question + _demonstrated(pair, settings, rng)] + [index[EOS]]
        rows[number, : len(ids)] = ids
    return rows


def _demonstrated(pair: Pair, settings: TinySettings, rng: "np.random.Generator") -> str:
    """One demonstrated answer, right with probability `right`; wrong sums wrap around at 100 to keep two digits."""
    total = pair.a + pair.b
    if rng.random() < settings.right:
        return pair.answer
    if rng.random() < settings.systematic:
        return f"{(total + 1) % 100:02d}"
    slips: list[Callable[[], str]] = [
        lambda: f"{(total + int(rng.choice([-10, 10]))) % 100:02d}",
        lambda: f"{(total - 2) % 100:02d}",
        lambda: f"{(total - 1) % 100:02d}",
        lambda: f"{(total + 2) % 100:02d}",
        lambda: f"{int(rng.integers(100)):02d}",
        lambda: f"{pair.answer}{int(rng.integers(10))}",
        lambda: pair.answer + "+="[int(rng.integers(2))],
    ]
    return slips[int(rng.integers(len(slips)))]()


def warm_start(settings: TinySettings, progress: Progress | None = None) -> "LlamaForCausalLM":
    """The model after `settings.steps` supervised steps: AdamW, linear warm-up, then cosine to zero.

    progress: called with (steps done, steps in all, loss in nats per answer token).
    """
    import numpy as np
    import torch
    from torch.nn.functional import cross_entropy

    pad = CHARACTERS.index(PAD)
    data = torch.from_numpy(demonstrations(settings))
    rng = np.random.default_rng([settings.seed, 1])
    threads = torch.get_num_threads()
    # Sums over several threads come out in another order on another machine.
    torch.set_num_threads(1)
    try:
        model = tiny_model(settings).train()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, settings))
        for step in range(settings.steps):
            batch = data[torch.from_numpy(rng.integers(len(data), size=settings.batch_size))]
            # Only the answer is learned: position i predicts token i + 1.
            targets = batch[:, PROMPT_LENGTH:]
            logits = model(input_ids=batch, use_cache=False).logits[:, PROMPT_LENGTH - 1 : -1]
            loss = cross_entropy(logits.transpose(1, 2), targets, ignore_index=pad)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if progress is not None and (step % 10 == 9 or step + 1 == settings.steps):
                progress(step + 1, settings.steps, float(loss.detach()))
    finally:
        torch.set_num_threads(threads)
    return model.eval()


def _schedule(step: int, settings: TinySettings) -> float:
    import math

    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


@contextlib.contextmanager
def _progress_bar(text: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(text, total=None)

        def progress(done: int, total: int, loss: float) -> None:
            bar.update(task, completed=done, total=total, description=f"{text} loss {loss:.3f}")

        yield progress


__all__ = ["SPLITS", "TinySettings", "build_tiny", "demonstrations", "tiny_model", "tiny_tokenizer", "warm_start"]
