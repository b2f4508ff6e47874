"""The report as a whole: complete, self-contained, escaped, the same every time, whatever state cells are in."""

import html.parser
import re
from pathlib import Path

import pytest

from analysis import files
from analysis.files import write_atomic
from analysis.render import FIGURES, Report, write_report

HOSTILE = "<script>alert('7|8')</script>"


class Page(html.parser.HTMLParser):
    """Tags with attributes, and the text outside of style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


@pytest.fixture(scope="module")
def page(report: Report) -> Page:
    (path,) = [p for p in report.paths if p.suffix == ".html"]
    return Page(path.read_text(encoding="utf-8"))


def test_all_files_are_there(report: Report) -> None:
    names = {path.name for path in report.paths}
    assert {"table.md", "table.csv", "table.tex", "report.html"} <= names
    assert {f"{figure.name}.{kind}" for figure in FIGURES for kind in ("png", "svg")} <= names
    assert all(path.stat().st_size > 100 for path in report.paths)
    folder = report.paths[0].parent
    assert {p.name for p in folder.iterdir()} == names  # no temporary file is left


def test_page_loads_nothing_and_runs_nothing(page: Page) -> None:
    assert page.open == []
    assert not {"script", "link", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href"):
                assert value is not None and value.startswith(("data:image/", "#")), (tag, value)
    (policy,) = [a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'")
    assert len([tag for tag, _ in page.tags if tag == "img"]) == len(FIGURES)
    targets = {a["id"] for _, a in page.tags if "id" in a}
    assert {a["href"] for t, a in page.tags if t == "a"} <= {f"#{name}" for name in targets}


def test_page_tells_everything(page: Page, report: Report) -> None:
    for sentence in report.sentences:
        assert sentence in page.text
    for text in (
        HOSTILE,
        "24 of 24 cells finished",
        "train.learning_rate",
        "packages.torch",
        "right_answer 1, format 1",
    ):
        assert text in page.text


def test_terminal_text(report: Report) -> None:
    lines = report.text.splitlines()
    assert lines[0] == "demo: held-out probability of the right answer"
    assert max(len(line) for line in report.table_text.splitlines()) <= 110
    assert any(
        re.match(r"beta 0.04: no_detach does not learn: -0\.4\d+ \[-0\.\d+, -0\.\d+\] against reference, n = 3", s)
        for s in lines
    )
    assert lines[-1].endswith("report.html")
    assert (report.problems, report.unfinished) == ((), ())


def test_markdown_and_latex_files(report: Report) -> None:
    folder = report.paths[0].parent
    text = (folder / "table.md").read_text(encoding="utf-8")
    assert text.count("\n## ") == 7
    assert "| full_reverse_kl |" in text
    latex = (folder / "table.tex").read_text(encoding="utf-8")
    assert r"full\_reverse\_kl & 0.04 & 3" in latex
    assert latex.count(r"\begin{table}") == latex.count(r"\end{table}") == 1


def test_partial_sweep(partial: Path, tmp_path: Path) -> None:
    report = write_report(partial, tmp_path / "one")
    assert report.unfinished[0].startswith("no_detach-seed0-beta0.04: failed (ValueError at step 8")
    assert [line.rsplit(": ")[-1] for line in report.unfinished[1:]] == ["partial", "new"]
    page = Page((tmp_path / "one" / "report.html").read_text(encoding="utf-8"))
    assert "Traceback (most recent call last)" in page.text
    assert "at step 8 for <eos>" in page.text
    again = write_report(partial, tmp_path / "two")
    for first, second in zip(report.paths, again.paths, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name


def test_damage_is_shown_not_raised(copied: Path) -> None:
    folders = sorted(copied.iterdir())
    (folders[0] / "config.json").write_text("{")
    (folders[1] / "metrics.jsonl").write_text("no json\n")
    (folders[2] / "eval.jsonl").unlink()
    (folders[3] / "done.json").unlink()
    (copied / "reference-seed0-beta0.04" / "rollouts" / "step-000020.parquet").write_bytes(b"PAR1")
    report = write_report(copied)
    assert report.paths[0].parent == copied / "report"
    text = report.text
    for place in (
        f"{folders[0].name}/config.json:1: the file is cut short",
        f"{folders[1].name}/metrics.jsonl:1: not valid JSON",
        f"{folders[2].name}/eval.jsonl: no evaluation, yet the cell is done",
        f"{folders[3].name}: partial",
        "reference-seed0-beta0.04/rollouts/step-000020.parquet: not a readable parquet file",
    ):
        assert place in text
    page = Page((copied / "report" / "report.html").read_text(encoding="utf-8"))
    assert all(str(problem) in page.text for problem in report.problems)
    assert [p.severity for p in report.problems] == sorted(p.severity for p in report.problems)
    assert write_report(copied).table_text == report.table_text  # its own folder is no cell


def test_no_cells(tmp_path: Path) -> None:
    report = write_report(tmp_path)
    assert report.sentences == ("No cell has a readable config, so there is nothing to compare.",)


def test_output_that_cannot_be_written(partial: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"cannot write the report file .*table\.md: .*argument out"):
        write_report(partial, tmp_path / "file")


def test_old_file_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomic(tmp_path / "table.md", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(ValueError, match="No space left on device"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["table.md"]


def test_no_such_experiment(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="experiment_dir="):
        write_report(tmp_path / "nowhere")
