"""The command line: run, plan, report, doctor, check, replay. Imports stay light: help and plans come at once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ablate import __version__
from ablate import config as configs
from ablate import help as help_texts
from ablate.errors import ConfigError, RunFileError


def _rows(lines: Sequence[tuple[str, str, str]]) -> list[tuple[str, str]]:
    return [(f"{key}={default}" if default else key, text) for key, default, text in lines]


class OverridesCommand(click.Command):
    """A command whose help ends with the presets and every key of the configuration."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Presets (experiment=NAME)"):
            formatter.write_text(", ".join(configs.preset_names()) or "none found")
        with formatter.section("Keys (a bare name is enough where it is unique)"):
            formatter.write_dl(_rows(help_texts.key_lines()), col_max=42)
        with formatter.section("Options of the tasks"):
            formatter.write_dl(_rows(help_texts.task_lines()), col_max=42)
        with formatter.section("Examples"):
            for line in (
                "python -m ablate run variants=all",
                "python -m ablate run variants=reference,forward_kl seeds=0,1,7 grid.beta=0.04,1.0",
                "python -m ablate run experiment=precision points=bf16,fp16",
                "python -m ablate run task=gsm8k model=OWNER/NAME train.lora=true peft.r=16 train.dtype=bfloat16",
            ):
                formatter.write_text(line)


overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, package_name="grpo-ablation", prog_name="ablate")
def cli() -> None:
    """Train every GRPO loss variant from the same start on the same prompts and seeds, and compare them."""


@cli.command(cls=OverridesCommand)
@overrides
@click.option("--dry-run", is_flag=True, help="Print the resolved config and the cells; run nothing.")
def run(overrides: Sequence[str], dry_run: bool) -> None:
    """Run all cells that are not finished, then write the report.

    Finished cells are skipped and half-run ones go on from their checkpoint, so the same command finishes a sweep
    that was cut short. The exit code is 0 when every cell is done, 1 when one failed, 2 when the config was refused,
    130 after Ctrl-C.
    """
    from ablate import runner

    config = configs.load(overrides)
    if dry_run:
        _print_plan(config, full=True)
        return
    sys.exit(runner.run(config))


@cli.command(cls=OverridesCommand)
@overrides
def plan(overrides: Sequence[str]) -> None:
    """Show the grid of cells and the state of each: new, partial, done, failed, changed or damaged."""
    _print_plan(configs.load(overrides), full=False)


def _print_plan(config: configs.Config, full: bool) -> None:
    from omegaconf import OmegaConf

    from ablate import runner

    console = runner.make_console()
    planned = runner.survey(config)
    if full:
        console.print(OmegaConf.to_yaml(OmegaConf.create(configs.to_dict(config))), markup=False, highlight=False)
    console.print(runner.plan_table(planned))
    console.print(f"\n{runner.counts(planned)} in {runner.experiment_folder(config)}", highlight=False, soft_wrap=True)
    for item in planned:
        if item.problem:
            console.print(f"{item.cell.name}: {item.problem}", markup=False, highlight=False, soft_wrap=True)
    if full:
        runner.refuse_changed(planned, runner.experiment_folder(config))


@cli.command()
@click.argument("what", nargs=-1, metavar="[FOLDER | KEY=VALUE]...")
@click.option(
    "--page",
    "pages",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Instead, write anew the results that a Markdown page holds between its markers, or a notebook of FOLDERs.",
)
@click.option(
    "--committed", is_flag=True, help="Everything that shows committed results: their tables, README, log and notebook."
)
@click.option(
    "--pack",
    type=click.Path(file_okay=False, path_type=Path),
    help="Instead, copy the finished runs there, small: without rollouts and checkpoints, metrics compressed.",
)
@click.option("--rollouts", is_flag=True, help="With --pack: the stored completions too.")
def report(what: Sequence[str], pages: Sequence[Path], committed: bool, pack: Path | None, rollouts: bool) -> None:
    """Write tables, curves and report.html again, from run files alone.

    FOLDER is an experiment's folder, such as runs/default; without one it is that of experiment= and out=.
    """
    from ablate import runner

    folders = [Path(text) for text in what if "=" not in text or Path(text).is_dir()]
    given = [text for text in what if Path(text) not in folders]
    if given and (folders or pages):
        raise ConfigError(f"{given[0]}: a {'folder' if folders else 'page'} was given, so keys have no effect")
    if committed and (what or pages or pack):
        raise ConfigError("--committed takes neither folders, keys, --page nor --pack")
    if rollouts and not pack:
        raise ConfigError("--rollouts says what --pack copies; give --pack FOLDER too")
    if pack and pages:
        raise ConfigError("--pack and --page are two different things: run report twice")
    if committed or pages:
        _write_pages(folders, pages, committed)
        return
    if not folders:
        folders = [runner.experiment_folder(configs.load(given, check=False))]
    console = runner.make_console()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there are no runs; `python -m ablate run` makes them")
    if pack:
        _pack(folders, pack, rollouts)
        return
    if not all([runner.report(folder, console) for folder in folders]):
        sys.exit(runner.FAILED)


def _pack(folders: Sequence[Path], target: Path, rollouts: bool) -> None:
    from analysis.pack import pack

    try:
        for folder in folders:
            click.echo(f"{folder}: {len(pack(folder, target, rollouts=rollouts))} runs packed into {target}")
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _write_pages(folders: Sequence[Path], pages: Sequence[Path], committed: bool) -> None:
    from analysis import embed, render

    root = Path.cwd()
    try:
        for folder in embed.committed(root) if committed else ():
            render.write_kept(folder)
            click.echo(f"{folder.relative_to(root)}: written")
        for page in map(Path, embed.PAGES) if committed else pages:
            changed = embed.update(page, root, folders)
            click.echo(f"{page}: {'written' if changed else 'current'}")
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


@cli.command()
@overrides
@click.option("--strict", is_flag=True, help="Exit with 1 when something that is needed is missing.")
@click.option("--offline", is_flag=True, help="Do not try to reach the hub.")
def doctor(overrides: Sequence[str], strict: bool, offline: bool) -> None:
    """Show versions, devices, what `auto` picks and why, free memory and disk, and which model sources are there."""
    from ablate import doctor as doctors
    from ablate import runner

    config = configs.load(overrides, check=False)
    console = runner.make_console()
    with console.status("looking around"):
        findings = doctors.examine(config, network=not offline)
    console.print(doctors.table(findings))
    missing = [finding for finding in findings if finding.status == doctors.MISSING]
    if missing:
        console.print(f"\nmissing: {', '.join(finding.what for finding in missing)}", highlight=False, soft_wrap=True)
    if strict and missing:
        sys.exit(runner.FAILED)


@cli.command()
@click.argument("what", nargs=-1, metavar="[variants=all|family|NAMES]")
@click.option("--write", is_flag=True, help="Write losses/VARIANTS.md.")
@click.option("--check-current", is_flag=True, help="Fail where losses/VARIANTS.md is not what --write would write.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the certificates as JSON.")
@click.option("--markdown", "markdown_path", type=click.Path(path_type=Path), help="Write them as Markdown.")
def check(
    what: Sequence[str], write: bool, check_current: bool, json_path: Path | None, markdown_path: Path | None
) -> None:
    """Say what each loss really trains, by enumeration, and hold its claims against that.

    `variants=all` are the founding four, `variants=family` (the default) is everything registered. The exit code is 1
    where a claim does not hold.
    """
    from ablate import check as checks

    sys.exit(
        checks.main(what, write=write, check_current=check_current, json_path=json_path, markdown_path=markdown_path)
    )


@cli.command()
@click.argument("what", nargs=-1, metavar="run=FOLDER [KEY=VALUE]...")
def replay(what: Sequence[str]) -> None:
    """Put one step's stored rollouts, and the policy that drew them, through every variant: a backward pass each.

    run= is a cell's folder or an experiment's (then its reference run is taken). variants=all (the run's preset),
    family or NAMES. step=N or last. policy=drawn, final or a step: a later one makes the rollouts off-policy. beta=,
    epsilon= and the variants' other parameters replace the run's. Also device=, micro_batch_size=, tolerance= (nats).

    Writes FOLDER/replay/step-N/{replay.json, table.md, table.csv, cosine.png, cosine.svg}: gradient norms, their
    cosines, shares of surrogate and KL, norms by layer, weights of tokens. A run needs rollouts and the policy that
    drew them (train.rollouts_every, train.adapter_every); step 1 needs no policy.

    backends=triton,chunked,reference takes the variants' gradients through each loss backend instead and writes
    {backends.json, backends.md}: their relative differences; exit code 1 where one is past what the dtype allows. In
    half precision that is asked of the loss's inputs alone, since the model's own backward rounds at every layer.
    """
    from ablate import replay as replays

    sys.exit(replays.main(what))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: a refused config ends with its message and exit code 2, not with a traceback."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # says at import which kernels it could not download
    try:
        cli.main(args=None if arguments is None else list(arguments), prog_name="ablate")
    except (ConfigError, RunFileError) as error:
        click.echo(f"refused: {error}", err=True)
        sys.exit(2)
