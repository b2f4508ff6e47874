"""wandb beside the run files: one run per cell, grouped by experiment. Without `wandb.*` nothing here is touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ablate.plan import Cell
from ablate.rundir import CellDir


@contextmanager
def wandb_run(cell: Cell, directory: CellDir) -> Iterator[Any]:
    """An open wandb run that transformers' callback logs into, or None where `wandb.*` is empty.

    A resumed cell goes on in its run (same id); `wandb.*` overrides any argument of wandb.init.
    """
    options = cell.config.wandb
    if not options:
        yield None
        return
    import wandb

    defaults = {
        "group": cell.config.experiment,
        "name": cell.name,
        "id": f"{cell.config.experiment}-{cell.name}-{cell.hash[:8]}",
        "resume": "allow",
        "dir": str(directory.path),
        "config": {"cell": cell.name, "variant": cell.variant, "seed": cell.seed, **cell.point, **asdict(cell.config)},
    }
    run = wandb.init(**{**defaults, **options})
    try:
        yield run
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def log_summary(run: Any, summary: dict[str, Any]) -> None:
    """The cell's final scores in the run's summary."""
    if run is not None:
        run.summary.update({**summary["eval"], "steps": summary["steps"], "seconds": summary["seconds"]})
