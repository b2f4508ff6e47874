"""Run files as they are and as they should not be: what is read, what is refused, and how it is said."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ablate import schema
from analysis import stats
from analysis.files import RunFileError, read_json
from analysis.load import load, load_rollouts, place, point_label, variant_order
from tests.analysis import make_fixture

CELL = "forward_kl-seed1-beta0.04"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def reconfigure(cell: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The cell as if it had run with another config."""
    edit(cell / schema.CONFIG_FILE, lambda content: change(content["config"]))
    content = json.loads((cell / schema.CONFIG_FILE).read_text())
    made = schema.config_hash(content["config"], content["cell"]["variant"], content["cell"]["seed"])
    for name in (schema.CONFIG_FILE, schema.DONE_FILE):
        edit(cell / name, lambda content: content.update(hash=made))


def state(directory: Path, cell: str = CELL) -> str:
    return str(load(directory).cells.set_index("cell").loc[cell, "state"])


def errors(directory: Path) -> list[str]:
    return [str(p) for p in load(directory).problems if p.severity == "error"]


def test_fixture_is_what_its_script_makes(demo: Path, partial: Path, tmp_path: Path) -> None:
    make_fixture.main(tmp_path)
    for kept in (demo, partial):
        files = sorted(p.relative_to(kept) for p in kept.rglob("*") if p.is_file())
        made = tmp_path / kept.name
        assert files == sorted(p.relative_to(made) for p in made.rglob("*") if p.is_file())
        for name in files:
            if name.suffix == ".parquet":  # bytes depend on pyarrow's version
                pd.testing.assert_frame_equal(pd.read_parquet(kept / name), pd.read_parquet(made / name))
            else:
                assert (kept / name).read_bytes() == (made / name).read_bytes(), name


def test_demo_is_read_whole(demo: Path) -> None:
    runs = load(demo, strict=True)
    assert runs.problems == ()
    assert runs.experiment == "demo"
    assert runs.variants == ("reference", "no_detach", "full_reverse_kl", "forward_kl")
    assert runs.points == {"beta=0.04": {"beta": 0.04}, "beta=1": {"beta": 1.0}}
    assert (runs.axes, runs.seeds, len(runs.done)) == (("beta",), (0, 1, 2), 24)
    assert (runs.primary_metric, runs.primary_label) == ("probability", "held-out probability of the right answer")
    assert runs.reward_names == ("right_answer", "format", "length")
    assert len(runs.metrics) == 24 * make_fixture.STEPS
    assert set(schema.METRICS) <= set(runs.metrics.columns)
    assert runs.evals.groupby("cell")["step"].agg(["min", "max"]).drop_duplicates().values.tolist() == [[0, 20]]
    assert runs.cells["git_sha"].unique().tolist() == [make_fixture.SHA]


def test_states(partial: Path) -> None:
    runs = load(partial)
    assert dict(zip(runs.cells["variant"], runs.cells["state"], strict=True)) == {
        "reference": "done",
        "no_detach": "failed",
        "full_reverse_kl": "partial",
        "forward_kl": "new",
    }
    failure = runs.failures.iloc[0]
    assert (failure["type"], failure["step"]) == ("ValueError", 8)
    assert failure["traceback"].startswith("Traceback")


def test_line_cut_in_the_middle_names_file_and_line(copied: Path) -> None:
    path = copied / CELL / schema.METRICS_FILE
    lines = path.read_text().splitlines(keepends=True)
    lines[6] = lines[6][:40] + "\n"
    path.write_text("".join(lines))
    assert state(copied) == "damaged"
    (message,) = errors(copied)
    assert f"{CELL}/metrics.jsonl:7: not valid JSON" in message
    with pytest.raises(RunFileError, match=r"metrics\.jsonl:7: not valid JSON"):
        load(copied, strict=True)
    comparison = {c.variant: c for c in stats.compare(load(copied))}["forward_kl"]
    assert comparison.seeds == (0, 2)


def test_torn_last_line_is_left_out_and_said(partial: Path, tmp_path: Path) -> None:
    shutil.copytree(partial, tmp_path / "runs")
    cell = "full_reverse_kl-seed0-beta0.04"
    path = tmp_path / "runs" / cell / schema.METRICS_FILE
    path.write_bytes(path.read_bytes()[:-30])
    runs = load(tmp_path / "runs", strict=True)
    assert runs.cells.set_index("cell").loc[cell, ["state", "steps"]].tolist() == ["partial", 6]
    (problem,) = runs.problems
    assert (problem.severity, problem.path, problem.line) == ("warning", f"{cell}/metrics.jsonl", 7)


def test_rows_missing_from_a_finished_cell(copied: Path) -> None:
    path = copied / CELL / schema.METRICS_FILE
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:15]))
    assert state(copied) == "damaged"
    assert any("ends at step 15, done.json says 20" in message for message in errors(copied))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": 5, "loss": "high"}', "'loss' should be a number, found 'high'"),
        ('{"step": 5, "loss": true}', "'loss' should be a number, found True"),
        ('{"loss": 0.1}', "'step' should be a whole number"),
        ('{"step": 4.5}', "'step' should be a whole number"),
        ('{"step": 1e25}', "'step' should be a whole number"),
        ('{"step": 4}', "step 4 is there twice"),
        ('{"step": 2}', "step 2 comes after step 4"),
        ("[1, 2]", "expected a JSON object, found list"),
        ("\x00\x00\x00", "not valid JSON"),
    ],
)
def test_edited_line_is_refused(copied: Path, line: str, reason: str) -> None:
    path = copied / CELL / schema.METRICS_FILE
    lines = path.read_text().splitlines()
    lines[4] = line
    path.write_text("\n".join(lines) + "\n")
    (message,) = errors(copied)
    assert f"{CELL}/metrics.jsonl:5: " in message
    assert reason in message


def test_edited_evaluation_contradicts_done(copied: Path) -> None:
    path = copied / CELL / schema.EVAL_FILE
    lines = path.read_text().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | {"eval/probability": 0.999})
    path.write_text("\n".join(lines) + "\n")
    assert state(copied) == "damaged"
    assert any("eval.jsonl:5" in m and "0.999" in m and "edited" in m for m in errors(copied))


@pytest.mark.parametrize("name", [schema.CONFIG_FILE, schema.ENV_FILE, schema.DONE_FILE])
def test_json_file_cut_short(copied: Path, name: str) -> None:
    path = copied / CELL / name
    text = path.read_text().rstrip()
    path.write_text(text[: len(text) * 2 // 3])
    assert state(copied) == "damaged"
    assert any(f"{CELL}/{name}" in message and "cut short" in message for message in errors(copied))


def test_every_cut_of_a_json_file_is_called_a_cut(tmp_path: Path) -> None:
    whole = r'{"a": "x\\ \u00e9", "b": [1.5e-3, -2, true, null, NaN], "c": {"d": false}}'
    assert json.loads(whole)["c"] == {"d": False}
    for length in range(1, len(whole)):
        (tmp_path / "file.json").write_text(whole[:length])
        with pytest.raises(RunFileError, match=r"file\.json:1: the file is cut short"):
            read_json(tmp_path / "file.json")


@pytest.mark.parametrize("text", ['{"a": 1,, "b": 2}', '{"a": tru, "b": 2}', '{"a": "\\q"}  {"b": 2}', "{} {}"])
def test_an_error_in_the_middle_is_no_cut(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(RunFileError, match="not valid JSON"):
        read_json(tmp_path / "file.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hash": ' + "9" * 5000 + "}"])
def test_json_without_end_is_damage(copied: Path, text: str) -> None:
    (copied / CELL / schema.CONFIG_FILE).write_text(text)
    other = CELL.replace("seed1", "seed2")
    (copied / other / schema.METRICS_FILE).write_text(text + "\n{}\n")
    assert any(f"{CELL}/config.json: not valid JSON" in error for error in errors(copied))
    assert any(f"{other}/metrics.jsonl:1: not valid JSON" in error for error in errors(copied))


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (schema.CONFIG_FILE, lambda c: c["cell"].update(seed=10**30), "'cell.seed' should be a whole number"),
        (schema.CONFIG_FILE, lambda c: c["cell"].update(seed=-1), "'cell.seed' should be a whole number"),
        (schema.DONE_FILE, lambda c: c.update(seconds="long"), "'seconds' should be a number, found 'long'"),
        (schema.DONE_FILE, lambda c: c.update(eval=[1]), r"'eval' should hold scores, found \[1\]"),
        (schema.DONE_FILE, lambda c: c.update(seconds=10**400), "not valid JSON \\(a whole number of 401 digits"),
        (schema.ENV_FILE, lambda c: c.update(command="\ud800"), "not valid JSON .*surrogates not allowed"),
        (schema.DONE_FILE, lambda c: c.update(pairing=[1]), r"'pairing' should hold hashes, found \[1\]"),
        (schema.ENV_FILE, lambda c: c.update(packages=True), "'packages' should be an object, found True"),
        (schema.ENV_FILE, lambda c: c.update(pairing="x"), "'pairing' should hold hashes, found 'x'"),
    ],
)
def test_values_of_the_wrong_kind(copied: Path, name: str, change: Any, reason: str) -> None:
    edit(copied / CELL / name, change)
    assert state(copied) == "damaged"
    assert any(re.search(f"{CELL}/{name}: {reason}", error) for error in errors(copied))


def test_a_row_taken_out_of_the_middle(copied: Path) -> None:
    path = copied / CELL / schema.METRICS_FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[6:]))
    assert state(copied) == "damaged"
    assert any("metrics.jsonl: holds 19 rows for 20 steps" in error for error in errors(copied))


def test_no_json_at_all_names_the_line(copied: Path) -> None:
    path = copied / CELL / schema.DONE_FILE
    path.write_text(path.read_text().replace('"seconds": 9.5', '"seconds": 9,5'))
    line = path.read_text().splitlines().index(' "seconds": 9,5,') + 1
    assert any(f"{CELL}/done.json:{line}: not valid JSON" in message for message in errors(copied))


def test_hash_of_another_config(copied: Path) -> None:
    edit(copied / CELL / schema.DONE_FILE, lambda done: done.update(hash="0" * 64))
    assert state(copied) == "changed"
    (message,) = errors(copied)
    assert f"{CELL}/done.json" in message
    assert "come from another config" in message
    assert {c.variant: c.final.n for c in stats.compare(load(copied))}["forward_kl"] == 2


def test_mixed_commits_are_said(copied: Path) -> None:
    edit(copied / CELL / schema.ENV_FILE, lambda env: env["git"].update(sha="abcdef0" * 5))
    runs = load(copied)
    (problem,) = runs.problems
    assert problem.severity == "warning"
    assert "several git commits are mixed" in problem.message
    assert f"abcdef0abcde in {CELL}" in problem.message


def test_uncommitted_changes_and_versions_are_said(copied: Path) -> None:
    edit(copied / CELL / schema.ENV_FILE, lambda env: env["git"].update(dirty=True))
    edit(copied / CELL / schema.ENV_FILE, lambda env: env["packages"].update(torch="2.12.0"))
    edit(copied / CELL / schema.ENV_FILE, lambda env: env["resolved"].update(loss_backend="triton"))
    messages = [p.message for p in load(copied).problems]
    assert any("in no commit" in m and CELL in m for m in messages)
    assert any("different packages.torch: " in m and f"2.12.0 in {CELL}" in m for m in messages)
    assert any("different resolved.loss_backend: " in m and f"triton in {CELL}" in m for m in messages)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["config"]["train"].update(learning_rate=1e-3),
        lambda content: content["config"].update(model="other"),
        lambda content: content["cell"].update(variant="k2"),
        lambda content: content.pop("hash"),
    ],
)
def test_an_edited_config_is_damage(copied: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit(copied / CELL / schema.CONFIG_FILE, change)
    assert state(copied) == "damaged"
    assert f"error: {CELL}/config.json: its hash does not fit its content: it was edited" in errors(copied)
    with pytest.raises(RunFileError, match="it was edited"):
        load(copied, strict=True)


def test_what_only_says_where_a_cell_ran_may_change(copied: Path) -> None:
    edit(copied / CELL / schema.CONFIG_FILE, lambda content: content["config"].update(out="elsewhere", jobs=3))
    assert state(copied) == "done"


def test_settings_that_differ_are_said(copied: Path) -> None:
    reconfigure(copied / CELL, lambda config: config["train"].update(learning_rate=1e-3))
    (problem,) = load(copied).problems
    assert "differ in the setting train.learning_rate" in problem.message
    assert f"0.001 in {CELL}" in problem.message


def test_broken_pairing_is_loud_and_leaves_the_pair_out(copied: Path) -> None:
    for name in (schema.ENV_FILE, schema.DONE_FILE):
        edit(copied / CELL / name, lambda content: content["pairing"].update(prompt_order_sha256="f" * 64))
    runs = load(copied)
    (problem,) = runs.problems
    assert problem.severity == "error"
    assert "NOT PAIRED at seed 1, beta=0.04: prompt_order_sha256 differs" in problem.message
    comparison = {c.variant: c for c in stats.compare(runs)}["forward_kl"]
    assert (comparison.seeds, comparison.paired, comparison.unpaired) == ((0, 1, 2), (0, 2), (1,))
    with pytest.raises(ValueError, match="NOT PAIRED"):
        load(copied, strict=True)


def test_missing_hashes_are_a_warning(copied: Path) -> None:
    for name in (schema.ENV_FILE, schema.DONE_FILE):
        edit(copied / CELL / name, lambda content: content.pop("pairing"))
    (problem,) = load(copied).problems
    assert problem.severity == "warning"
    assert f"cannot be verified: hashes are missing in {CELL}" in problem.message


def test_copied_cell_is_no_second_seed(copied: Path) -> None:
    shutil.copytree(copied / CELL, copied / "forward_kl-seed9-beta0.04")
    assert state(copied, "forward_kl-seed9-beta0.04") == "damaged"
    assert any("it was copied or renamed" in message for message in errors(copied))
    edit(
        copied / "forward_kl-seed9-beta0.04" / schema.CONFIG_FILE,
        lambda c: c["cell"].update(name="forward_kl-seed9-beta0.04"),
    )
    assert any("same variant, seed and grid point as" in message for message in errors(copied))


def test_run_files_without_config(copied: Path) -> None:
    (copied / CELL / schema.CONFIG_FILE).unlink()
    assert state(copied) == "damaged"
    assert any("config.json: missing" in message for message in errors(copied))


def test_other_folders_are_no_cells(copied: Path) -> None:
    (copied / "report").mkdir()
    (copied / "report" / "done.json").write_text("{}")
    (copied / "notes").mkdir()
    assert len(load(copied, strict=True).cells) == 12


def test_no_such_folder_offers_the_nearest(demo: Path) -> None:
    with pytest.raises(ValueError, match=r"experiment_dir=.*dmeo.* is no folder; there are: demo"):
        load(demo.parent / "dmeo")


def test_primary_metric_falls_back_and_says_so(copied: Path) -> None:
    for path in copied.glob(f"*/{schema.ENV_FILE}"):
        edit(path, lambda env: env["task"].update(primary_metric="bleu"))
    runs = load(copied)
    assert runs.primary_metric == "probability"
    assert any("eval/bleu is in no eval.jsonl; eval/probability is shown" in p.message for p in runs.problems)


def test_primary_metric_is_the_tasks(copied: Path) -> None:
    for path in copied.glob(f"*/{schema.ENV_FILE}"):
        edit(path, lambda env: env["task"].update(primary_metric="accuracy", primary_label="greedy accuracy"))
    runs = load(copied, strict=True)
    assert (runs.primary_metric, runs.primary_label) == ("accuracy", "greedy accuracy")


def test_null_reads_as_nan(copied: Path) -> None:
    path = copied / CELL / schema.METRICS_FILE
    lines = path.read_text().splitlines()
    lines[3] = json.dumps(json.loads(lines[3]) | {"kl": None})
    path.write_text("\n".join(lines) + "\n")
    metrics = load(copied, strict=True).metrics
    assert metrics[(metrics["cell"] == CELL) & (metrics["step"] == 4)]["kl"].isna().all()


def test_empty_experiment(tmp_path: Path) -> None:
    runs = load(tmp_path)
    assert (len(runs.cells), runs.variants, runs.points) == (0, (), {"": {}})


def test_rollouts(demo: Path, copied: Path) -> None:
    frame = load_rollouts(demo, "reference-seed0-beta0.04")
    assert tuple(frame.columns) == schema.ROLLOUT_COLUMNS
    assert len(load_rollouts(demo, "reference-seed0-beta0.04", step=20)) == 8
    assert load_rollouts(demo, "reference-seed1-beta0.04").empty
    path = next((copied / "reference-seed0-beta0.04" / "rollouts").iterdir())
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(RunFileError, match=r"step-000020\.parquet: not a readable parquet file"):
        load_rollouts(copied, "reference-seed0-beta0.04")


def test_labels_and_order() -> None:
    assert point_label({"beta": 0.04, "epsilon": None, "model": "tiny"}) == "beta=0.04, epsilon=none, model=tiny"
    assert point_label({}) == ""
    assert variant_order(["zeta", "forward_kl", "alpha", "reference"]) == ("reference", "forward_kl", "alpha", "zeta")


def test_axes_keep_the_order_of_the_sweep(points: Path, demo: Path, tmp_path: Path) -> None:
    runs = load(points, strict=True)
    assert runs.problems == ()  # what a named point sets is no setting that differs by mistake
    assert list(runs.points.values()) == [{"point": name} for name in make_fixture.POINTS]
    assert [place(point) for point in runs.points.values()] == ["fp32", "bf16", "fp8_head"]
    later = tmp_path / "points"
    shutil.copytree(points, later)
    for path in later.glob(f"*fp8_head/{schema.CONFIG_FILE}"):  # run alone later, beside another that is no cell here
        edit(path, lambda content: content["cell"].update(axes={"point": ["int4", "fp8_head"]}))
    assert list(load(later).points) == list(runs.points)
    for path in later.glob(f"*/{schema.CONFIG_FILE}"):
        edit(path, lambda content: content["cell"].pop("axes"))
    assert list(load(later).points) == [f"point={name}" for name in sorted(make_fixture.POINTS)]


def test_a_setting_that_the_point_does_not_explain_is_said(points: Path, tmp_path: Path) -> None:
    target = tmp_path / "points"
    shutil.copytree(points, target)
    reconfigure(target / "reference-seed1-pointbf16", lambda config: config["train"].update(steps=99))
    assert ["train.steps" in str(problem) for problem in load(target).problems] == [True]
