"""Trackers beside the run files: what `trl.report_to` names, and wandb. Without any, nothing here is touched.

With wandb each cell is a run in the experiment's group, and a sweep ends with one more run of the group that holds the
comparison table. TensorBoard's event files lie in the cell's folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ablate import schema
from ablate.config import Config
from ablate.errors import ConfigError, unknown
from ablate.plan import Cell
from ablate.rundir import CellDir

TENSORBOARD_DIR = "tensorboard"  # in the cell's folder


def trackers(config: Config) -> list[str]:
    """What a cell reports to, by transformers' names: `trl.report_to`, and wandb where `wandb.*` is set."""
    asked = config.trl.get("report_to") or []
    names = [asked] if isinstance(asked, str) else list(asked)
    if "all" in names:
        from transformers.integrations import get_available_reporting_integrations

        names = get_available_reporting_integrations()
    return list(dict.fromkeys(name for name in [*names, *(["wandb"] if config.wandb else [])] if name != "none"))


def check(config: Config) -> None:
    """Refuse a tracker that transformers does not know, or whose package is missing. Raises ConfigError."""
    asked = trackers(config)
    if not asked:
        return
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in asked:
        if name not in INTEGRATION_TO_CALLBACK:
            raise unknown("trl.report_to", str(name), [*INTEGRATION_TO_CALLBACK, "all", "none"])
        if name not in get_available_reporting_integrations():
            raise ConfigError(
                f"trl.report_to={name}: its package is not installed: pip install {name}, or leave it out"
            )


@contextmanager
def tracked(cell: Cell, directory: CellDir, trainer: Any) -> Iterator[Any]:
    """Trackers of a cell's trainer, from before its first evaluation to after its last; yields the wandb run, or None.

    A resumed cell goes on in its wandb run (same id); `wandb.*` overrides any argument of wandb.init.
    """
    run = None
    if "wandb" in trackers(cell.config):
        cell_config = {"cell": cell.name, "variant": cell.variant, "seed": cell.seed, **cell.point}
        run = _start(cell.config, cell.name, cell.hash[:8], directory.path, cell_config | asdict(cell.config))
    boards = [callback for callback in _callbacks(trainer) if hasattr(callback, "tb_writer")]
    for board in boards:
        board.logging_dir = str(directory.path / TENSORBOARD_DIR)
    try:
        yield run
    except BaseException:
        if run is not None:
            run.finish(exit_code=1)
        raise
    finally:
        for board in boards:
            if board.tb_writer is not None:
                board.tb_writer.close()
    if run is not None:
        run.finish()


def log_scores(trainer: Any, scores: Mapping[str, float]) -> None:
    """Held-out scores, names without prefix, as eval/<name> in every tracker."""
    logs = {f"eval_{name}": value for name, value in scores.items()}
    for callback in _callbacks(trainer):
        callback.on_log(trainer.args, trainer.state, trainer.control, model=trainer.model, logs=logs)


def log_summary(run: Any, summary: dict[str, Any]) -> None:
    """The cell's final scores in the wandb run's summary."""
    if run is not None:
        run.summary.update({**summary["eval"], "steps": summary["steps"], "seconds": summary["seconds"]})


def log_comparison(config: Config, cells: Sequence[Cell], folder: Path) -> None:
    """The report's comparison as a table of a wandb run of its own, in the group of the cells; nothing without wandb.

    The same cells again, after a report or a resume, go on in the same run. Raises what wandb raises.
    """
    if "wandb" not in trackers(config):
        return
    import pandas as pd
    import wandb

    frame = pd.read_csv(folder / schema.REPORT_DIR / "table.csv")
    rows = frame.astype(object).where(frame.notna(), None)
    identity = hashlib.sha256("".join(sorted(cell.hash for cell in cells)).encode()).hexdigest()
    told = {"cells": [cell.name for cell in cells], **asdict(config)}
    run = _start(config, "comparison", identity[:8], folder, told, job_type="comparison")
    try:
        run.log({"comparison": wandb.Table(columns=list(rows.columns), data=rows.to_numpy().tolist())})
    finally:
        run.finish()


def _start(config: Config, name: str, identity: str, folder: Path, told: dict[str, Any], **more: Any) -> Any:
    import wandb

    defaults = {
        "group": config.experiment,
        "name": name,
        "id": f"{config.experiment}-{name}-{identity}",
        "resume": "allow",
        "dir": str(folder),
        "config": told,
        **more,
    }
    return wandb.init(**{**defaults, **config.wandb})


def _callbacks(trainer: Any) -> list[Any]:
    """The trainer's callbacks that report to trackers."""
    if not trainer.args.report_to:
        return []
    from transformers.integrations import get_reporting_integration_callbacks

    kinds = tuple(get_reporting_integration_callbacks(trainer.args.report_to))
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kinds)]
