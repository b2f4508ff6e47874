"""An fp8 KV cache and 4-bit engines on the tiny model: that they run under LoRA, what they hold, what they cost."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ablate import config as configs
from ablate import models, runner
from ablate.rollout import vllm_live
from ablate.rundir import CellDir
from tests.vllm.engines import adapted, compare, draw, engine, live_engine

BYTES = 1 << 24
SMALL = [
    "rollout=vllm", "device=cpu", "jobs=0", "variants=reference", "seeds=0,", "train.steps=2", "train.lora=true",
    "train.prompts_per_step=4", "train.num_generations=4", "train.checkpoint_every=0", "eval.prompts=8",
]  # fmt: skip
MEAN, MAX = "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"

fp8 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported() and not torch.cpu._is_amx_tile_supported(),
    reason="an fp8 KV cache needs AVX-512 or AMX on a CPU",
)
four_bit = pytest.mark.skipif(
    importlib.util.find_spec("vllm_bnb_plugin") is None, reason="4-bit engines need vllm-bnb-plugin"
)


def sweep(folder: Path, *overrides: str) -> dict[str, CellDir]:
    """Runs an experiment in this process, and returns its cells by name."""
    assert runner.run(configs.load([*SMALL, *overrides, f"out={folder}"])) == 0
    return {done.parent.name: CellDir(done.parent) for done in sorted(folder.rglob("done.json"))}


def told(cell: CellDir) -> dict[str, Any]:
    env = cell.read_env()
    assert env is not None
    return env["resolved"]["engine"]


@fp8
def test_an_fp8_cache_holds_a_byte_where_the_dtype_had_more(tiny: Path) -> None:
    tokens, differences = {}, {}
    for kind in ("auto", "fp8"):
        live = live_engine(tiny, rank=8, kv_cache_dtype=kind, kv_cache_memory_bytes=BYTES)
        model = adapted(live.shared_model(), 0.1)
        rollout = draw(engine(live, length=8), model)
        tokens[kind], differences[kind] = live.kv_tokens, compare(model, rollout)[0]
    assert tokens["fp8"] == 4 * tokens["auto"] > 0  # the tiny model's dtype is float32
    assert differences["auto"] < 1e-3 < differences["fp8"] < 2


@fp8
def test_an_fp8_cache_is_a_point_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point gets an engine of its own; the mismatch it causes is in the metrics, and the ratio corrects for it."""
    started: list[Any] = []
    start = vllm_live.Live.__init__

    def counted(self: Any, spec: Any) -> None:
        start(self, spec)
        started.append(self)

    vllm_live.release()
    monkeypatch.setattr(vllm_live.Live, "__init__", counted)
    cells = sweep(
        tmp_path, "variants=reference,forward_kl", "train.dtype=bfloat16", f"vllm.kv_cache_memory_bytes={BYTES}",
        "grid=none", "grid.vllm.kv_cache_dtype=auto,fp8",
    )  # fmt: skip
    assert len(cells) == 4 and len(started) == 2
    assert [live.broken for live in started] == [True, False]
    tokens = {name: told(cell)["kv_tokens"] for name, cell in cells.items()}
    means = {name: max(row[MEAN] for row in cell.metrics()) for name, cell in cells.items()}
    for name in ("reference", "forward_kl"):
        plain, small = (next(n for n in cells if n.startswith(name) and n.endswith(kind)) for kind in ("auto", "fp8"))
        assert tokens[small] == 2 * tokens[plain]
        assert 0.02 > means[plain] < means[small] < 0.2
        for row in cells[small].metrics():
            assert row["sampling/importance_sampling_ratio/mean"] != 1


@four_bit
def test_a_4_bit_engine_under_lora(tmp_path: Path) -> None:
    """Quantised as it loads: the trainer's base is whole, so the mismatch is what 4 bits cost."""
    (cell,) = sweep(tmp_path, "train.dtype=bfloat16", "grid=none", "vllm.quantization=bitsandbytes").values()
    assert told(cell)["base_weights_why"] == "the engine's weights are quantised"
    assert all(0 < row[MEAN] < 0.2 and row[MAX] < 2 for row in cell.metrics())


@four_bit
def test_a_4_bit_checkpoint_with_modules_left_in_16_bit(tmp_path: Path) -> None:
    """Engine and trainer hold the same mixture, named by parts in the one and fused in the other: no mismatch but
    rounding; the adapter trains through 4-bit modules."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    loaded = models.load("tiny")
    whole = ["lm_head", "model.layers.0.mlp", "model.layers.1.self_attn"]
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_skip_modules=whole
    )
    model = AutoModelForCausalLM.from_pretrained(loaded.path, quantization_config=config, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.uint8, torch.bfloat16}
    model.save_pretrained(tmp_path / "model")
    loaded.tokenizer.save_pretrained(tmp_path / "model")
    (cell,) = sweep(
        tmp_path / "runs", f"model={tmp_path / 'model'}", "train.dtype=bfloat16", "grid=none", "learning_rate=1e-2",
        "train.warmup_steps=0",
    ).values()  # fmt: skip
    rows = cell.metrics()
    assert all(row[MEAN] < 0.02 and row[MAX] < 0.2 for row in rows)
    assert rows[-1]["weight_distance"] > 0.1
    assert json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]["load_in_4bit"]
