"""What a tracker is, and what it gets of a finished run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run in its table. Keys are dotted, as in the CSV of a report."""

    folder: Path
    config: Mapping[str, Any]  # flat; values as yaml has them
    numbers: Mapping[str, float]  # of summary.json: scores 0-1 (groups, intervals), seconds, bytes
    words: Mapping[str, str]  # of summary.json: method, task, status ...
    pictures: Mapping[str, Path]  # PNG: heat maps of the run, the frontier of its table
    table: str  # Markdown, with its notes and alarms
    files: Sequence[Path]  # summary.json, run.json, config.yaml, and the table as table.md

    @property
    def name(self) -> str:
        return self.folder.name


class Tracker(ABC):
    """Frozen dataclasses of their settings. `name`: as `trackers` names it."""

    name: ClassVar[str]

    @abstractmethod
    def missing(self) -> str | None:
        """What keeps it from taking any run, in words; None where nothing does. Asked before anything runs; may note
        what it will do differently (`say_once`)."""

    @abstractmethod
    def publish(self, run: FinishedRun) -> None:
        """A copy of `run`, in place of an earlier one of the same run. Asks nothing; may raise anything."""
