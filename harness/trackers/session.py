"""The trackers of one command: asked before anything runs, given every finished run at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from harness.config.errors import one_sentence
from harness.config.settings import Settings
from harness.terminal.notices import say_once
from harness.trackers.base import Tracker
from harness.trackers.tensorboard import TensorBoard
from harness.trackers.wandb import Wandb
from kernels.temporary import TemporaryFolder

MAKERS: dict[str, Callable[[Settings], Tracker]] = {
    Wandb.name: lambda settings: Wandb(settings.wandb.project, settings.wandb.entity),
    TensorBoard.name: lambda settings: TensorBoard(settings.tensorboard.folder),
}


class Trackers:
    """None by default. Whatever goes wrong here is said in a sentence; the runs are complete."""

    def __init__(self) -> None:
        self._ready: dict[Tracker, None] = {}

    def open(self, jobs: Iterable[Settings]) -> None:
        """Those that the jobs name; says what is missing."""
        named = dict.fromkeys(MAKERS[name](job) for job in jobs if not job.dry_run for name in job.trackers)
        for tracker in named:
            if reason := tracker.missing():
                say_once(f"{reason}: nothing goes to {tracker.name}, the runs go on without it")
            else:
                self._ready[tracker] = None

    def publish(self, folders: Sequence[Path]) -> None:
        if not self._ready or not folders:
            return
        try:
            with TemporaryFolder("kv-trackers-") as scratch:
                self._publish(folders, scratch)
        except KeyboardInterrupt:
            say_once("stopped sending; the runs are complete, and the same command sends them again")
        except Exception as error:
            say_once(
                f"nothing was sent to {', '.join(one.name for one in self._ready)}: {one_sentence(error).rstrip('.')}"
            )

    def _publish(self, folders: Sequence[Path], scratch: Path) -> None:
        from harness.trackers.finished import finished  # matplotlib

        for run in finished(folders, scratch):
            for tracker in self._ready:
                try:
                    tracker.publish(run)
                except Exception as error:
                    say_once(f"{run.name} was not sent to {tracker.name}: {one_sentence(error).rstrip('.')}")
