"""Where a result comes from."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from ablate import provenance


def test_collect_is_json_and_complete() -> None:
    import torch

    env = provenance.collect([3])
    assert json.loads(json.dumps(env)) == env
    assert env["seeds"] == [3] and env["python"] == platform.python_version()
    assert env["packages"]["torch"] == torch.__version__
    assert env["threads"] == torch.get_num_threads()
    assert env["device"] == {"type": "cpu"} or env["device"]["type"] == "cuda"
    assert env["cpu"]["cores"] >= 1 and env["cpu"]["memory_bytes"] > 1 << 28
    assert env["environment"].get("OMP_NUM_THREADS") == __import__("os").environ.get("OMP_NUM_THREADS")


def test_git_is_that_of_the_code(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not (root / ".git").exists():
        pytest.skip("the code is not a git checkout")
    monkeypatch.chdir(tmp_path)
    provenance.git.cache_clear()
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    found = provenance.git()
    assert found["sha"] == head.stdout.strip() and found["dirty"] in (True, False)


def test_no_git_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    provenance.git.cache_clear()
    assert provenance.git() == {"sha": None, "dirty": None}
    provenance.git.cache_clear()


@pytest.mark.parametrize(
    ("told", "known"), [("0a1b2c3d\n", "0a1b2c3d"), ("[/red]", None), ("0a1b", None), (" ", None), ("", None)]
)
def test_a_copy_is_told_its_commit(told: str, known: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("ABLATE_COMMIT", told)
    provenance.git.cache_clear()
    assert provenance.git() == {"sha": known, "dirty": None}
    provenance.git.cache_clear()


def test_a_machine_is_told_apart_without_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance.platform, "node", lambda: "fast-card-07")
    first = provenance.machine()
    monkeypatch.setattr(provenance.platform, "node", lambda: "fast-card-08")
    assert len(first) == 12 and first != provenance.machine() and "fast" not in first


def test_command_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/ablate/__main__.py", "run", "sampling.stop=[a, b]"])
    assert provenance.command() == "python -m ablate run 'sampling.stop=[a, b]'"


def test_differences_that_make_another_run() -> None:
    env = {"python": "3.11", "packages": {"torch": "2.13", "pandas": "3"}, "device": {"type": "cpu"}, "threads": 1}
    assert provenance.differences(env, env) == []
    other = env | {"packages": {"torch": "2.14", "pandas": "4"}, "device": {"type": "cuda"}, "threads": None}
    assert provenance.differences(env, other) == [
        "packages.torch: 2.13 -> 2.14",
        "device: {'type': 'cpu'} -> {'type': 'cuda'}",
    ]
    assert provenance.differences({}, env) == []


def test_nothing_is_known_of_torch_where_it_is_not_loaded(root: Path) -> None:
    code = "import sys; from ablate import provenance as p; print(p.device(), p.threads(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "None", "False"]
