"""Which engine a cell gets, and which it is refused, without vLLM."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from ablate import config as configs
from ablate import engines, resolve
from ablate.config import ConfigError
from ablate.rollout import vllm_live, vllm_memory


@pytest.mark.parametrize(
    ("version", "there", "match"),
    [
        ((0, 24), {"bitsandbytes"}, None),
        ((0, 27), {"bitsandbytes"}, None),
        ((0, 28), {"bitsandbytes", "vllm_bnb_plugin"}, None),
        ((0, 28), {"bitsandbytes"}, "up to 0.27; 0.28 takes it from a plugin.*pip install vllm-bnb-plugin"),
        ((0, 31), {"bitsandbytes"}, "0.31 takes it from a plugin.*pip install vllm-bnb-plugin"),
        ((0, 24), set(), "pip install bitsandbytes"),
    ],
)
def test_a_4_bit_engine_says_what_it_lacks(
    version: tuple[int, int], there: set[str], match: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_vllm_version", lambda: version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    asked = config("vllm.quantization=bitsandbytes")
    if match is None:
        assert engines.check_quantization(asked) == "bitsandbytes"
        assert engines.check_quantization(config(), "bitsandbytes") == "bitsandbytes"
        return
    with pytest.raises(ConfigError, match=f"vllm.quantization=bitsandbytes: .*{match}"):
        engines.check_quantization(asked)
    with pytest.raises(ConfigError, match=rf"model=tiny \(bitsandbytes\): .*{match}"):
        engines.check_quantization(config(), "bitsandbytes")


@pytest.mark.parametrize(
    ("override", "match"), [("train.dtype=float32", "train.dtype=bfloat16"), ("train.lora=false", "train.lora=true")]
)
def test_a_4_bit_engine_that_would_not_work_is_refused_with_the_way_out(override: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        engines.check_quantization(config("vllm.quantization=bitsandbytes", override))


def test_an_engine_without_quantisation_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert engines.check_quantization(config("train.lora=false", "train.dtype=float32")) is None


@pytest.fixture
def vllm_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "vllm" or find(name, *rest))
    monkeypatch.setattr(resolve, "cuda_devices", lambda: 1)


FLOAT32 = r"train\.dtype=float32: with {} .*train\.dtype=bfloat16 or float16, or rollout=transformers"


@pytest.mark.parametrize("overrides", [("rollout=vllm",), ("rollout=auto",), ("rollout=auto", "device=cuda:0")])
def test_an_adapter_in_float32_on_cuda_is_refused_with_the_way_out(
    overrides: tuple[str, ...], vllm_is_there: None
) -> None:
    with pytest.raises(ConfigError, match=FLOAT32.format(overrides[0])):  # a cell that nobody has checked before
        engines.start(config("train.dtype=float32", *overrides), None, None, [])


@pytest.mark.parametrize(
    "given",
    [
        ("train.lora=true",),
        ("train.lora=true", "grid.train.dtype=bfloat16,float32"),
        ("train.dtype=float32", "grid.train.lora=false,true"),
    ],
)
def test_it_is_refused_with_the_config(given: tuple[str, ...], vllm_is_there: None) -> None:
    with pytest.raises(ConfigError, match=FLOAT32.format("rollout=auto")):
        configs.load(["grid=none", *given])
    configs.load(["grid=none", "device=cpu", *given])


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.dtype=float32", "device=cpu"),
        ("train.dtype=float32", "rollout=transformers"),
        ("train.dtype=float32", "train.lora=false"),
        ("train.dtype=bfloat16",),
        ("train.dtype=float16",),
    ],
)
def test_what_vllm_can_apply_is_not_refused(overrides: tuple[str, ...], vllm_is_there: None) -> None:
    engines.check_dtype(config(*overrides))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", rf"AssertionError: .*{Path(__file__).name}:\d+: raise AssertionError\(words\)$"),
        ("no", "AssertionError: no$"),
    ],
)
def test_an_engine_that_does_not_start_says_why_or_where(
    words: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**arguments: Any) -> None:
        raise AssertionError(words)

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=start, _custom_ops=types.SimpleNamespace()))
    monkeypatch.setattr(vllm_live, "environment", lambda device: None)
    need = vllm_memory.Need(sequences=1, prompt=1, completion=1)
    spec = vllm_live.Spec(Path("model"), "", torch.float32, torch.device("cpu"), 0, need)
    with pytest.raises(vllm_live.EngineError, match=f"^vLLM did not start: {told}"):
        vllm_live._start(spec, {})


def config(*overrides: str) -> Any:
    return configs.load(["rollout=vllm", "train.lora=true", "train.dtype=bfloat16", *overrides], check=False)
