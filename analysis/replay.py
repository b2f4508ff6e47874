"""Replays: one batch of rollouts through every variant, as `python -m ablate replay` measured it, in tables and a
picture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

from ablate import schema
from analysis import plots
from analysis.files import Problem, RunFileError, read_json, write_atomic
from analysis.formats import MISSING, Table, escape_markdown, number
from analysis.load import Runs
from analysis.style import RC

BASELINE = "reference"
KINDS = ("embeddings", "attention", "MLP", "norms", "head", "other")
SIGNS = ("positive", "negative", "zero")
SMALL = 8  # variants up to which the picture's matrices stand side by side
MATRICES = {"cosine": "Cosine of the gradients", "cosine_kl": "Cosine of the KL parts of the gradients"}
SAME = 1e-6  # relative difference below which two gradients are called the same
NEEDED = ("cell", "step", "policy", "model", "completions", "tokens", "parameters", "checks", "layers", "position_bins",
          "variants", "cosine", "cosine_kl")  # fmt: skip
OF_VARIANT = ("name", "params", "grad_norm", "surrogate_norm", "kl_norm", "surrogate_share", "kl_share",
              "cosine_surrogate_kl", "clip_fraction", "norm_by_group", "token_weight")  # fmt: skip


@dataclass(frozen=True)
class Replay:
    """A replay.json: its variants, one dict each, in the order asked for, and what surrounds them."""

    path: Path
    data: Mapping[str, Any]

    @property
    def variants(self) -> list[dict[str, Any]]:
        return list(self.data["variants"])

    @property
    def names(self) -> list[str]:
        return [v["name"] for v in self.variants]

    @property
    def baseline(self) -> int:
        """Index of the variant that the others are compared with: reference, else the first."""
        return self.names.index(BASELINE) if BASELINE in self.names else 0

    @property
    def name(self) -> str:
        """File name without ending, whatever the file calls its cell."""
        policy = self.data["policy"]
        name = f"replay-{self.data['cell']}-step{self.data['step']}" + (
            f"-policy{policy['step']}" if policy["off_policy"] else ""
        )
        return re.sub(r"[^A-Za-z0-9._+-]+", "_", name)[:200]

    @property
    def title(self) -> str:
        policy = self.data["policy"]
        off = f", policy of step {policy['step']} (off-policy)" if policy["off_policy"] else ""
        betas = sorted({v["params"]["beta"] for v in self.variants})
        return (
            f"Replay of {self.data['cell']}, step {self.data['step']}{off}: {self.data['completions']} completions, "
            f"{self.data['tokens']} tokens, beta {', '.join(f'{b:g}' for b in betas)}"
        )


def read(path: Path) -> Replay:
    """Raises RunFileError where the file is damaged or of another kind."""
    data = read_json(path)
    missing = [name for name in NEEDED if name not in data]
    if not missing:
        missing = [name for v in data["variants"] for name in OF_VARIANT if name not in v]
        count = len(data["variants"])
        if not count or any(len(data[key]) != count for key in ("cosine", "cosine_kl")):
            missing.append("a variant for each row of its matrices")
    if missing:
        raise RunFileError(path, None, f"no replay: it lacks {missing[0]}; run `python -m ablate replay` again")
    return Replay(path, data)


def find(runs: Runs) -> tuple[list[Replay], list[Problem]]:
    """The replays of an experiment, its own before its cells', by step; files that cannot be read as warnings."""
    folders = [runs.directory, *(runs.directory / cell for cell in runs.cells["cell"])]
    found, problems = [], []
    for folder in folders:
        for path in sorted(folder.glob(f"{schema.REPLAY_DIR}/*/{schema.REPLAY_FILE}")):
            try:
                replay = read(path)
                tables(replay), sentences(replay)  # a value of the wrong kind shows here
                found.append(replay)
            except RunFileError as error:
                problems.append(Problem("warning", error.reason, path.relative_to(runs.directory).as_posix()))
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
                why = f"no replay: {type(error).__name__}: {error}; run `python -m ablate replay` again"
                problems.append(Problem("warning", why, path.relative_to(runs.directory).as_posix()))
    unique = {replay.name: replay for replay in reversed(found)}
    return [replay for replay in found if unique[replay.name] is replay], problems


def sentences(replay: Replay) -> list[str]:
    """What was verified, and which gradients are zero or the same."""
    checks = [f"{c['what']} {c['difference']:.1g} ({c['against']})" for c in replay.data["checks"]]
    lines = [f"Recomputed against stored: {'; '.join(checks)}." if checks else "Nothing stored to check the policy by."]
    training = replay.data.get("training")
    if training:
        lines.append(
            f"Training logged a gradient norm of {training['grad_norm']:.6g} for {replay.data['trained_variant']} at "
            f"this step; the replay differs by {training['relative_difference']:.1g} of it."
        )
    origin = replay.data.get("provenance") or {}
    if origin.get("command"):
        sha = (origin.get("git") or {}).get("sha")
        lines.append(f"Command: {origin['command']}" + (f"; commit {sha[:12]}." if sha else "."))
    zero = [v["name"] for v in replay.variants if v["grad_norm"] == 0]
    if zero:
        lines.append(f"No gradient at all: {', '.join(zero)}.")
    lines += [f"The same gradient: {', '.join(group)}." for group in same_gradient(replay)]
    return lines


def same_gradient(replay: Replay) -> list[list[str]]:
    """Variants whose gradients differ by less than SAME of their norm, in groups of two or more."""
    groups: list[list[int]] = []
    norms = [v["grad_norm"] for v in replay.variants]
    for i, norm in enumerate(norms):
        if norm == 0:
            continue
        for group in groups:
            cosine = replay.data["cosine"][group[0]][i]
            gap = math.sqrt(max(0.0, norm**2 + norms[group[0]] ** 2 - 2 * cosine * norm * norms[group[0]]))
            if gap <= SAME * norm:
                group.append(i)
                break
        else:
            groups.append([i])
    return [[replay.names[i] for i in group] for group in groups if len(group) > 1]


def summary_table(replay: Replay) -> Table:
    """A row per variant: norms of the gradient and its parts, cosine to the baseline, clipping, weight by sign."""
    base = replay.baseline
    headers = ("variant", "gradient", "surrogate", "beta x KL", "KL share", "KL vs surrogate",
               f"cosine to {replay.names[base]}", "clipped", "weight of A > 0", "weight of A < 0")  # fmt: skip
    places = [f"token_weight/{_range(*edges)}" for edges in replay.data["position_bins"]]
    rows, frame = [], []
    for i, v in enumerate(replay.variants):
        signs = v["token_weight"]["by_sign"]
        cosine = replay.data["cosine"][base][i]
        rows.append(
            (
                v["name"],
                *(_short(v[key]) for key in ("grad_norm", "surrogate_norm", "kl_norm")),
                _share(v["kl_share"]),
                _signed(v["cosine_surrogate_kl"]),
                _signed(cosine, 4),
                _share(v["clip_fraction"], 2),
                _share(signs["positive"]["share"]),
                _share(signs["negative"]["share"]),
            )
        )
        kinds = norm_by_kind(replay, v)
        frame.append(
            {
                "variant": v["name"],
                "beta": v["params"]["beta"],
                "loss": v.get("loss"),
                **{key: v[key] for key in OF_VARIANT[2:9]},
                f"cosine_to_{replay.names[base]}": cosine,
                **{f"norm/{kind}": value for kind, value in kinds.items()},
                **dict(zip(places, v["token_weight"]["by_position"], strict=True)),
                **{f"token_weight/{s}": signs[s]["mean"] for s in SIGNS},
                **{f"token_weight_share/{s}": signs[s]["share"] for s in SIGNS},
            }
        )
    exact = [v["name"] for v in replay.variants if v.get("exact_kl")]
    notes = [
        "gradient, surrogate, beta x KL: L2 norms over the trained parameters, before gradient clipping; KL share: "
        "norm of beta x KL over the sum of both norms; KL vs surrogate: their cosine",
        "weight of A > 0: share of the sum of |d loss / d log-prob| on tokens of completions with a positive advantage",
    ]
    if exact:
        notes.append(
            f"token weights of {', '.join(exact)}: of the surrogate, an exact KL is no function of single log-probs"
        )
    return Table(
        replay.name, replay.title, headers, tuple(rows), "l" + "r" * 9, pd.DataFrame(frame), notes=tuple(notes)
    )


def layer_table(replay: Replay) -> Table:
    """Gradient norm of every variant by kind of layer, and the number of parameters of each."""
    kinds = [k for k in KINDS if any(layer["kind"] == k for layer in replay.data["layers"])]
    counts = {k: sum(x["parameters"] for x in replay.data["layers"] if x["kind"] == k) for k in kinds}
    values = [norm_by_kind(replay, v) for v in replay.variants]
    rows = [(v["name"], *(_short(x[k]) for k in kinds)) for v, x in zip(replay.variants, values, strict=True)]
    frame = [{"variant": v["name"], **x} for v, x in zip(replay.variants, values, strict=True)]
    headers = ("variant", *(f"{k} ({counts[k]:,})" for k in kinds))
    return Table(
        f"{replay.name}-kinds", "Gradient norm by kind of layer (parameters)", headers, tuple(rows), "l" + "r" *
        len(kinds), pd.DataFrame(frame),
    )  # fmt: skip


def block_table(replay: Replay) -> Table:
    """Gradient norm of every variant in every layer group, a row per group."""
    rows, frame = [], []
    for layer in replay.data["layers"]:
        values = [v["norm_by_group"][layer["name"]] for v in replay.variants]
        rows.append((layer["name"], f"{layer['parameters']:,}", *(_short(x) for x in values)))
        frame.append(
            {"group": layer["name"], "parameters": layer["parameters"], **dict(zip(replay.names, values, strict=True))}
        )
    headers = ("layer group", "parameters", *replay.names)
    align = "lr" + "r" * len(replay.names)
    return Table(
        f"{replay.name}-layers", "Gradient norm by layer group", headers, tuple(rows), align, pd.DataFrame(frame)
    )


def weight_table(replay: Replay) -> Table:
    """Mean |d loss / d log-prob| of a token, times the number of tokens, by position and by the advantage's sign."""
    places = [_range(*edges) for edges in replay.data["position_bins"]]
    rows, frame = [], []
    for v in replay.variants:
        weight = v["token_weight"]
        values = [*weight["by_position"], *(weight["by_sign"][s]["mean"] for s in SIGNS)]
        rows.append((v["name"], *(_short(x) for x in values)))
        frame.append(dict(zip(("variant", *places, *SIGNS), (v["name"], *values), strict=True)))
    return Table(
        f"{replay.name}-weights",
        "Weight of a token: mean |d loss / d log-prob| x tokens",
        ("variant", *places, "A > 0", "A < 0", "A = 0"),
        tuple(rows),
        "l" + "r" * (len(places) + 3),
        pd.DataFrame(frame),
    )


def cosine_table(replay: Replay, what: str = "cosine") -> Table:
    """The pairwise cosines of the gradients, or of their KL parts ("cosine_kl"); a dash where one is 0."""
    matrix = replay.data[what]
    rows = [(name, *(_signed(c, 4) for c in row)) for name, row in zip(replay.names, matrix, strict=True)]
    frame = pd.DataFrame(matrix, columns=replay.names)
    frame.insert(0, "variant", replay.names)
    return Table(
        f"{replay.name}-{what.replace('_', '-')}", MATRICES[what], ("variant", *replay.names), tuple(rows),
        "l" + "r" * len(replay.names), frame,
    )  # fmt: skip


def tables(replay: Replay) -> list[Table]:
    """All tables of a replay, the summary first."""
    cosines = [cosine_table(replay, what) for what in MATRICES]
    return [summary_table(replay), layer_table(replay), weight_table(replay), *cosines, block_table(replay)]


def norm_by_kind(replay: Replay, variant: Mapping[str, Any]) -> dict[str, float]:
    """Gradient norm over all layer groups of a kind."""
    squares: dict[str, float] = {}
    for layer in replay.data["layers"]:
        squares[layer["kind"]] = squares.get(layer["kind"], 0.0) + variant["norm_by_group"][layer["name"]] ** 2
    return {kind: math.sqrt(total) for kind, total in squares.items()}


def cosine_matrix(replay: Replay) -> plots.Plot:
    """Pairwise cosines, a square each: of the gradients, and of their KL parts alone. Blue: along; red: against; grey
    with a dash: one of the two is 0.
    """
    with matplotlib.rc_context({**RC, "axes.grid": False, "axes.spines.left": False, "axes.spines.bottom": False}):
        names = replay.names
        small = len(names) <= SMALL
        side = len(names) * (0.44 if small else 0.32) + 0.09 * max(map(len, names))
        width, height = max(side + 0.4, 2.9), max(side + 0.4, 2.7)
        across, down = (2, 1) if small else (1, 2)
        figure = plots.Plot(figsize=(across * width + 1.0, down * height + 0.7), layout="constrained")
        plots.FigureCanvasAgg(figure)
        panels = figure.subplots(down, across, squeeze=False).ravel()
        colors = matplotlib.colormaps["RdBu"].with_extremes(bad="#d9d9d9")
        for axes, (what, title) in zip(panels, MATRICES.items(), strict=True):
            matrix = replay.data[what]
            values = [[math.nan if c is None else c for c in row] for row in matrix]
            image = axes.imshow(values, cmap=colors, vmin=-1, vmax=1)
            axes.set_xticks(range(len(names)), names, rotation=90)
            axes.set_yticks(range(len(names)), names)
            axes.tick_params(length=0)
            axes.set_title(title)
            for i, row in enumerate(matrix):
                for j, c in enumerate(row):
                    tone = "#555555" if c is None else "white" if abs(c) > 0.65 else "black"
                    text = "–" if c is None else _two_digits(c)
                    label = axes.text(j, i, text, ha="center", va="center", fontsize=6.5 if small else 5, color=tone)
                    label.set_in_layout(False)  # it lies within its square
        policy = replay.data["policy"]
        off = f", policy of step {policy['step']}" if policy["off_policy"] else ""
        figure.suptitle(f"{replay.data['cell']}, step {replay.data['step']}{off}", fontsize=9)
        bar = figure.colorbar(image, ax=panels, shrink=0.8 if small else 0.3, ticks=[-1, -0.5, 0, 0.5, 1])
        bar.outline.set_visible(False)
    return figure


def markdown(replay: Replay) -> str:
    """Sentences and all tables; the picture beside it."""
    blocks = [
        f"# {escape_markdown(replay.title)}",
        "\n".join(f"- {escape_markdown(line)}" for line in sentences(replay)),
    ]
    for i, table in enumerate(tables(replay)):
        blocks.append((f"## {escape_markdown(table.title)}\n\n" if i else "") + table.markdown())
        if table.name.endswith("-cosine"):
            blocks.append("![Cosines](cosine.png)")
    return "\n\n".join(block.rstrip() for block in blocks) + "\n"


def write(replay: Replay, folder: Path) -> list[Path]:
    """table.md, table.csv, cosine.png and cosine.svg, each in one move. Raises ValueError where it cannot be
    written.
    """
    return [
        write_atomic(folder / "table.md", markdown(replay)),
        write_atomic(folder / "table.csv", summary_table(replay).csv()),
        *plots.save(cosine_matrix(replay), folder / "cosine"),
    ]


def _short(value: float | None) -> str:
    """Four significant digits."""
    if value is None:
        return MISSING
    if value == 0 or not math.isfinite(value) or 1e-4 <= abs(value) < 1e6:
        return number(value, max(0, 3 - math.floor(math.log10(abs(value)))) if value and math.isfinite(value) else 3)
    return f"{value:.3e}"


def _share(value: float | None, digits: int = 1) -> str:
    return MISSING if value is None else "0" if value == 0 else f"{100 * value:.{digits}f} %"


def _signed(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:+.{digits}f}"


def _two_digits(value: float) -> str:
    """Two decimals that never call a cosine 1 which is not."""
    text = f"{value:.2f}"
    if abs(float(text)) < 1 or abs(value) > 1 - 1e-6:
        return text
    return ">.99" if value > 0 else "<-.99"


def _range(start: int, stop: int) -> str:
    """Positions in a completion, counted from 1."""
    return f"token {stop}" if stop - start == 1 else f"tokens {start + 1}-{stop}"
