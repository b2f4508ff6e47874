"""What the rollout measurements train: shapes with random weights, prompts, a reward, TRL's settings, a clock.

With MEASURE_DEVICE=cpu everything is tiny, to try the measurements themselves without a GPU; such figures mean nothing.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

CPU = os.environ.get("MEASURE_DEVICE") == "cpu"
SHAPES = {
    "smollm2": dict(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192, rope_theta=100000.0,
    ),
    "thin": dict(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192, rope_theta=100000.0,
    ),
    "llama8b": dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=False, max_position_embeddings=8192, rope_theta=500000.0,
    ),
}  # fmt: skip
TINY = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=1024, max_position_embeddings=512)  # fmt: skip
GIB = 1 << 30
PROMPT = 32


def scaled(value: int, on_cpu: int) -> int:
    """A number of rows, tokens or steps; the second one without a GPU."""
    return on_cpu if CPU else value


def folder(shape: str, with_weights: bool = True) -> Path:
    """A folder with the shape's config, a tokenizer of its vocabulary, and random bf16 weights where asked for.

    Made on the CPU, so that no process takes device memory before its turn.
    """
    path = Path(os.environ.get("MODELS", "/tmp/models-cpu" if CPU else "/tmp/models")) / shape
    if path.is_dir():
        return path
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    values = SHAPES[shape] | (TINY if CPU else {})
    made = path.with_name(f"{shape}.{os.getpid()}")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"t{i}" for i in range(len(special), values["vocab_size"]))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.save_pretrained(made)
    config = LlamaConfig(**values, pad_token_id=0, eos_token_id=1, bos_token_id=None, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    if with_weights:
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(made)
    else:
        config.save_pretrained(made)
    with contextlib.suppress(OSError):  # another part has made the same
        made.rename(path)
    return path


def prompts(count: int) -> list[str]:
    return [" ".join(f"t{100 + (i * 37 + k) % 900}" for k in range(PROMPT)) for i in range(count)]


def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [sum(ids) % 101 / 101 for ids in completion_ids]


def arguments(out: Path, rows: int, length: int, steps: int, **more: Any) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(out), bf16=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1, seed=1,
        per_device_train_batch_size=rows, num_generations=8, max_completion_length=length, max_steps=steps, beta=0.04,
        learning_rate=1e-5, lr_scheduler_type="constant", gradient_checkpointing=False, loss_type="grpo", use_cpu=CPU,
        **more,
    )  # fmt: skip


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def drain() -> None:
    """Waits until the device has done what was asked of it."""
    import torch

    if not CPU:
        torch.cuda.synchronize()


def used_bytes() -> int:
    """Bytes in use on the device by all processes; on a CPU those of this one."""
    import psutil
    import torch

    if CPU:
        return psutil.Process().memory_info().rss
    free, total = torch.cuda.mem_get_info()
    return total - free


class Clock:
    """Seconds of each optimizer step, the device's queue drained, and device memory after each."""

    def __init__(self) -> None:
        from transformers import TrainerCallback

        self.marks: list[float] = []
        self.used: list[int] = []
        outer = self

        class Callback(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                drain()
                outer.marks.append(time.perf_counter())
                outer.used.append(used_bytes())

        self.callback = Callback()

    def seconds(self) -> list[float]:
        return [round(b - a, 4) for a, b in zip(self.marks, self.marks[1:], strict=False)]


def median(values: list[float]) -> float:
    return statistics.median(values)
