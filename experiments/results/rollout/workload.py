"""What the rollout measurements train: shapes with random weights, prompts, a reward, TRL's settings, a clock."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

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
GIB = 1 << 30
PROMPT = 32


def folder(shape: str, with_weights: bool) -> Path:
    """A folder with the shape's config, a tokenizer of its vocabulary, and random bf16 weights where asked for."""
    path = Path(os.environ.get("MODELS", "/tmp/models")) / shape
    if path.is_dir():
        return path
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    values = SHAPES[shape]
    made = path.with_name(f"{shape}.{os.getpid()}")
    inner = Tokenizer(models.WordLevel({f"t{i}": i for i in range(values["vocab_size"])}, unk_token="t2"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="t0", eos_token="t1", unk_token="t2")
    tokenizer.save_pretrained(made)
    config = LlamaConfig(**values, pad_token_id=0, eos_token_id=1, bos_token_id=None, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    if with_weights:
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(made)
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
        learning_rate=1e-5, lr_scheduler_type="constant", gradient_checkpointing=False, loss_type="grpo", **more,
    )  # fmt: skip


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


class Clock:
    """Seconds of each optimizer step, the device's queue drained, and device memory after each."""

    def __init__(self) -> None:
        import torch
        from transformers import TrainerCallback

        self.marks: list[float] = []
        self.used: list[int] = []
        outer = self

        class Callback(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                torch.cuda.synchronize()
                outer.marks.append(time.perf_counter())
                free, total = torch.cuda.mem_get_info()
                outer.used.append(total - free)

        self.callback = Callback()

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]


def median(values: list[float]) -> float:
    return statistics.median(values)
