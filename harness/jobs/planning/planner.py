"""Plans the jobs of one command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.settings import OWN, Settings

if TYPE_CHECKING:
    from evals.base import Task
    from harness.jobs.job import Job, Presets
    from harness.jobs.planning.items import Item
    from harness.models.base import ModelSource
    from harness.results.store import StoredRun
    from methods.base import Method


class Planner:
    """Makes prompts once for all jobs that ask the same of the same model: those of a large task take minutes.
    `counted`: folders of runs whose time a dry run has told; `earlier`: those that it takes times from, by root."""

    def __init__(self) -> None:
        self._made: dict[str, list[Item]] = {}
        self.counted: set[Path] = set()
        self.earlier: dict[Path, list[StoredRun]] = {}

    def plan(
        self,
        method: Method,
        task: Task,
        model: ModelSource,
        wanted: Settings,
        items: Sequence[Item] | None = None,
        presets: Presets | None = None,
    ) -> tuple[str, Job]:
        """-> what the job has in common with those that share its prompts, as a key; the job. Errors: `Job.plan`'s."""
        from harness.jobs.job import Job  # and torch, which a wrong word on the command line does not wait for

        common = {name: value for name, value in asdict(wanted).items() if name not in OWN}
        key = str((task, model, common, [item.sha256 for item in items or ()]))
        job = Job.plan(method, task, model, wanted, items or self._made.pop(key, None), presets)
        self._made[key] = job.items
        return key, job

    def let_go(self) -> None:
        """Of all prompts but the latest, which the next job of a grid mostly asks for again."""
        self._made = dict(list(self._made.items())[-1:])
