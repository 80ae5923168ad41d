"""Runs composed jobs as one group, whoever asked for them: a single command, a sweep, a launcher's worker."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.config import plugins
from harness.config.errors import is_memory, one_sentence
from harness.config.renamed import refuse_unknown
from harness.config.settings import settings_of
from harness.jobs.planning.machine import check_machine, check_results
from harness.jobs.planning.planner import Planner
from harness.sweeps.jobs import JobConfig
from harness.terminal.notices import complain_once

if TYPE_CHECKING:
    from harness.jobs.job import Evaluation, Job
    from harness.jobs.run import OnPlan, Wanted

Partial = Mapping[str, frozenset[str]]  # parameters, by kind of plug-in, that only some of the chosen have


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


class Group:
    """Jobs that run together, and what becomes of them. Errors are said at once if `aloud`."""

    def __init__(self, jobs: Sequence[JobConfig], partial: Partial, planner: Planner, aloud: bool = True) -> None:
        self.jobs, self.partial, self.planner, self.aloud = jobs, partial, planner, aloud
        self.made: list[Evaluation] = []
        self.troubles: list[Trouble] = []
        self._unplanned: list[int] = []  # places, in the order in which they are planned

    @property
    def folders(self) -> list[Path]:
        """Of finished runs, Full before what is held against it."""
        pairs = [(made.full_folder, made.folder) for made in self.made]
        return list(dict.fromkeys(folder for pair in pairs for folder in pair if folder))

    def run(self, on_plan: OnPlan | None = None) -> None:
        """An error fails its own job alone. A dry run shows what the job would do."""
        wanted: dict[int, Wanted] = {}
        for place, job in enumerate(self.jobs):
            try:
                one = built(job, self.partial)
                if one.settings.dry_run:
                    self._show(one)
                else:
                    wanted[place] = one
            except Exception as error:
                self._note(error, place)
        if wanted:
            self._evaluate(wanted, on_plan)
        self._give_back_memory()

    def _show(self, wanted: Wanted) -> None:
        from harness.jobs.dry_run import show

        show(*wanted[:4], self.planner)

    def _evaluate(self, wanted: Mapping[int, Wanted], on_plan: OnPlan | None) -> None:
        from harness.jobs.run import evaluate_together

        self._unplanned = list(wanted)

        def planned(_: int, job: Job, full: Job | None) -> None:
            place = self._unplanned.pop(0)
            if on_plan:
                on_plan(place, job, full)

        self.made = evaluate_together(list(wanted.values()), self._hear, planned, self.planner)

    def _hear(self, error: Exception) -> None:
        """All jobs are planned, one after the other, before the first of them runs."""
        self._note(error, self._unplanned.pop(0) if self._unplanned else None)

    def _note(self, error: Exception, place: int | None) -> None:
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


def built(job: JobConfig, partial: Partial) -> Wanted:
    """The job with its method, task, model and settings; what the machine or its data lack is said before
    torch is imported."""
    config = job.config
    settings = settings_of(config)
    refuse_unknown(config)
    check_machine(settings)
    check_results(settings)
    task = plugins.build(config["task"], "task", partial["task"])
    task.require(settings.data.folder())
    method, model = (plugins.build(config[kind], kind, partial[kind]) for kind in ("method", "model"))
    from harness.jobs.run import Wanted

    return Wanted(method, task, model, settings, job.presets)
