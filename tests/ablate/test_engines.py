"""Which engine a cell gets, and which it is refused, without vLLM."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from ablate import config as configs
from ablate import engines
from ablate.config import ConfigError


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


def config(*overrides: str) -> Any:
    return configs.load(["rollout=vllm", "train.lora=true", "train.dtype=bfloat16", *overrides], check=False)
