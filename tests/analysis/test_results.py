"""The committed results: every number in a page is what the committed run files give."""

import json
import re
import shutil
from pathlib import Path

import pytest
from scipy import stats as distributions

from analysis import embed, samples, scores, stats
from analysis.load import committed, load, load_rollouts
from analysis.render import gather

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = embed.committed(ROOT)
PAGES = [ROOT / page for page in embed.PAGES if page.endswith(".md")]


def test_there_are_results() -> None:
    shown = [match["folder"] for match in embed.MARKERS.finditer(PAGES[0].read_text(encoding="utf-8"))]
    assert [f.relative_to(ROOT).as_posix() for f in EXPERIMENTS][: len(shown)] == shown != []
    assert len(EXPERIMENTS) > len(shown)  # those that only the log and the notebook show


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_hold_what_the_run_files_give(page: Path) -> None:
    assert embed.render(page.read_text(encoding="utf-8"), ROOT) == page.read_text(encoding="utf-8"), (
        "python -m ablate report --committed"
    )


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_tables_are_made_again_from_the_run_files(folder: Path) -> None:
    runs = load(folder)
    assert len(runs.done) == len(runs.cells) > 0
    assert not [problem for problem in runs.problems if problem.severity == "error"]
    assert gather(runs).markdown() == (folder / "report" / "table.md").read_text(), (
        "python -m ablate report --committed"
    )


def test_the_log_and_the_readme_say_which_completions_take_both_steps() -> None:
    runs = load(committed("founding"))
    table = samples.matching(runs, *samples.BOTH_STEPS)
    pages = [page.read_text(encoding="utf-8") for page in PAGES[:2]]
    assert table.markdown(notes=False) in pages[1] and len(table.rows) == len(runs.variants) == 7
    scores_over_steps = scores.score_table(runs)
    assert scores_over_steps is not None and scores_over_steps.markdown(notes=False) in pages[1]
    rows, told = {row[0]: row[1:] for row in table.rows}, set()
    for line in (line for line in pages[0].splitlines() if re.search(r"(\| \d+/\d+ \d+/\d+ (\d+/\d+|-) ){4}", line)):
        first, *shown = (cell.strip() for cell in line.strip("|").split("|"))
        (variant,) = set(re.findall(r"\w+", first)) & set(runs.variants)
        told.add(variant)
        assert shown == [rows[variant][i] for i in (1, 2, 3, 5)]  # steps 51, 101, 151, 251
    assert told == set(runs.variants)
    assert all(cell.endswith(" -") for cell in rows["exact_forward_kl"])  # no run with seed 2


def test_what_the_pages_say_of_the_founding_runs() -> None:
    """The figures in their sentences, from the run files."""
    runs = load(committed("founding"))
    readme, log = (" ".join(page.read_text(encoding="utf-8").split()) for page in PAGES[:2])
    summary = stats.summarise(runs).set_index(["variant", "seed"])
    last = runs.evals.sort_values("step").groupby(["variant", "seed"])[runs.primary_column].last()
    counts = samples.matching(runs, *samples.BOTH_STEPS).frame.set_index(["step", "variant", "seed"]).loc[251]
    two_steps = counts["hits"] / counts["n"] > 0.5
    odd = ("full_reverse_kl", 1)
    assert min(last[two_steps[two_steps].index.drop(odd)]) > 0.92 and max(last[two_steps[~two_steps].index]) < 0.44
    assert two_steps[odd] and f"first step is mostly wrong ({last[odd]:.2f})" in readme

    def reached(*variants: str) -> tuple[int, int]:
        good = [last[key] > 0.92 for key in last.index if key[0] in variants]
        return sum(good), len(good)

    forward, reverse = ("reference", "exact_forward_kl"), ("k3_is", "exact_reverse_kl")
    assert [reached(*names) for names in (forward, reverse, ("full_reverse_kl", "forward_kl"))] == [
        (5, 5),
        (4, 6),
        (0, 6),
    ]
    p = distributions.fisher_exact([[4, 2], [0, 6]]).pvalue
    assert f"p = {p:.2f}" in readme and f"p = {p:.2f} by Fisher's test" in log

    learned = summary[last.reindex(summary.index) > 0.9]["kl_exact/forward"]
    spans = (learned[[key[0] in names for key in learned.index]] for names in (reverse, forward))
    assert " against ".join(f"{kl.min():.2f} to {kl.max():.2f}" for kl in spans) in log

    asked = re.compile(r"What is (\d+ [-+] \d+) [-+] \d+\?[^?\n]*\n.*<reasoning>\1 ([-+] \d+) = (-?\d+) \2 = -?\d+")
    stored = load_rollouts(runs.directory, "full_reverse_kl-seed1", 251, columns=["prompt", "completion"]).astype(str)
    found = [match for row in stored.itertuples(index=False) if (match := asked.search("\n".join(row)))]
    wrong = sum(_value(match[1]) != int(match[3]) for match in found)
    assert f"the first step wrong in {wrong} of {len(found)}" in log


def _value(term: str) -> int:
    left, sign, right = term.split()
    return int(left) + (int(right) if sign == "+" else -int(right))


def test_the_kernels_of_a_decode_step_add_up_to_what_is_said() -> None:
    page = (ROOT / "experiments" / "results" / "rollout" / "README.md").read_text(encoding="utf-8")
    kernels = [  # without the operators, whose kernels are listed too
        row for row in measured("rollout/h200", "decode")["kernels"] if not re.fullmatch(r"\w+::\w+", row["name"])
    ]

    def ms(*parts: str) -> str:
        return f"{sum(row['us'] for row in kernels if any(part in row['name'] for part in parts)) / 1e3:.2f}"

    fill, shrink, expand = ms("FillFunctor<float>"), ms("lora_shrink"), ms("lora_expand")
    assert f"fill {fill}, shrink {shrink}, expand {expand} | {ms('FillFunctor<float>', 'lora_')} |" in page
    assert f"about 780 kernels of {ms('')} ms" in page and 775 < sum(row["a_token"] for row in kernels) < 785


def measured(folder: str, file: str) -> dict:
    return json.loads((ROOT / "experiments" / "results" / folder / f"{file}.json").read_text())


def test_the_readme_says_what_was_measured_on_a_gpu() -> None:
    """Each cell of its table of kernels and rollouts, against the raw files."""
    readme = PAGES[0].read_text(encoding="utf-8")
    table = [line for line in readme.splitlines() if line.startswith("| ")]

    def cells(start: str) -> list[str]:
        (line,) = (line for line in table if line.startswith(f"| {start}"))
        return [cell.strip().replace("*", "") for cell in line.strip("|").split("|")][1:]

    def ratio(row: dict) -> str:
        return f"{row['wall_over_floor']:.2f}"

    def gib(row: dict, gradients: int) -> float:
        return (row["peak_extra_bytes"] + gradients) / 2**30

    names, hidden, weight = ("triton", "unsloth", "trl", "full"), 2 * 16384 * 4096, 2 * 4096 * 128256
    frozen, train = ({row["row"]: row for row in measured("kernels", name)["rows"]} for name in ("frozen", "train"))
    fp8 = ratio(frozen["triton-fp8"])
    assert cells("LM head + loss") == [
        f"{ratio(frozen['triton'])} (fp8: {fp8})",
        *(ratio(frozen[n]) for n in names[1:]),
    ]
    assert cells("the same, trained head") == [ratio(train[name]) for name in names]
    memory = [(gib(frozen[name], hidden), gib(train[name], hidden + weight)) for name in names]
    assert cells("memory") == [f"{a:.2f} / {b:.1f}" if a < 10 else f"{a:.1f} / {b:.1f}" for a, b in memory]
    both = ([head[name]["errors"]["d_hidden"][0] for head in (frozen, train)] for name in names)
    errors = [" / ".join(f"{error:.1e}".replace("e-0", "e-") for error in pair) for pair in both]
    assert cells("error of d hidden") == errors
    kl = {row["row"]: row for row in measured("kernels", "exact_kl")["rows"] if row["direction"] == "reverse"}
    assert cells("exact reverse KL") == [ratio(kl["triton"]), "", ratio(kl["trl"]), ""]
    ours, stock = measured("rollout/h200", "small")["triton"], measured("rollout/h200", "stock")
    step = ours["step_seconds_median"] / stock["step_seconds_median"]
    assert cells("step of SmolLM2") == [f"{step:.2f}", "", "1", ""]


def test_a_number_typed_by_hand_is_found(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    match = embed.MARKERS.search(text)
    assert match is not None
    edited = text.replace("0.369", "0.396", 1)
    assert edited != text and embed.render(edited, ROOT) == text


def test_a_page_without_markers_or_runs_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no block"):
        embed.update(page, ROOT)
    page.write_text("<!-- results runs/none -->\n<!-- end of results -->\n")
    with pytest.raises(ValueError, match="no such folder"):
        embed.update(page, ROOT)


def test_update_writes_only_what_changed(tmp_path: Path) -> None:
    folder = next(folder for folder in EXPERIMENTS if folder.name == "default")
    shutil.copytree(folder, tmp_path / "default")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results default -->\nof yesterday\n<!-- end of results -->\nafter\n")
    assert embed.update(page, tmp_path) and not embed.update(page, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n")
    assert "of yesterday" not in text and "no_detach" in text
