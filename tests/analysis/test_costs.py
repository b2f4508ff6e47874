"""Times, memory, what a repetition takes, and how far the sampler is from the trainer, worked out by hand."""

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ablate import schema
from analysis import costs, stats, tables
from analysis.embed import block
from analysis.formats import MISSING
from analysis.load import load
from analysis.style import PARTS
from tests.analysis import make_fixture


def shown(table: tables.Table, row: int = 0) -> dict[str, str]:
    return dict(zip(table.headers, table.rows[row], strict=True))


def test_times_with_and_without_the_newer_columns(demo: Path, partial: Path, points: Path) -> None:
    new, old, gpu = (costs.timing_table(load(folder)) for folder in (demo, partial, points))
    parts = ("sync", "old_logps", "reference")
    assert set(parts) <= set(new.headers) and not set(parts) & set(old.headers)
    assert "logps" in old.headers and "logps" not in new.headers
    assert any(note.startswith("logps: old and reference") for note in old.notes)
    assert {"GPU busy", "card MiB"} <= set(gpu.headers) and not {"GPU busy", "card MiB"} & set(new.headers)
    assert (shown(gpu)["GPU busy"], shown(gpu)["card MiB"], shown(gpu)["s/run"]) == ("61 %", "32768", "90.0")
    assert shown(new)["peak MiB"] == "512" and any("memory of the process" in note for note in new.notes)
    assert any("device's allocator" in note for note in gpu.notes)


def test_a_step_too_short_for_a_sample_of_the_gpu_is_left_out(points: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(points, tmp_path / "points"))
    for path in target.glob(f"*/{schema.METRICS_FILE}"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            if path.parent.name.endswith("bf16") or (path.parent.name.endswith("fp32") and row["step"] % 3):
                del row[schema.GPU_BUSY]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = costs.timing_table(load(target))
    busy = {row[1]: dict(zip(table.headers, row, strict=True))["GPU busy"] for row in table.rows}
    assert busy == {"fp32": "61 %", "bf16": MISSING, "fp8_head": "61 %"}


def test_every_part_has_its_colour_in_order() -> None:
    assert [part for part in PARTS if part != "logps"] == list(schema.PARTS)


def test_a_row_is_the_median_without_the_first_step(demo: Path) -> None:
    runs = load(demo)
    part = runs.metrics[(runs.metrics["variant"] == "forward_kl") & (runs.metrics["point"] == "beta=1")]
    frame = costs.timing_table(runs).frame
    row = frame[(frame["variant"] == "forward_kl") & (frame["beta"] == 1)].iloc[0]
    later = part[part["step"] > 1]
    assert row["step_time"] == later["step_time"].median() < part["step_time"].mean()
    assert row["time/reference"] == later["time/reference"].median()


def test_steps_on_one_batch_of_rollouts_count_together(demo: Path) -> None:
    runs = load(demo)
    cell = runs.done["cell"].iloc[0]
    runs.configs[cell] = {**runs.configs[cell], "train": {"num_iterations": 2}}
    mine = runs.metrics["cell"] == cell
    drew = mine & (runs.metrics["step"] % 2 == 1)  # every second step draws rollouts, which take a second
    runs.metrics.loc[mine, ["time/rollout", "step_time", "tokens_per_second", "peak_memory_bytes"]] = 0.0, 1.0, 600.0, 1
    runs.metrics.loc[drew, ["time/rollout", "step_time", "tokens_per_second", "peak_memory_bytes"]] = 1.0, 2.0, 300.0, 9
    columns = ["time/rollout", "step_time", "tokens_per_second", "peak_memory_bytes"]
    rounds = stats.rounds(runs, cell, columns)
    assert len(rounds) == (mine.sum() + 1) // 2 - 1
    assert rounds.iloc[0].tolist() == pytest.approx([0.5, 1.5, 400.0, 9.0])  # 1,200 tokens in three seconds


def test_minutes_count_what_ran_side_by_side_once(points: Path, tmp_path: Path) -> None:
    runs = load(points)
    assert costs.minutes(runs) == (pytest.approx(9 * 1.5), pytest.approx(9 * 1.5))
    target = tmp_path / "points"
    shutil.copytree(points, target)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for index, folder in enumerate(sorted(target.iterdir())):  # 90 s each, 60 s apart, on two cards in turn
        done = json.loads((folder / schema.DONE_FILE).read_text())
        done["finished_at"] = (start + timedelta(seconds=60 * index)).isoformat()
        (folder / schema.DONE_FILE).write_text(json.dumps(done))
        env = json.loads((folder / schema.ENV_FILE).read_text())
        env["environment"] = {"CUDA_VISIBLE_DEVICES": str(index % 2)}
        (folder / schema.ENV_FILE).write_text(json.dumps(env))
    wall, gpu = costs.minutes(load(target))
    assert (wall, gpu) == (pytest.approx((90 + 8 * 60) / 60), pytest.approx(9 * 1.5))


@pytest.mark.parametrize(
    ("done", "environment", "seconds"),
    [
        ({"finished_at": "2026-01-01T00:10:00+00:00", "seconds": 60.0, "wall_seconds": 90.0}, {}, 90),
        (
            {"finished_at": "2026-01-01T00:10:00+00:00", "seconds": 60.0},
            {"started_at": "2026-01-01T00:08:00+00:00"},
            120,
        ),
        # resumed: the last session was shorter than all steps together
        ({"finished_at": "2026-01-01T00:10:00+00:00", "seconds": 400.0, "wall_seconds": 90.0}, {}, 400),
        ({"finished_at": "2026-01-01T00:10:00+00:00"}, {"started_at": "2026-01-01T00:08:00"}, 120),
        ({"finished_at": "2026-01-01T00:10:00+00:00"}, {}, None),
        ({"finished_at": "yesterday", "seconds": 60.0}, {}, None),
        ({"finished_at": "2026-01-01T00:10:00+00:00"}, {"started_at": "2027-01-01T00:08:00+00:00"}, None),
    ],
)
def test_how_long_a_cell_took(copied: Path, done: dict, environment: dict, seconds: float | None) -> None:
    folder = copied / "reference-seed0-beta0.04"
    for name, content in ((schema.DONE_FILE, done), (schema.ENV_FILE, environment)):
        stored = json.loads((folder / name).read_text())
        for key in ("finished_at", "seconds", "wall_seconds", "started_at"):
            stored.pop(key, None)
        (folder / name).write_text(json.dumps(stored | content))
    row = load(copied).cells.set_index("cell").loc[folder.name]
    lasted = row["ended"] - row["began"]
    assert lasted.total_seconds() == seconds if seconds else str(lasted) == "NaT"


def test_what_a_repetition_takes(demo: Path, points: Path) -> None:
    rows = dict(costs.repeat_table(load(demo)).rows)
    assert rows["command"] == "python -m ablate run experiment=demo"
    assert rows["commit"] == make_fixture.SHA and rows["Python"] == "3.11.15"
    assert rows["packages"] == "torch 2.13.0, transformers 5.17.0, trl 1.16.0"
    assert rows["device"] == "CPU Example CPU, 2 cores, 1 thread a run"
    assert rows["model, SHA-256"] == make_fixture.digest("model")
    assert rows["data, SHA-256"] == make_fixture.pairing(0)["data_sha256"]
    assert "GPU minutes" not in rows and rows["runs, minutes"].startswith("24 runs, ")
    gpu = dict(costs.repeat_table(load(points)).rows)
    assert (gpu["device"], gpu["GPU minutes"]) == ("Example GPU, CUDA 13.0", "13.5")
    assert gpu["loss backend, rollouts"] == "triton, vllm"
    first, second = gpu["initial weights, SHA-256"].split("; ")
    assert len(first) == len(second) == 12


def test_several_commits_and_edited_code_are_all_named(copied: Path) -> None:
    path = copied / "forward_kl-seed1-beta0.04" / schema.ENV_FILE
    env = json.loads(path.read_text())
    env["git"] = {"sha": "b" * 40, "dirty": True}
    path.write_text(json.dumps(env))
    rows = dict(costs.repeat_table(load(copied)).rows)
    assert rows["commit"].split("; ") == [make_fixture.SHA, f"{'b' * 40}, with changes that are in no commit"]


def test_a_page_says_how_to_repeat(points: Path) -> None:
    text = block(load(points))
    for line in ("- GPU minutes: 13.5", "- command: python -m ablate run experiment=demo", "| reference | fp8_head |"):
        assert line in text
    assert "|  step | rollout | sync | reward | old_logps | reference |  loss | optimizer | GPU busy |" in text


def test_the_sampler_beside_the_trainer(demo: Path, points: Path) -> None:
    assert tables.mismatch_table(load(demo)) is None
    table = tables.mismatch_table(load(points))
    assert table is not None
    assert [row[3] for row in table.rows] == ["1.0e-06 → 1.0e-06", "0.0020 → 0.0020", "0.012 → 0.012"]
    fp8 = shown(table, 2)
    assert (fp8["largest"], fp8["ratio mean"], fp8["ratio min"], fp8["ratio q95"]) == (
        "0.48",
        "1.001",
        "0.940",
        "1.036",
    )
