"""Which CUDA devices a sweep's processes see; cells are stand-ins."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ablate import config, resolve, runner
from ablate.errors import ConfigError

FUNCTION = "fakes:run_cell"
BOTH = "5, GPU-7"  # a value of CUDA_VISIBLE_DEVICES


@pytest.fixture(autouse=True)
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent))  # worker processes get this path as well
    monkeypatch.delenv("FAKE_CELLS", raising=False)
    monkeypatch.setattr(runner, "report", lambda folder, console: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(resolve, "cuda_devices", lambda: 2)


def load(out: Path, *overrides: str) -> config.Config:
    return config.load(["variants=reference", "seeds=2", "grid=none", f"out={out}", *overrides], check=False)


def run(out: Path, *overrides: str) -> tuple[int, str]:
    text = StringIO()
    code = runner.run(load(out, *overrides), console=Console(file=text, width=200), function=FUNCTION)
    return code, text.getvalue()


def test_workers_are_spread_over_the_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(out: str, *overrides: str) -> list[str]:
        assert run(tmp_path / out, "jobs=4", "seeds=4", *overrides)[0] == 0
        return sorted(json.loads(path.read_text())["card"] for path in (tmp_path / out).rglob("env.json"))

    assert taken("all") == ["0", "0", "1", "1"]
    assert taken("cpu", "device=cpu") == ["none"] * 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", BOTH)
    assert taken("some") == ["5", "5", "GPU-7", "GPU-7"]
    monkeypatch.setattr(resolve, "cuda_devices", lambda: 1)
    assert taken("one") == [BOTH] * 4


def test_a_named_card_is_the_only_one_that_its_workers_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(out: str, *overrides: str) -> list[tuple[str, str, str]]:
        """Of each cell: device= as its config.json has it, what that was to the worker, the cards that it saw."""
        assert run(tmp_path / out, *overrides)[0] == 0
        planned = runner.survey(load(tmp_path / out, *overrides))
        assert {item.state for item in planned} == {"done"}, "under the hash of the cell that was asked for"
        found = []
        for path in sorted((tmp_path / out).rglob("config.json")):
            env = json.loads(path.with_name("env.json").read_text())
            found.append((json.loads(path.read_text())["config"]["device"], env["saw"], env["card"]))
        return found

    assert seen("first", "device=cuda:0", "jobs=2") == [("cuda:0", "cuda", "0")] * 2
    assert seen("second", "device=cuda:1", "jobs=2") == [("cuda:1", "cuda", "1")] * 2
    axis = seen("axis", "grid.device=cuda:1,cpu")
    assert axis == [("cpu", "cpu", "1"), ("cuda:1", "cuda", "1")] * 2
    preset = tmp_path / "own.yaml"
    preset.write_text("points: {a: {device: 'cuda:1'}, b: {device: cuda}}\n")
    for two in ("grid.device=cuda:1,cuda:0", f"experiment={preset}"):
        with pytest.raises(ConfigError, match="device: cuda.* in one sweep"):
            run(tmp_path / "two", two)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", BOTH)
    assert seen("renamed", "device=cuda:1") == [("cuda:1", "cuda", "GPU-7")] * 2
    assert resolve.device("cuda:1").name == "cuda:1", "in this process both are visible"
    with pytest.raises(ConfigError, match="device=cuda:2: there are 2 CUDA devices"):
        run(tmp_path / "none", "device=cuda:2")
    monkeypatch.setattr(resolve, "cuda_devices", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert seen("one", "device=cuda:0") == [("cuda:0", "cuda:0", "3")] * 2


def test_jobs_auto_is_one_cell_per_card(tmp_path: Path) -> None:
    def workers(*overrides: str) -> tuple[int, list[str]]:
        chosen = load(tmp_path, "seeds=4", *overrides)
        return resolve.jobs(chosen, 8), [card["CUDA_VISIBLE_DEVICES"] for card in resolve.cards(chosen)]

    assert workers() == workers("device=cuda") == workers("grid.device=auto,cuda") == (2, ["0", "1"])
    assert workers("device=cuda:1") == (1, ["1"])
    assert workers("device=cuda:1", "jobs=3") == (3, ["1"])


@pytest.mark.parametrize(
    ("overrides", "visible"),
    [
        (["device=auto"], "5"),
        (["device=cuda"], "5"),
        (["device=cuda:1"], "GPU-7"),
        (["grid.device=cpu,cuda:1"], "GPU-7"),
        (["experiment=own.yaml"], "GPU-7"),
    ],
)
def test_this_process_trains_on_one_card_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", BOTH)
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("points: {a: {device: cpu}, b: {device: 'cuda:1'}}\n")
    with pytest.raises(ConfigError, match=f"jobs=0: .* 2 CUDA devices.*CUDA_VISIBLE_DEVICES={visible} .*jobs=1"):
        run(tmp_path, "jobs=0", *overrides)
    assert not list(tmp_path.rglob("config.json"))
    assert run(tmp_path, "jobs=0", "device=cpu")[0] == 0


def test_jobs_0_does_not_matter_where_all_is_done(tmp_path: Path) -> None:
    run(tmp_path, "jobs=1")
    code, text = run(tmp_path, "jobs=0")
    assert code == 0 and "2 done" in text
