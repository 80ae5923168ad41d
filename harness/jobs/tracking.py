"""`results.wandb=PROJECT`: a finished run's summary, sent to Weights & Biases beside the run folder.

Off by default. wandb's own environment decides where it goes (WANDB_MODE=offline keeps it on this machine). Nothing is
asked and no run is lost: without login or network the summaries are kept beside the runs.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.config.settings import SettingsError
from harness.models.snapshots import reachable
from harness.terminal.notices import say_once

CLOUD = "https://api.wandb.ai"


def mode_now() -> str | None:
    """wandb's mode for this command: None for its own choice, `offline` where nothing could be sent; says so before
    any work. Raises `SettingsError` without the package."""
    if find_spec("wandb") is None:
        raise SettingsError("results.wandb needs the package wandb: run `pip install wandb`, or leave it out.")
    if os.environ.get("WANDB_MODE", "online") != "online":
        return None
    server = os.environ.get("WANDB_BASE_URL", CLOUD)
    if not _has_login(server):
        missing = "there is no login (`wandb login` or WANDB_API_KEY)"
    elif not reachable(server):
        missing = f"{server} cannot be reached"
    else:
        return None
    say_once(f"{missing}: summaries are kept in each run's folder, for `wandb sync FOLDER/wandb/offline-run-*`")
    return "offline"


def _has_login(server: str) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return urlsplit(server).hostname in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False


def publish(
    project: str, folder: Path, config: Mapping[str, Any], summary: Mapping[str, Any], mode: Any = None
) -> None:
    """One wandb run per run folder, found again by the folder's name."""
    import wandb

    named: dict[str, Any] = {"project": project, "name": folder.name, "id": folder.name}
    run = wandb.init(**named, resume="allow", config=dict(config), dir=folder, mode=mode)
    run.summary.update(dict(numbers(summary)))
    run.finish()


def numbers(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All numbers and words of a summary under dotted names; lists and nulls are left out."""
    for name, value in summary.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float, str, bool)):
            yield f"{prefix}{name}", value
