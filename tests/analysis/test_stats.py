"""Intervals, verdicts and power against scipy, against simulation and against what can be worked out by hand."""

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from ablate import schema
from analysis import stats
from analysis.load import Runs, load
from analysis.stats import Baseline, Comparison, t_interval

finite = st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False)


def by_variant(runs: Runs, point: str = "beta=0.04", **options: Baseline) -> dict[str, Comparison]:
    return {c.variant: c for c in stats.compare(runs, **options) if c.point == point}


@given(st.lists(finite, min_size=2, max_size=12).filter(lambda v: np.std(v) > 1e-9 * (1 + np.abs(v).max())))
def test_interval_is_scipys(values: list[float]) -> None:
    mine = t_interval(values, 0.9)
    scipy = reference.ttest_1samp(values, 0)
    low, high = scipy.confidence_interval(0.9)
    assert (mine.low, mine.high) == pytest.approx((low, high), rel=1e-9, abs=1e-9)
    assert mine.p == pytest.approx(scipy.pvalue, rel=1e-6, abs=1e-12)
    assert mine.resolved == (low > 0 or high < 0)


def test_one_value_has_no_interval_and_none_no_mean() -> None:
    one, none = t_interval([0.3]), t_interval([])
    assert (one.n, one.mean, one.resolved) == (1, 0.3, None)
    assert math.isnan(one.sd) and math.isnan(one.low) and math.isnan(one.high)
    assert (none.n, none.resolved) == (0, None)
    assert math.isnan(none.mean)


@pytest.mark.parametrize(("value", "resolved"), [(0.0, False), (0.1, True), (-0.1, True)])
@pytest.mark.parametrize("n", [2, 3, 7])
def test_equal_values_give_zero_width(value: float, resolved: bool, n: int) -> None:
    interval = t_interval([value] * n)
    assert (interval.mean, interval.low, interval.high, interval.sd) == (value, value, value, 0.0)
    assert interval.resolved is resolved
    assert interval.p == (0.0 if resolved else 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="values hold NaN or infinity"):
        t_interval([0.1, value])


@pytest.mark.parametrize("level", [0, 1, 95])
def test_level_out_of_range(level: float) -> None:
    with pytest.raises(ValueError, match="level="):
        t_interval([0.1, 0.2], level)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_coverage_of_the_interval(n: int) -> None:
    """Of 4,000 simulated experiments 95 % cover the truth; a percentile bootstrap over 3 seeds falls far short."""
    rng = np.random.default_rng(7)
    truth, repeats = 0.02, 4000
    samples = truth + 0.05 * rng.standard_normal((repeats, n))
    intervals = [t_interval(sample) for sample in samples]
    covered = np.mean([i.low <= truth <= i.high for i in intervals])
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / repeats)
    if n == 3:
        means = samples[np.arange(repeats)[:, None, None], rng.integers(0, n, (repeats, 400, n))].mean(axis=2)
        low, high = np.percentile(means, [2.5, 97.5], axis=1)
        assert np.mean((low <= truth) & (truth <= high)) < 0.8


@pytest.mark.parametrize(("n", "difference"), [(3, 0.1), (3, 0.2), (8, 0.05), (16, 0.02)])
def test_power_against_simulation(n: int, difference: float) -> None:
    rng = np.random.default_rng(11)
    repeats, sd = 4000, 0.05
    samples = difference + sd * rng.standard_normal((repeats, n))
    resolved = np.mean([i.resolved and i.mean > 0 for i in map(t_interval, samples)])
    assert resolved == pytest.approx(stats.power(difference, sd, n), abs=4 * math.sqrt(0.25 / repeats))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16, 100])
@pytest.mark.parametrize("sd", [1e-6, 0.02, 30.0])
def test_smallest_difference_and_seeds_needed_agree(n: int, sd: float) -> None:
    smallest = stats.smallest_difference(n, sd)
    assert stats.power(smallest, sd, n) == pytest.approx(0.8, abs=1e-6)
    assert stats.seeds_needed(smallest * 1.0001, sd) == n
    assert stats.seeds_needed(-smallest * 1.0001, sd) == n
    assert stats.seeds_needed(smallest * 0.999, sd) == n + 1


def test_power_at_its_edges() -> None:
    assert stats.power(0.1, 0.0, 3) == 1.0
    assert stats.power(0.0, 0.1, 3) == stats.power(0.1, 0.1, 1) == 0.0
    assert stats.power(1e9, 1e-9, 2) == 1.0
    assert stats.seeds_needed(0.1, 0.0) == 2
    assert stats.seeds_needed(0.0, 0.1) is None
    assert stats.seeds_needed(1e-9, 1.0) is None
    assert stats.smallest_difference(3, 0.0) == 0.0
    assert math.isnan(stats.smallest_difference(1, 0.1))
    with pytest.raises(ValueError, match="sd="):
        stats.smallest_difference(3, -1.0)
    with pytest.raises(ValueError, match="target="):
        stats.seeds_needed(0.1, 0.1, target=1.5)


@given(st.floats(0.001, 10), st.integers(2, 40))
def test_power_grows_with_seeds(ratio: float, n: int) -> None:
    assert stats.power(ratio, 1.0, n + 1) >= stats.power(ratio, 1.0, n) - 1e-9


def test_sd_interval_is_chi_squared() -> None:
    low, high = stats.sd_interval(1.0, 3)
    assert (low, high) == pytest.approx((0.5207, 6.2847), abs=1e-4)
    rng = np.random.default_rng(3)
    sds = rng.standard_normal((4000, 3)).std(axis=1, ddof=1)
    covered = np.mean([a <= 1 <= b for a, b in (stats.sd_interval(s, 3) for s in sds)])
    assert abs(covered - 0.95) < 0.015


def test_holm_by_hand() -> None:
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]
    assert stats.holm([]) == []


def test_comparison_against_pandas(demo: Path) -> None:
    runs = load(demo)
    finals = {}
    for folder in demo.iterdir():
        cell = json.loads((folder / schema.CONFIG_FILE).read_text())["cell"]
        last = json.loads((folder / schema.EVAL_FILE).read_text().splitlines()[-1])
        finals[cell["variant"], cell["seed"], cell["point"]["beta"]] = last["eval/probability"]
    table = pd.Series(finals).unstack(0)
    for c in stats.compare(runs):
        at_point = table.xs(runs.points[c.point]["beta"], level=1)
        assert c.final.mean == pytest.approx(at_point[c.variant].mean())
        assert c.final.sd == pytest.approx(at_point[c.variant].std(), abs=1e-15)
        assert c.gain.mean == pytest.approx(at_point[c.variant].mean() - 0.345)
        if c.variant == "reference":
            assert (c.difference, c.verdict) == (None, "baseline")
            continue
        difference = at_point[c.variant] - at_point["reference"]
        low, high = reference.ttest_1samp(difference, 0).confidence_interval()
        assert c.difference is not None
        assert (c.difference.mean, c.difference.low, c.difference.high) == pytest.approx((difference.mean(), low, high))
        assert c.paired == (0, 1, 2)


def test_what_does_not_move_at_all(demo: Path) -> None:
    still = by_variant(load(demo))["no_detach"]
    assert (still.gain.mean, still.gain.low, still.gain.high) == (0, 0, 0)
    assert still.weights_moved is False
    assert still.verdict == "lower"


def test_identical_runs(copied: Path) -> None:
    """A variant that ends bit for bit where the baseline ends is neither resolved nor merely unresolved."""
    for seed in range(3):
        source, target = copied / f"reference-seed{seed}-beta0.04", copied / f"forward_kl-seed{seed}-beta0.04"
        shutil.copy(source / schema.EVAL_FILE, target)
        shutil.copy(source / schema.METRICS_FILE, target)
        done = json.loads((target / schema.DONE_FILE).read_text())
        done["eval"] = json.loads((source / schema.DONE_FILE).read_text())["eval"]
        (target / schema.DONE_FILE).write_text(json.dumps(done))
    comparison = by_variant(load(copied))["forward_kl"]
    assert comparison.verdict == "identical"
    assert comparison.difference is not None and comparison.difference.resolved is False


def test_seeds_are_paired_not_pooled(copied: Path) -> None:
    """A shift common to both runs of a seed leaves the difference and its interval alone."""
    before = by_variant(load(copied))["forward_kl"].difference
    for variant, (seed, shift) in itertools.product(("reference", "forward_kl"), enumerate((0.2, -0.2, 0.0))):
        folder = copied / f"{variant}-seed{seed}-beta0.04"
        rows = [json.loads(line) for line in (folder / schema.EVAL_FILE).read_text().splitlines()]
        rows[-1]["eval/probability"] += shift
        (folder / schema.EVAL_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = json.loads((folder / schema.DONE_FILE).read_text())
        done["eval"]["eval/probability"] += shift
        (folder / schema.DONE_FILE).write_text(json.dumps(done))
    after = by_variant(load(copied))["forward_kl"]
    assert before is not None and after.difference is not None
    assert (after.difference.low, after.difference.high) == pytest.approx((before.low, before.high))
    assert after.final.sd > 0.1


def test_missing_cells(copied: Path) -> None:
    shutil.rmtree(copied / "reference-seed0-beta0.04")
    shutil.rmtree(copied / "forward_kl-seed1-beta0.04")
    found = by_variant(load(copied))
    assert (found["forward_kl"].seeds, found["forward_kl"].paired) == ((0, 2), (2,))
    assert (found["forward_kl"].planned, found["forward_kl"].verdict) == (3, "n = 1")
    assert found["full_reverse_kl"].paired == (1, 2)
    for folder in copied.glob("reference-*"):
        shutil.rmtree(folder)
    assert by_variant(load(copied))["forward_kl"].verdict == "no result"


def test_another_baseline(demo: Path) -> None:
    runs = load(demo)
    plain, turned = by_variant(runs), by_variant(runs, baseline=Baseline("forward_kl"))
    assert turned["forward_kl"].verdict == "baseline"
    assert turned["reference"].difference is not None and plain["forward_kl"].difference is not None
    assert turned["reference"].difference.mean == pytest.approx(-plain["forward_kl"].difference.mean)


def test_value_that_is_not_finite_is_no_result(copied: Path) -> None:
    folder = copied / "forward_kl-seed1-beta0.04"
    rows = [json.loads(line) for line in (folder / schema.EVAL_FILE).read_text().splitlines()]
    rows[-1]["eval/probability"] = None
    (folder / schema.EVAL_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = json.loads((folder / schema.DONE_FILE).read_text())
    done["eval"]["eval/probability"] = None
    (folder / schema.DONE_FILE).write_text(json.dumps(done))
    assert by_variant(load(copied))["forward_kl"].seeds == (0, 2)


def test_summary_of_a_cell(demo: Path) -> None:
    runs = load(demo)
    row = stats.summarise(runs).set_index("cell").loc["reference-seed0-beta0.04"]
    metrics = runs.metrics[runs.metrics["cell"] == "reference-seed0-beta0.04"]
    assert row["kl"] == pytest.approx(metrics["kl"].iloc[-2:].mean())
    assert row["weight_distance"] == metrics["weight_distance"].iloc[-1]
    assert row["step_time"] == pytest.approx(metrics["step_time"].iloc[1:].median())
    assert metrics["step_time"].iloc[0] > 2 * row["step_time"]
    assert row["peak_memory_bytes"] == 512 * 2**20


def test_one_variant_is_compared_along_the_axis(points: Path) -> None:
    """Named points against the first of the sweep, by hand; weights that the dtype rounds differently are no fault."""
    runs = load(points)
    assert list(runs.points) == ["point=fp32", "point=bf16", "point=fp8_head"]  # not by the alphabet
    assert stats.baseline_of(runs) == Baseline(point="point=fp32")
    finals = runs.evals.groupby(["point", "seed"])["eval/probability"].last().unstack(0)
    first, bf16, fp8 = stats.compare(runs)
    assert (first.verdict, bf16.verdict, fp8.verdict) == ("baseline", "not resolved", "lower")
    for c in (bf16, fp8):
        difference = finals[c.point] - finals["point=fp32"]
        low, high = reference.ttest_1samp(difference, 0).confidence_interval()
        assert c.difference is not None and c.paired == (0, 1, 2)
        assert (c.difference.mean, c.difference.low, c.difference.high) == pytest.approx((difference.mean(), low, high))
        assert (c.against, c.group, c.differing) == ("fp32", "reference", ("initial_weights_sha256",))
    assert (bf16.label, fp8.label) == ("bf16", "fp8_head")


def test_points_on_other_data_are_no_pair(points: Path, tmp_path: Path) -> None:
    target = tmp_path / "points"
    shutil.copytree(points, target)
    folder = target / "reference-seed1-pointbf16"
    for name in (schema.ENV_FILE, schema.DONE_FILE):
        content = json.loads((folder / name).read_text())
        content["pairing"]["data_sha256"] = "e" * 64
        (folder / name).write_text(json.dumps(content))
    bf16 = stats.compare(load(target))[1]
    assert (bf16.paired, bf16.unpaired) == ((0, 2), (1,))


def test_every_kind_of_baseline(demo: Path) -> None:
    """Along the variants, along the points and to one cell: the same differences, taken from the same finals."""
    runs = load(demo)
    finals = runs.evals.groupby(["variant", "point", "seed"])["eval/probability"].last()
    for baseline in (Baseline("no_detach"), Baseline(point="beta=1"), Baseline("forward_kl", "beta=0.04")):
        found = stats.compare(runs, baseline=baseline)
        assert len(found) == 8
        for c in found:
            other = (baseline.variant or c.variant, baseline.point or c.point)
            assert (c.verdict == "baseline") == (other == (c.variant, c.point))
            if c.difference is not None:
                assert c.difference.mean == pytest.approx((finals[c.variant, c.point] - finals[other]).mean())
    assert {c.against for c in found} == {"forward_kl beta 0.04"}
    assert stats.baseline_of(runs) == Baseline("reference")


def test_values_logged_every_few_steps(demo: Path) -> None:
    """The exact KL of the last tenth of the steps; where none lies in it, the last."""
    runs = load(demo)
    rows = runs.metrics[runs.metrics["cell"] == "reference-seed0-beta1"].set_index("step")["kl_exact/reverse"]
    assert rows.dropna().index.tolist() == [4, 8, 12, 16, 20]
    assert stats.summarise(runs).set_index("cell").loc["reference-seed0-beta1", "kl_exact/reverse"] == rows[20]
    cut = dataclasses.replace(runs, metrics=runs.metrics[runs.metrics["step"] < 20])
    assert stats.summarise(cut).set_index("cell").loc["reference-seed0-beta1", "kl_exact/reverse"] == rows[16]
