"""Copies runs to Weights & Biases (https://wandb.ai): one of its runs per run folder, identified by the folder's
name.

wandb's own environment decides where it goes (WANDB_MODE=offline keeps it on this machine). Without login or
network the copy is written offline, into the run's folder, for `wandb sync`.
"""

from __future__ import annotations

import netrc
import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from evals.hub import reachable
from harness.terminal.notices import say_once

if TYPE_CHECKING:
    from harness.trackers.finished import FinishedRun

CLOUD = "https://api.wandb.ai"
TIMEOUT_S = 60.0
ARTIFACT = "run"  # type of the artifacts


@dataclass(frozen=True)
class Wandb:
    """Name a project of Weights & Biases, of the user or team that the login or WANDB_ENTITY names."""

    project: str

    def missing(self) -> str | None:
        """Return why no run can be sent, or None. It is called before anything runs, and prints what will be done
        differently."""
        if find_spec("wandb") is None:
            return "the package wandb is not installed (`pip install wandb`)"
        if reason := _offline_because():
            say_once(f"{reason}: wandb keeps copies in the runs' folders, for `wandb sync FOLDER/wandb/offline-run-*`")
        return None

    def publish(self, run: FinishedRun) -> None:
        """Send a copy of `run`, which replaces an earlier one of the same run. It asks nothing, and may raise
        anything."""
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
