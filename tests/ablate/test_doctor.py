"""The doctor: what is there, what `auto` picks and why, what is missing."""

import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from ablate import cli, config, doctor, resolve
from ablate.errors import ConfigError


def examine(*overrides: str, network: bool = False) -> dict[str, doctor.Finding]:
    found = doctor.examine(config.load(overrides, check=False), network=network)
    return {finding.what: finding for finding in found}


def test_this_machine_can_run_the_default(tmp_path: Path) -> None:
    import torch

    found = examine(f"out={tmp_path / 'runs'}", "device=cpu")
    assert found["torch"].found == torch.__version__
    assert found["device=cpu"].found == "cpu: asked for"
    assert found["loss.backend=auto"].found.startswith("chunked: ")
    assert found["rollout=auto"].found.startswith("transformers: ")
    for what in ("cpu", "memory", "out", "config", "model tiny", "jobs=auto", "python"):
        assert found[what].status == doctor.GOOD, found[what]
    assert "GiB free" in found["out"].found
    assert not (tmp_path / "runs" / "default").exists()


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "cuda_devices", lambda: 0)
    monkeypatch.setattr("ablate.provenance.versions", lambda: {"torch": "2"})
    (tmp_path / "file").touch()
    found = examine("device=cuda", f"out={tmp_path / 'file' / 'x'}", "model=owner/name")
    assert found["device=cuda"].status == doctor.MISSING and "no CUDA device" in found["device=cuda"].found
    assert found["trl"].status == doctor.MISSING and "pip install trl" in found["trl"].found
    assert found["wandb"].status == doctor.ABSENT
    assert found["out"].status == doctor.MISSING and "cannot be written" in found["out"].found
    assert found["config"].status == doctor.MISSING


def test_strict_exits_with_1_only_when_something_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    good = ["doctor", "--offline", f"out={tmp_path}", "device=cpu"]
    bad = ["doctor", "--offline", f"out={tmp_path / 'file'}", "device=cpu"]
    runner = CliRunner()
    assert runner.invoke(cli.cli, [*good, "--strict"]).exit_code == 0
    assert runner.invoke(cli.cli, bad).exit_code == 0
    result = runner.invoke(cli.cli, [*bad, "--strict"])
    assert result.exit_code == 1 and "missing: out" in result.output


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404 if self.path == "/none" else 200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}"
        listening.shutdown()


def test_hub(monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in doctor.hub_answer()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", server)
    assert doctor.hub_answer().startswith("answers")
    monkeypatch.setenv("HF_ENDPOINT", f"{server}/none")
    assert doctor.hub_answer().startswith("answers") and "404" in doctor.hub_answer()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert "does not answer" in doctor.hub_answer()
    found = examine("model=owner/name", network=True)
    assert found["model hub"].status == doctor.MISSING
    assert examine(network=True)["model hub"].status == doctor.ABSENT
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    assert "no http address" in doctor.hub_answer()


def test_choices_of_auto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert resolve.device("cpu").why == "asked for"
    monkeypatch.setattr(resolve, "cuda_devices", lambda: 2)
    assert resolve.device("auto").name == "cuda" and resolve.device("cuda:1").name == "cuda:1"
    with pytest.raises(ConfigError, match=r"device=cuda:2: there are 2"):
        resolve.device("cuda:2")
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: name == "vllm" or find(name, *rest))
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "vllm.py").touch()
    monkeypatch.setattr(resolve, "__file__", str(tmp_path / "resolve.py"))
    assert resolve.rollout("auto", "auto").name == "vllm"
    assert resolve.rollout("auto", "cpu").name == "transformers"
    assert resolve.rollout("vllm", "cpu").name == "vllm"
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "vllm" else find(name, *rest))
    assert resolve.rollout("auto", "auto").why == "vLLM is not installed"
    with pytest.raises(ConfigError, match="rollout=vllm: vLLM is not installed"):
        resolve.rollout("vllm", "auto")


def test_backends() -> None:
    assert resolve.backend("chunked", "cpu").name == "chunked"
    assert resolve.backend("auto", "cpu").name == "chunked"
    with pytest.raises(ConfigError, match=r"loss\.backend=triton"):
        resolve.backend("triton", "cpu")


def test_sizes() -> None:
    assert [doctor.size(n) for n in (0, 1536, 3 << 30, 5 << 40)] == ["0 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]


def test_table_shows_every_finding() -> None:
    text = StringIO()
    found = [doctor.Finding("a", doctor.GOOD, "x"), doctor.Finding("b", doctor.MISSING, "y")]
    Console(file=text, width=80).print(doctor.table(found))
    assert text.getvalue().split() == ["a", "ok", "x", "b", "MISSING", "y"]
