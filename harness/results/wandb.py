"""Copies finished runs to Weights & Biases (https://wandb.ai). A run never depends on its copy.

wandb's own environment decides where a copy goes (WANDB_MODE=offline keeps it on this machine).
Without a login it is written offline, into the run's folder, for `wandb sync`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from harness.config.catalogue import flatten
from harness.config.settings import WITHOUT_EFFECT
from harness.results.files import read_json
from harness.results.run_folder import SETTINGS, SUMMARY, read_info
from harness.terminal.notices import say_once

TIMEOUT_S = 60.0


def publish(folders: Iterable[Path], project: str) -> None:
    """Log configuration and numbers of each finished run in a project of the user or team that the login or
    WANDB_ENTITY names. A copy replaces an earlier one of the same folder. The first that fails ends it, with a
    sentence: a server that does not answer takes a minute for each."""
    for folder in folders:
        try:
            _log(folder, project)
        except Exception as error:
            reason = " ".join(str(error).split()).rstrip(".")
            say_once(
                f"{folder.name} was not sent to wandb ({type(error).__name__}: {reason}): run the command again"
            )
            return


def _log(folder: Path, project: str) -> None:
    import wandb

    quiet = wandb.Settings(silent=True, console="off", init_timeout=TIMEOUT_S, x_disable_stats=True)
    has_way = "WANDB_MODE" in os.environ or wandb.login(prompt=False)
    if not has_way:
        say_once(
            "there is no login to wandb (WANDB_API_KEY): send copies with `wandb sync FOLDER/wandb/offline-run-*`"
        )
    settings = read_info(folder)[SETTINGS]
    config = flatten({key: value for key, value in settings.items() if key not in WITHOUT_EFFECT})
    with wandb.init(
        project=project,
        name=folder.name,
        id=folder.name,
        resume="allow",
        config=config,
        dir=folder,
        mode=None if has_way else "offline",
        settings=quiet,
    ) as copy:
        summary = flatten(read_json(folder / SUMMARY))
        copy.log(
            {key: value for key, value in summary.items() if isinstance(value, (int, float, str))}
        )
