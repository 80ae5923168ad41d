"""Plans the jobs of one command."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.settings import OWN, Settings

if TYPE_CHECKING:
    from evals.base import Task
    from harness.jobs.job import Job, Presets
    from harness.jobs.planning.items import Item
    from harness.models.base import ModelSource
    from harness.results.run_folder import StoredRun
    from methods.base import Method


class Planner:
    """Makes prompts once for jobs that follow one another and ask the same of the same model: those of a large task
    take minutes. `counted`: folders of runs whose time a dry run has told; `earlier`: those that it takes times from,
    by root."""

    def __init__(self) -> None:
        self._latest: tuple[str, list[Item]] = "", []  # what was asked last, and its prompts
        self.counted: set[Path] = set()
        self.earlier: dict[Path, list[StoredRun]] = {}

    def plan(
        self,
        method: Method,
        task: Task,
        model: ModelSource,
        wanted: Settings,
        presets: Presets | None = None,
    ) -> Job:
        """The job; errors are `Job.plan`'s."""
        from harness.jobs.job import Job  # and torch, which a wrong word on the command line does not wait for

        key = str((task, model, {name: value for name, value in asdict(wanted).items() if name not in OWN}))
        items = self._latest[1] if self._latest[0] == key else None
        self._latest = "", []  # two sets of prompts are never there at once
        job = Job.plan(method, task, model, wanted, items, presets)
        self._latest = key, job.items
        return job
