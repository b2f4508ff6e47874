"""The command line: help, plans without heavy imports, refusals, the whole way to a report."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ablate import cli, config, keys, runner
from ablate.errors import ConfigError

HEAVY = {"torch", "trl", "transformers", "datasets", "pandas", "matplotlib"}
HERE = Path(__file__).resolve().parent


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.cli, list(arguments))


@pytest.mark.parametrize("command", ["run", "plan", "report", "doctor"])
def test_help(command: str) -> None:
    for flag in ("--help", "-h"):
        result = invoke(command, flag)
        assert result.exit_code == 0 and f"Usage: cli {command}" in result.output
    assert command in invoke("--help").output


def test_help_of_run_names_every_key_and_preset() -> None:
    text = invoke("run", "--help").output
    for key in (*keys.Schema(config.Config).leaves, *keys.OPEN_GROUPS, *config.preset_names()):
        assert key in text, key


def test_dry_run_prints_config_and_cells_and_writes_nothing(tmp_path: Path) -> None:
    result = invoke("run", "--dry-run", f"out={tmp_path / 'runs'}", "seeds=1", "learning_rate=1e-5", "grid.beta=0.5")
    assert result.exit_code == 0
    assert "learning_rate: 1.0e-05" in result.output and "reference-seed0-beta0.5" in result.output
    assert "4 cells: 4 new" in result.output
    assert not (tmp_path / "runs").exists()


def test_points_are_shown(tmp_path: Path) -> None:
    preset = tmp_path / "own.yaml"
    preset.write_text("variants: [reference]\nseeds: 1\npoints: {low: {train.dtype: bfloat16}, half: {dtype: float16}}")
    result = invoke("run", "--dry-run", f"experiment={preset}", f"out={tmp_path}")
    assert result.exit_code == 0 and "train.dtype: bfloat16" in result.output
    rows = [line.split() for line in result.output.splitlines() if line.startswith(("cell ", "reference-"))]
    assert rows == [
        ["cell", "variant", "seed", "point", "state"],
        ["reference-seed0-pointlow", "reference", "0", "low", "new"],
        ["reference-seed0-pointhalf", "reference", "0", "half", "new"],
    ]
    assert "points=a,b selects" in " ".join(invoke("plan", "--help").output.split())


def test_plan_shows_the_state_of_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr(runner, "report", lambda folder, console: True)
    monkeypatch.setenv("FAKE_CELLS", json.dumps({"no_detach-seed0": {"at": 2, "kind": "raise"}}))
    given = [f"out={tmp_path}", "grid=none", "variants=reference,no_detach", "jobs=0"]
    assert runner.run(config.load([*given, "seeds=1"]), function="fakes:run_cell") == 1
    lines = {line.split()[0]: line.split() for line in invoke("plan", *given, "seeds=2").output.splitlines() if line}
    assert lines["reference-seed0"] == ["reference-seed0", "reference", "0", "done"]
    assert lines["no_detach-seed0"][-1] == "failed" and lines["no_detach-seed1"][-1] == "new"
    changed = invoke("plan", *given, "seeds=1", "steps=3").output
    assert "changed" in changed and "train.steps: 80 -> 3" in changed
    refused = invoke("run", "--dry-run", *given, "seeds=1", "steps=3")
    assert refused.exit_code != 0 and "nothing was run" in str(refused.exception)


def ablate(root: Path, *arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ablate", *arguments]
    environment = __import__("os").environ | {"PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=cwd or root, capture_output=True, text=True, env=environment, timeout=120)


def test_a_refusal_is_a_message_not_a_traceback(root: Path) -> None:
    done = ablate(root, "run", "train.learnign_rate=1")
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("refused: unknown key 'train.learnign_rate'; did you mean train.learning_rate")


def test_presets_are_found_from_anywhere(root: Path, tmp_path: Path) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "mine.yaml").write_text("seeds: 1\nvariants: [reference]\ngrid: {steps: [5, 6]}\n")
    done = ablate(root, "plan", "experiment=mine", cwd=tmp_path)
    assert done.returncode == 0 and "2 cells: 2 new in runs/mine" in done.stdout, done.stderr
    assert ablate(root, "plan", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["plan"], ["run", "--dry-run", "arithmetic.form=chat"]]
)
def test_light_commands_import_nothing_heavy(root: Path, arguments: list[str]) -> None:
    code = (
        "import sys\nfrom ablate import cli\n"
        f"try: cli.main({arguments!r})\nexcept SystemExit as end: assert not end.code, end.code\n"
        f"print('LOADED', sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_report_from_run_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    given = [f"out={tmp_path}", "grid=none", "variants=reference,no_detach", "seeds=2", "jobs=0"]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "report", lambda folder, console: True)
        assert runner.run(config.load(given), function="fakes:run_cell") == 0
    result = invoke("report", str(tmp_path / "default"))
    assert result.exit_code == 0, result.output
    for words in ("reference", "no_detach", "report.html"):
        assert words in result.output
    assert (tmp_path / "default" / "report" / "table.md").is_file()


def test_pages_are_written_or_refused(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout with one experiment: its report and the pages that show it; nothing half-understood."""
    source = root / "experiments" / "results" / "default"
    for folder in source.glob("*-beta1"):
        shutil.copytree(folder, tmp_path / "experiments" / "results" / "some" / folder.name)
    for page in ("README.md", "experiments/LOG.md"):
        (tmp_path / page).write_text("<!-- results experiments/results/some -->\n<!-- end of results -->\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("analysis.notebook.update", lambda page, folders: [f.name for f in folders] == ["some"])
    result = invoke("report", "--committed")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "experiments/results/some: written",
        *(f"{page}: written" for page in ("README.md", "experiments/LOG.md", "analysis/report.ipynb")),
    ]
    assert "no_detach" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "experiments/results/some/report/table.md").is_file()
    assert "README.md: current" in invoke("report", "--page", "README.md").output
    for arguments in (
        ["--committed", "experiments/results/some"],
        ["--committed", "--page", "README.md"],
        ["--page", "README.md", "seeds=1"],
        ["--page", "missing.md"],
        ["experiments/results/some", "--rollouts"],
    ):
        assert isinstance(invoke("report", *arguments).exception, ConfigError), arguments


def test_report_of_nothing_is_refused(tmp_path: Path) -> None:
    result = invoke("report", f"out={tmp_path}")
    assert result.exit_code != 0 and "there are no runs" in str(result.exception)
    result = invoke("report", str(tmp_path), "out=x")
    assert result.exit_code != 0 and "have no effect" in str(result.exception)


def test_a_report_that_cannot_be_made_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> None:
        raise ValueError("no space for figures")

    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr("analysis.render.write_report", broken)
    given = [f"out={tmp_path}", "grid=none", "variants=reference", "seeds=1", "jobs=0"]
    assert runner.run(config.load(given), function="fakes:run_cell") == 1
    assert [item.state for item in runner.survey(config.load(given))] == ["done"]


def test_a_folder_may_have_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beta=1").mkdir()
    asked: list[Path] = []
    monkeypatch.setattr(runner, "report", lambda folder, console: bool(asked.append(folder)) or True)
    assert invoke("report", "beta=1").exit_code == 0
    assert asked == [Path("beta=1")]
