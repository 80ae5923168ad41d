"""TensorBoard: event files with scalars, pictures, the table, and the settings as hparams, which compares runs.

`tensorboard --logdir results/runs` shows all runs below that folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from harness.trackers.base import FinishedRun, Tracker

NAME = "tensorboard"
# Columns of the hparams page, where a run has them
COMPARED = ("score.mean", "full.diff", "ttft_s.p50", "tpot_s.p50", "memory.kv_device_bytes", "budget.attended.share")


@dataclass(frozen=True)
class TensorBoard(Tracker):
    """`folder`: one folder per run below it; None for `tensorboard` in each run's own."""

    name: ClassVar[str] = NAME

    folder: str | None

    def missing(self) -> str | None:
        return (
            None if find_spec("tensorboard") else "the package tensorboard is not installed (`pip install tensorboard`)"
        )

    def publish(self, run: FinishedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = Path(self.folder) / run.name if self.folder else run.folder / NAME
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        with SummaryWriter(str(place)) as writer:
            for key, value in run.numbers.items():
                writer.add_scalar(tag(key), value, 0)
            for name, path in run.pictures.items():
                writer.add_image(f"pictures/{name}", _pixels(path), 0, dataformats="HWC")
            writer.add_text("table", run.table, 0)
            for key, word in run.words.items():
                writer.add_text(tag(key), word, 0)
            for record in _hparams(run):
                writer.file_writer.add_summary(record)


def tag(key: str) -> str:
    """TensorBoard groups by what stands before the first slash."""
    return key.replace(".", "/", 1)


def _pixels(path: Path) -> Any:
    from matplotlib.image import imread

    return imread(path)


def _hparams(run: FinishedRun) -> Any:
    """The three records that make a run a row of the hparams page; its metrics are the scalars above."""
    from torch.utils.tensorboard.summary import hparams

    return hparams(_plain(run.config), {tag(key): run.numbers[key] for key in COMPARED if key in run.numbers})


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """hparams knows numbers, words and true or false."""
    return {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in config.items()}
