"""Copies runs to Weights & Biases (https://wandb.ai): one of its runs per run folder, identified by the folder's
name.

wandb's own environment decides where it goes (WANDB_MODE=offline keeps it on this machine). Without login or
network the copy is written offline, into the run's folder, for `wandb sync`.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from evals.hub import reachable
from harness.config.errors import one_sentence
from harness.config.settings import Settings
from harness.terminal.notices import say_once
from kernels.temporary import TemporaryFolder

if TYPE_CHECKING:
    from harness.trackers.finished import FinishedRun

CLOUD = "https://api.wandb.ai"
TIMEOUT_S = 60.0
ARTIFACT = "run"  # type of the artifacts


@dataclass(frozen=True)
class Wandb:
    """Send copies of runs to a project of Weights & Biases, of the user or team that the login or
    WANDB_ENTITY names."""

    project: str

    def missing(self) -> str | None:
        """Return why no run can be sent to this project, or None. It is called before anything
        runs. Where copies can only be kept offline, it prints so."""
        if find_spec("wandb") is None:
            return "the package wandb is not installed (`pip install wandb`)"
        if reason := _offline_because():
            say_once(f"{reason}: wandb keeps copies in the runs' folders, for `wandb sync FOLDER/wandb/offline-run-*`")
        return None

    def publish(self, run: FinishedRun) -> None:
        """Send a copy of `run`, which replaces an earlier one of the same run. It never asks the
        user anything, and passes on any error of wandb's."""
        import wandb

        quiet = wandb.Settings(
            silent=True, console="off", init_timeout=TIMEOUT_S, login_timeout=TIMEOUT_S, x_disable_stats=True
        )
        copy = wandb.init(
            project=self.project,
            name=run.folder.name,
            id=run.folder.name,
            resume="allow",
            config=dict(run.config),
            dir=run.folder,
            mode="offline" if _offline_because() else None,
            settings=quiet,
        )
        try:
            copy.log({f"pictures/{name}": wandb.Image(str(path)) for name, path in run.pictures.items()})
            copy.summary.update({**run.numbers, **run.words})
            artifact = wandb.Artifact(run.folder.name, ARTIFACT)
            for path in run.files:
                artifact.add_file(str(path))
            copy.log_artifact(artifact)
        except BaseException:
            copy.finish(exit_code=1)
            raise
        copy.finish()


def _offline_because() -> str | None:
    """Return why nothing can be sent; None if it can, or if wandb's own environment has decided."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return None
    server: Any = os.environ.get("WANDB_BASE_URL", CLOUD)
    if not _has_login(server):
        return "there is no login (`wandb login` or WANDB_API_KEY)"
    return None if reachable(server) else f"{server} cannot be reached"


def _has_login(server: str) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return urlsplit(server).hostname in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False


class Copies:
    """Send copies of finished runs to the projects that the jobs name; by default there are none.
    What fails here is reported in a sentence, and the runs are complete without it."""

    def __init__(self) -> None:
        self.projects: list[Wandb] = []

    def open(self, jobs: Iterable[Settings]) -> None:
        """Find the projects that the jobs name, and report what is missing for them."""
        named = [job.wandb for job in jobs if not job.dry_run]
        projects = dict.fromkeys(Wandb(job.project) for job in named if job.project is not None)
        for project in projects:
            if reason := project.missing():
                say_once(f"{reason}: nothing goes to wandb, the runs go on without it")
            else:
                self.projects.append(project)

    def publish(self, folders: Sequence[Path]) -> None:
        """Send a copy of each finished run to each project."""
        if not self.projects or not folders:
            return
        from harness.trackers.finished import finished  # matplotlib

        try:
            with TemporaryFolder("kv-trackers-") as scratch:
                for run in finished(folders, scratch):
                    for project in self.projects:
                        try:
                            project.publish(run)
                        except Exception as error:
                            say_once(f"{run.folder.name} was not sent to wandb: {one_sentence(error).rstrip('.')}")
        except KeyboardInterrupt:
            say_once("stopped sending; the runs are complete, and the same command sends them again")
