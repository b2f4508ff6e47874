"""GGUF files, converted once to a folder of safetensors."""

import importlib.util
import logging
from pathlib import Path
from typing import Any

from ablate.models.cache import cached, file_sha256, key_of

log = logging.getLogger(__name__)

CODE_VERSION = 2  # raise it when the conversion below gives other files
MAGIC = b"GGUF"


def convert_gguf(file: Path, cache_dir: str | Path | None = None) -> Path:
    """Folder of float32 safetensors, configuration and tokenizer (with its chat template) made from a .gguf file.

    Cached by the file's content. Quantised weights are dequantised to exactly the values the file stands for.
    Raises ValueError where the file is none, is no GGUF file, or has an architecture that transformers cannot read.
    """
    if not file.is_file():
        raise ValueError(f"model: no file {file}; give an existing .gguf file")
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"model: {file} is no GGUF file (it does not start with 'GGUF'); download it again")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"model: reading {file} needs the gguf package; pip install gguf")
    key = key_of(CODE_VERSION, file_sha256(file))
    return cached(f"gguf-{file.stem}-{key}", lambda folder: _convert(file, folder), cache_dir)


def _convert(file: Path, folder: Path) -> None:
    import torch
    from rich.console import Console
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with Console(stderr=True).status(f"converting {file.name} to safetensors (once)"):
        try:
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        except Exception as error:  # transformers raises many kinds here; all mean that this file cannot be used
            raise ValueError(
                f"model: transformers cannot read {file} ({type(error).__name__}: {error}); the file may be cut off or "
                "of an unsupported architecture: take the model's safetensors folder instead"
            ) from error
        # transformers refuses to save a model it still takes for a quantised one.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        for attribute, plain in (("hf_quantizer", None), ("is_quantized", False), ("quantization_method", None)):
            if hasattr(model, attribute):
                setattr(model, attribute, plain)
        _set_special_tokens(file, tokenizer, model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _set_special_tokens(file: Path, tokenizer: Any, model: Any) -> None:
    """Takes the special tokens from the file itself.

    transformers 5.17 makes the end-of-sequence token of a GGUF tokenizer the same as its first token, so that no
    completion would ever be seen to end, and leaves out control tokens such as the padding token.
    """
    from gguf import GGUFReader, TokenType

    fields = GGUFReader(file).fields

    def value(key: str) -> Any:
        return fields[f"tokenizer.ggml.{key}"].contents() if f"tokenizer.ggml.{key}" in fields else None

    for attribute, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = value(f"{key}_token_id")
        if token_id is None:
            continue
        setattr(tokenizer, f"{attribute}_token", tokenizer.convert_ids_to_tokens(int(token_id)))
        if attribute != "unk":
            setattr(model.config, f"{attribute}_token_id", int(token_id))
            setattr(model.generation_config, f"{attribute}_token_id", int(token_id))
    control = [index for index, kind in enumerate(value("token_type") or []) if kind == TokenType.CONTROL]
    known = set(tokenizer.all_special_ids)
    extra = [tokenizer.convert_ids_to_tokens(index) for index in control if index not in known]
    if extra:
        tokenizer.add_special_tokens({"extra_special_tokens": extra})
    # Byte-level decoding gives the text back as it was; the clean-up would drop spaces before punctuation.
    tokenizer.clean_up_tokenization_spaces = False
