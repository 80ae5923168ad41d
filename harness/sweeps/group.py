"""Runs composed jobs as one group, whoever asked for them: a single command, a sweep, a launcher's worker."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.config import plugins
from harness.config.compose import built, refuse_unknown
from harness.config.errors import is_memory, one_sentence
from harness.config.overrides import Partial
from harness.config.settings import Settings, settings_of
from harness.jobs.planning.machine import check_machine, check_results
from harness.jobs.planning.planner import Planner
from harness.sweeps.jobs import JobConfig
from harness.terminal.notices import complain_once

if TYPE_CHECKING:
    from harness.jobs.job import Job
    from harness.results.run_folder import StoredRun

OnPlan = Callable[[int, "Job", "Job | None"], None]  # place of the job, the job, the Full beside it


class Trouble(NamedTuple):
    """An error in a sentence. `place`: of the job that could not be planned for it."""

    error: Exception
    sentence: str
    place: int | None

    def concerns(self, folder: Path) -> bool:
        """Whether it failed the run in this folder, whose error.txt a note then names."""
        return any(f"{folder}/" in note for note in self._notes)

    @property
    def is_everyones(self) -> bool:
        return self.place is None and not self._notes

    @property
    def _notes(self) -> list[str]:
        return getattr(self.error, "__notes__", [])


class JobGroup:
    """Jobs that run together, and what becomes of them. Errors are said at once if `aloud`."""

    def __init__(self, jobs: Sequence[JobConfig], partial: Partial, planner: Planner, aloud: bool = True) -> None:
        self.jobs, self.partial, self.planner, self.aloud = jobs, partial, planner, aloud
        self.made: list[StoredRun] = []
        self.troubles: list[Trouble] = []

    @property
    def folders(self) -> list[Path]:
        """Of finished runs, Full before what is held against it."""
        pairs = [(made.full_folder, made.folder) for made in self.made]
        return list(dict.fromkeys(folder for pair in pairs for folder in pair if folder))

    def run(self, on_plan: OnPlan | None = None) -> None:
        """An error fails its own job alone. A dry run shows what the job would do."""
        jobs = []
        for place, composed in enumerate(self.jobs):
            try:
                method, task, model, settings = self._built(composed.config)
                job = self.planner.plan(method, task, model, settings, composed.presets)
                full = job.full
                if settings.dry_run:
                    self._show(job)
                    continue
                if on_plan:
                    on_plan(place, job, full)
                jobs.append(job)
            except Exception as error:
                self._note(error, place)
        if jobs:
            from harness.jobs.evaluate import evaluate_together

            self.made = evaluate_together(jobs, self._note)
        self._give_back_memory()

    def _built(self, config: Mapping[str, Any]) -> tuple[Any, Any, Any, Settings]:
        """What the machine or its data lack is said before torch is imported."""
        settings = settings_of(config)
        refuse_unknown(config)
        check_machine(settings)
        check_results(settings)
        plugins.build(config["task"], "task", self.partial["task"]).require(settings.data.folder())
        return built(config, self.partial)

    def _show(self, job: Job) -> None:
        from harness.jobs.dry_run import show

        show(job, self.planner)

    def _note(self, error: Exception, place: int | None = None) -> None:
        self.troubles.append(Trouble(error, one_sentence(error), place))
        if self.aloud:
            complain_once(self.troubles[-1].sentence)

    def _give_back_memory(self) -> None:
        """The frames of an error hold the tensors that filled the memory: the next jobs need it."""
        failed = [trouble.error for trouble in self.troubles if is_memory(trouble.error)]
        for error in failed:
            traceback.clear_frames(error.__traceback__)
        if failed:
            import torch

            gc.collect()
            torch.cuda.empty_cache()
