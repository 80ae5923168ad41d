"""`results.wandb=PROJECT`: a finished run's summary, sent to Weights & Biases beside the run folder.

Off by default. wandb's own environment decides where it goes (WANDB_MODE=offline keeps it on this machine).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def publish(project: str, folder: Path, config: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """One wandb run per run folder, found again by the folder's name."""
    import wandb

    run = wandb.init(project=project, name=folder.name, id=folder.name, resume="allow", config=dict(config), dir=folder)
    run.summary.update(dict(numbers(summary)))
    run.finish()


def numbers(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All numbers and words of a summary under dotted names; lists and nulls are left out."""
    for name, value in summary.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float, str, bool)):
            yield f"{prefix}{name}", value
