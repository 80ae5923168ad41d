"""Keeps which jobs of sweeps have begun, for `harness.status`: a file for each in `sweeps/jobs` below results.root,
which is renamed once its job begins. Imports no hydra."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.config.settings import WITHOUT_EFFECT, settings_of
from harness.results.files import digest

WAITING, BEGUN = ".waiting", ".begun"


def note(config: Mapping[str, Any], label: str) -> None:
    """Note a job that waits for its turn, by its label in the sweep, unless an earlier command has begun it. A folder
    that takes no file is a matter of the job itself."""
    file = _file(config)
    with suppress(OSError):
        if not file.with_suffix(BEGUN).exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(label, encoding="utf-8")


def begin(config: Mapping[str, Any]) -> None:
    """Note that a job begins or cannot begin, if it was part of a sweep."""
    with suppress(OSError, ValueError):
        file = _file(config)
        file.rename(file.with_suffix(BEGUN))


def waiting(folder: Path) -> list[str]:
    """Return the labels of the jobs below a folder that have not begun."""
    return sorted(
        file.read_text(encoding="utf-8") for file in folder.rglob(f"sweeps/jobs/*{WAITING}")
    )


def _file(config: Mapping[str, Any]) -> Path:
    root = settings_of(config).results.root
    asked = {key: value for key, value in config.items() if key not in WITHOUT_EFFECT}
    return Path(root, "sweeps", "jobs", digest(asked)[:16] + WAITING)
