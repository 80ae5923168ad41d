"""Sends the copies of one command to Weights & Biases: projects are opened before anything runs, copies sent at the
end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.config.errors import one_sentence
from harness.config.settings import Settings
from harness.terminal.notices import say_once
from harness.trackers.wandb import Wandb
from kernels.temporary import TemporaryFolder


class Copies:
    """Send copies of runs to the projects of the jobs; by default there is none. What fails here is reported in a
    sentence, and the runs are complete."""

    def __init__(self) -> None:
        self.projects: list[Wandb] = []

    def open(self, jobs: Iterable[Settings]) -> None:
        """Find the projects that the jobs name, and report what is missing for them."""
        named = [job.wandb for job in jobs if not job.dry_run]
        projects = dict.fromkeys(Wandb(one.project) for one in named if one.project is not None)
        for project in projects:
            if reason := project.missing():
                say_once(f"{reason}: nothing goes to wandb, the runs go on without it")
            else:
                self.projects.append(project)

    def publish(self, folders: Sequence[Path]) -> None:
        """Send a copy of each finished run to each project."""
        if not self.projects or not folders:
            return
        try:
            with TemporaryFolder("kv-trackers-") as scratch:
                self._publish(folders, scratch)
        except KeyboardInterrupt:
            say_once("stopped sending; the runs are complete, and the same command sends them again")
        except Exception as error:
            say_once(f"nothing was sent to wandb: {one_sentence(error).rstrip('.')}")

    def _publish(self, folders: Sequence[Path], scratch: Path) -> None:
        from harness.trackers.finished import finished  # matplotlib

        for run in finished(folders, scratch):
            for project in self.projects:
                try:
                    project.publish(run)
                except Exception as error:
                    say_once(f"{run.folder.name} was not sent to wandb: {one_sentence(error).rstrip('.')}")
