"""Who may import whom. The rules are read from the source, so that a lazy import counts as well."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGES = ("losses", "ablate", "analysis")
OURS = (*PACKAGES, "experiments", "tests")
BACKENDS = ("reference", "chunked", "triton")
VARIANTS_SEE = ("losses.spec", "losses.elementwise", "losses.aggregation")


@dataclass(frozen=True)
class Import:
    module: str  # the file that imports, dotted
    package: bool  # it is an __init__.py
    target: str  # what is imported, dotted; `from a import b` gives a.b
    line: int
    lazy: bool  # within a function


def within(name: str, *parents: str) -> bool:
    """Whether a dotted name is one of `parents` or lies below one."""
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def _targets(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def _walk(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, lazy
        yield from _walk(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def imports(root: Path) -> Iterator[Import]:
    """Every import statement, and every import_module of a literal name, in the packages and in tests/oracles*.py."""
    files = [file for name in PACKAGES for file in sorted((root / name).rglob("*.py"))]
    for file in [*files, *(root / "tests").glob("oracles*.py")]:
        parts = file.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        package = module if is_package else module.rpartition(".")[0]
        for node, lazy in _walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
            for target in _targets(node, package):
                yield Import(module, is_package, target, getattr(node, "lineno", 0), lazy)


def _backend(name: str) -> str | None:
    """The backend that a module of losses.backends belongs to: triton_kernels and triton_launch are one."""
    if not within(name, "losses.backends"):
        return None
    stem = name.removeprefix("losses.backends").lstrip(".").split(".")[0]
    return next((backend for backend in BACKENDS if stem == backend or stem.startswith(backend + "_")), None)


def broken_rule(i: Import) -> str | None:
    """The rule that an import breaks, or None."""
    ours = within(i.target, *OURS)
    if i.module.startswith("tests.oracles"):
        other_oracle = i.target.startswith("tests.oracles")
        return "oracles import nothing of this repository" if ours and not other_oracle else None
    if within(i.target, "tests", "experiments"):
        return "nothing imports tests or experiments"
    if within(i.module, "losses") and ours and not within(i.target, "losses"):
        return "losses imports nothing else of this repository"
    if within(i.module, "losses.variants") and within(i.target, "losses"):
        lists_variants = i.module == "losses.variants" and i.package and within(i.target, "losses.variants")
        if not lists_variants and not within(i.target, *VARIANTS_SEE):
            return "variants see only spec, elementwise and aggregation"
    own, other = _backend(i.module), _backend(i.target)
    if own and other and own != other:
        return "backends do not import each other"
    if own != "triton":
        if within(i.target, "triton"):
            return "triton is imported only in losses/backends/triton_*"
        if other == "triton" and not i.lazy:
            return "the triton backend is imported lazily, within a function"
    if within(i.module, "ablate.rollout", "ablate.tasks") and within(i.target, "ablate.trainer"):
        return "rollout and tasks never import trainer"
    if within(i.module, "analysis"):
        if within(i.target, "torch"):
            return "analysis does not import torch"
        if within(i.target, "losses", "ablate") and not within(i.target, "ablate.schema"):
            return "analysis sees only the file schema of ablate"
    return None


def violations(root: Path) -> list[str]:
    return [f"{i.module}:{i.line} imports {i.target}: {rule}" for i in imports(root) if (rule := broken_rule(i))]


def test_the_repository_keeps_the_rules(root: Path) -> None:
    seen = list(imports(root))
    for package in PACKAGES:
        assert any(within(i.module, package) for i in seen), f"no import found in {package}: is the scan looking there?"
    assert violations(root) == []


PLANTED = [
    ("losses/spec.py", "import ablate.config", "losses imports nothing else"),
    ("losses/bench.py", "def f():\n    from analysis import tables", "losses imports nothing else"),
    ("losses/bench.py", "import importlib\nimportlib.import_module('ablate.cli')", "losses imports nothing else"),
    ("losses/variants/forward_kl.py", "from losses.backends import chunked", "variants see only"),
    ("losses/variants/forward_kl.py", "from losses import policy_loss", "variants see only"),
    ("losses/variants/forward_kl.py", "from .reference import surrogate", "variants see only"),
    ("losses/variants/forward_kl.py", "from ..precision import scale", "variants see only"),
    ("losses/backends/chunked.py", "from losses.backends.reference import logits", "backends do not import each other"),
    ("losses/backends/reference.py", "from . import chunked", "backends do not import each other"),
    ("losses/backends/chunked.py", "def f():\n    from .triton_launch import g", "backends do not import each other"),
    ("losses/elementwise.py", "import triton.language as tl", "triton is imported only"),
    ("losses/backends/chunked.py", "def f():\n    import triton", "triton is imported only"),
    ("losses/backends/resolve.py", "from losses.backends import triton_launch", "imported lazily"),
    ("ablate/doctor.py", "import triton", "triton is imported only"),
    ("ablate/rollout/vllm.py", "from ablate.trainer import AblationTrainer", "never import trainer"),
    ("ablate/tasks/gsm8k.py", "def f():\n    from .. import trainer", "never import trainer"),
    ("analysis/load.py", "import torch.nn", "does not import torch"),
    ("analysis/load.py", "from ablate import plan", "only the file schema"),
    ("analysis/load.py", "import losses", "only the file schema"),
    ("ablate/cli.py", "import experiments.lab", "nothing imports tests"),
    ("ablate/cli.py", "def f():\n    from tests.oracles import g", "nothing imports tests"),
    ("tests/oracles.py", "from losses.spec import Variant", "oracles import nothing"),
    ("tests/oracles_kl.py", "def f():\n    import losses", "oracles import nothing"),
]

ALLOWED = [
    ("losses/variants/__init__.py", "from . import forward_kl, reference"),
    ("losses/variants/forward_kl.py", "from losses.elementwise import tl\nfrom ..spec import Variant\nimport torch"),
    ("losses/backends/triton_launch.py", "import triton\nfrom .triton_kernels import kernel"),
    ("losses/backends/resolve.py", "from . import chunked\ndef f():\n    from .triton_launch import g"),
    ("ablate/cli.py", "import losses\ndef f():\n    from analysis.render import write_report"),
    ("analysis/load.py", "from ablate import schema\nfrom ablate.schema import STEP\nfrom .stats import paired"),
    ("tests/oracles_kl.py", "import torch\nfrom tests.oracles import masked_mean"),
]


def _plant(root: Path, file: str, source: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True)
    path.write_text(source + "\n", encoding="utf-8")


@pytest.mark.parametrize(("file", "source", "rule"), PLANTED)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, source: str, rule: str) -> None:
    _plant(tmp_path, file, source)
    (found,) = violations(tmp_path)
    assert rule in found


@pytest.mark.parametrize(("file", "source"), ALLOWED)
def test_what_is_allowed_passes(tmp_path: Path, file: str, source: str) -> None:
    _plant(tmp_path, file, source)
    assert len(list(imports(tmp_path))) >= 1
    assert violations(tmp_path) == []


def _loaded_by(root: Path, modules: list[str]) -> set[str]:
    """Top-level packages in sys.modules of a new process that imports `modules`."""
    code = f"import sys, {', '.join(modules)}; print(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_reading_runs_loads_neither_torch_nor_trl(root: Path) -> None:
    modules = [f"analysis.{file.stem}" for file in sorted((root / "analysis").glob("*.py")) if file.stem != "__init__"]
    loaded = _loaded_by(root, ["analysis", "ablate.schema", *modules])
    assert {"analysis", "ablate", "pandas"} <= loaded
    assert not loaded & {"torch", "triton", "transformers", "trl", "losses"}


def test_losses_alone_loads_no_trainer_and_no_compiler(root: Path) -> None:
    loaded = _loaded_by(root, ["losses"])
    assert "torch" in loaded
    assert not loaded & {"triton", "transformers", "trl", "ablate", "analysis"}
