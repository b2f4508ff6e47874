"""Hashes of weights, and the check that a folder holds them in a safe format."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def weights_sha256(tensors: "Mapping[str, torch.Tensor]") -> str:
    """sha256 over the sorted names, with each tensor's shape, dtype and bytes.

    Takes a state dict on any device; equal hashes mean byte-identical weights.
    """
    return _digest((name, tensors[name]) for name in sorted(tensors))


def folder_sha256(folder: Path) -> str:
    """`weights_sha256` of the safetensors files of a folder, read one tensor at a time.

    Raises ValueError where a file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    def tensors() -> "Iterable[tuple[str, torch.Tensor]]":
        where = {}
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as stored:
                where.update(dict.fromkeys(stored.keys(), file))
        current, stored = None, None
        for name in sorted(where):
            if where[name] != current:
                current = where[name]
                stored = safe_open(current, framework="pt").__enter__()
            yield name, stored.get_tensor(name)

    try:
        return _digest(tensors())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"model: the weights in {folder} cannot be read ({error}); is a file cut off?") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a model: those of its index where there is one.

    Raises ValueError where there are none (pickled weights are never loaded), or where one named by the index is
    missing.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"model: {index} is damaged ({error}); download the model again") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"model: {folder} lacks {', '.join(missing)}, named in {index.name}; download it again")
        return [folder / name for name in names]
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"model: {folder} holds pickled weights ({', '.join(pickles[:3])}), which can run code when loaded and are "
            "refused; take a safetensors version of the model, or convert it where you trust it: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    raise ValueError(
        f"model: {folder} holds no model.safetensors; give a folder written by save_pretrained, or "
        "a hub id whose weights come as safetensors"
    )


def _digest(tensors: "Iterable[tuple[str, torch.Tensor]]") -> str:
    import torch

    digest = hashlib.sha256()
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(json.dumps([name, list(tensor.shape), dtype]).encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()
