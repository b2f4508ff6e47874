"""Values that vLLM refuses are refused before the sweep."""

import pytest

from ablate import config
from ablate.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("sampling.min_p=5", r"sampling\.min_p=5: .*min_p must be in \[0, 1\], got 5"),
        ("sampling.top_k=x", r"sampling\.top_k=x: "),
        ("vllm.max_num_seqs=x", r"vllm\.max_num_seqs=x: EngineArgs takes int"),
        ("vllm.kv_cache_dtype=fp9", r"vllm\.kv_cache_dtype=fp9: EngineArgs takes Literal\['auto'.*'fp8'"),
        ("vllm.enforce_eager=maybe", r"vllm\.enforce_eager=maybe: EngineArgs takes bool"),
        ("vllm.share_weights=1", r"^vllm\.share_weights=1: it takes true or false"),
        ("vllm.dtype=float16", r"vllm\.dtype cannot be set: it follows from train\.dtype"),
        ("vllm.compilation_config={levle: 3}", r"vllm\.compilation_config=.*levle"),
    ],
)
def test_refusals(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.load(["rollout=vllm", override])


def test_a_4_bit_base_needs_a_4_bit_engine() -> None:
    with pytest.raises(ConfigError, match=r"train\.load_in_4bit: .*vllm\.quantization=bitsandbytes, or rollout=transf"):
        config.load(["rollout=vllm", "train.lora=true", "train.load_in_4bit=true"])


def test_what_runs_is_not_refused() -> None:
    options = ["vllm.kv_cache_dtype=fp8", "vllm.max_num_seqs=4", "vllm.share_weights=false", "vllm.enforce_eager=true"]
    config.load(["rollout=vllm", *options, "sampling.seed=3", "sampling.top_p=0.9", "sampling.stop=[a]"])
    config.load(["experiment=precision", "rollout=vllm"])
