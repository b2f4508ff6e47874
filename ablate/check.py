"""`python -m ablate check`: what does each loss really train? Certificates, held against the variants' own claims."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

import losses
from ablate.certificates import page, words
from ablate.certificates.certify import CLAIMS, Certificate, certify
from ablate.errors import ConfigError, unknown

__all__ = ["CLAIMS", "certify", "check", "main", "page_path", "select"]

OK, FAILED = 0, 1


def page_path() -> Path:
    """losses/VARIANTS.md of the installed package."""
    return Path(losses.__file__).parent / "VARIANTS.md"


def select(selector: str = "family", every: Iterable[str] = losses.founding) -> list[losses.Variant]:
    """The variants of a list of names, in which `all` stands for `every` and `family` for everything registered.

    Raises ConfigError with the nearest names where one is unknown.
    """
    groups = {"all": every, "family": losses.names()}
    chosen = [name for word in selector.split(",") if word.strip() for name in groups.get(word.strip(), [word.strip()])]
    for name in chosen:
        if name not in losses.names():
            raise unknown("variants", name, losses.names(), "variants")
    if not chosen:
        raise ConfigError("variants: no name given; use all, family or names with commas between")
    return [losses.get(name) for name in dict.fromkeys(chosen)]


def check(variants: Iterable[losses.Variant], console: Console | None = None) -> list[Certificate]:
    """A certificate for each variant, in order; a second or so each."""
    listed = list(variants)
    steps = listed if console is None else track(listed, "certificates", console=console, transient=True)
    return [certify(variant) for variant in steps]


def main(
    overrides: Sequence[str] = (),
    *,
    write: bool = False,
    check_current: bool = False,
    json_path: Path | None = None,
    markdown_path: Path | None = None,
    console: Console | None = None,
) -> int:
    """Runs the check and prints it. The exit code is 1 where a claim or behaviour fails or VARIANTS.md is not current.

    Args:
        overrides: `variants=...`, at most once.
        write: write losses/VARIANTS.md; check_current: fail where it differs from what would be written. Both need the
            whole family.
        json_path, markdown_path: where to write the certificates as well.

    Raises:
        ConfigError: an unknown variant or key, or a page asked for with a part of the family.
    """
    console = console or Console()
    selector = "family"
    for text in overrides:
        key, _, given = text.partition("=")
        if key != "variants" or not given:
            raise ConfigError(f"{text}: check takes variants=all, variants=family or variants=NAME,NAME")
        selector = given
    chosen = select(selector)
    if (write or check_current) and len(chosen) != len(losses.names()):
        raise ConfigError(f"variants={selector}: {page_path().name} holds every variant; leave variants out")
    certificates = check(chosen, console)
    text = page.markdown(certificates)
    if json_path is not None:
        json_path.write_text(json.dumps(page.as_json(certificates), indent=1) + "\n", encoding="utf-8")
    if markdown_path is not None:
        markdown_path.write_text(text, encoding="utf-8")
    if write:
        page_path().write_text(text, encoding="utf-8")

    console.print(page.terminal_table(certificates))
    known = {c.variant.name: c for c in certificates}
    if set(losses.founding) | {"k3_is", "exact_reverse_kl"} <= set(known):
        console.print(f"\nIs a Q missing? {words.answer(known)}", markup=False, highlight=False)
    failures = [line for c in certificates for line in words.problems_found(c)]
    if check_current:
        failures += _differences(text)
    for line in failures:
        console.print(f"FAILED {line}", style="red", markup=False, highlight=False, soft_wrap=True)
    if not failures:
        plural = "" if len(certificates) == 1 else "s"
        console.print(f"\n{len(certificates)} variant{plural}: every claim holds", highlight=False)
        if unclaimed := [name for name, c in known.items() if not c.variant.claims]:
            console.print(f"without claims: {', '.join(unclaimed)}", markup=False, highlight=False)
    return FAILED if failures else OK


def _differences(text: str) -> list[str]:
    """What keeps the page from being current: its first differing lines."""
    path = page_path()
    there = path.read_text(encoding="utf-8") if path.exists() else ""
    if there == text:
        return []
    changed = [line for line in difflib.unified_diff(there.splitlines(), text.splitlines(), lineterm="", n=0)
               if line[:1] in "+-" and line[:3] not in ("+++", "---")]  # fmt: skip
    return [f"losses/{path.name} is not current: run `python -m ablate check --write`", *changed[:4]]
