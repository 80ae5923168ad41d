"""Runs composed jobs as one group, whoever asked for them: a command, or a worker that a launcher started."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.config import plugins
from harness.config.compose import built, refuse_unknown
from harness.config.errors import is_memory, one_sentence
from harness.config.overrides import Partial
from harness.config.settings import OWN, Settings, settings_of
from harness.jobs.planning.machine import check_machine, check_results
from harness.sweeps.jobs import JobConfig
from harness.terminal.notices import complain_once
from harness.terminal.progress import numbered

if TYPE_CHECKING:
    from evals.base import Task
    from harness.jobs.job import Job, Presets
    from harness.jobs.planning.examples import PreparedExample
    from harness.models.base import ModelSource
    from methods.base import Method


class Planner:
    """Plans the jobs of one command, and makes prompts once for jobs that follow one another and ask the same of the
    same model: those of a large task take minutes."""

    def __init__(self) -> None:
        self._latest: tuple[str, list[PreparedExample]] = "", []  # what was asked last, and its prompts

    def plan(
        self, method: Method, task: Task, model: ModelSource, wanted: Settings, presets: Presets | None = None
    ) -> Job:
        """Return the job; raise the errors of `Job.plan`."""
        from harness.jobs.job import Job  # and torch, which a wrong word on the command line does not wait for

        key = str((task, model, {name: value for name, value in asdict(wanted).items() if name not in OWN}))
        items = self._latest[1] if self._latest[0] == key else None
        self._latest = "", []  # two sets of prompts are never there at once
        job = Job.plan(method, task, model, wanted, items, presets)
        self._latest = key, job.items
        return job


class GroupOutcome(NamedTuple):
    """Says what became of a group of jobs."""

    folders: list[Path]  # of finished runs, Full before what is held against it
    failures: list[tuple[int, str]]  # the number of a job, and a sentence on what went wrong


def run_jobs(
    group: Mapping[int, JobConfig], partial: Partial, planner: Planner, jobs: int, aloud: bool = True
) -> GroupOutcome:
    """Run the jobs of a group, given with their numbers among all `jobs` of the command; a dry run shows what they
    would do. An error fails its own job alone, and is said at once if `aloud`."""
    planned: dict[int, Job] = {}
    failures, errors = list[tuple[int, str]](), list[Exception]()

    def failed(error: Exception, number: int | None = None) -> None:
        notes = " ".join(getattr(error, "__notes__", ()))  # which name the folder of the run that failed
        of_folder = [number for number, job in planned.items() if f"{job.folder}/" in notes]
        failures.append((number if number is not None else [*of_folder, *group][0], one_sentence(error)))
        errors.append(error)
        if aloud:
            complain_once(failures[-1][1])

    with numbered(min(group) + 1, jobs if len(group) == 1 else 1, aloud):
        for number, composed in group.items():
            try:
                method, task, model, settings = _built(composed.config, partial)
                job = planner.plan(method, task, model, settings, composed.presets)
                if settings.dry_run:
                    from harness.jobs.dry_run import show

                    show(job)
                    continue
                _ = job.full  # which is refused before anything runs, too
                planned[number] = job
            except Exception as error:
                failed(error, number)
        made = []
        if planned:
            from harness.jobs.evaluate import evaluate_together

            made = evaluate_together(list(planned.values()), failed)
    _give_back_memory(errors)
    pairs = [(one.full_folder, one.folder) for one in made]
    return GroupOutcome(list(dict.fromkeys(folder for pair in pairs for folder in pair if folder)), failures)


def _built(config: Mapping[str, Any], partial: Partial) -> tuple[Any, Any, Any, Settings]:
    """Return method, task, model and settings. What the machine or its data lack is said before torch is imported."""
    settings = settings_of(config)
    refuse_unknown(config)
    check_machine(settings)
    check_results(settings)
    plugins.build(config["task"], "task", partial["task"]).require(settings.data.folder())
    return built(config, partial)


def _give_back_memory(errors: Sequence[Exception]) -> None:
    """Drop the tensors that filled the memory, which the frames of an error hold: the next jobs need it."""
    failed = [error for error in errors if is_memory(error)]
    for error in failed:
        traceback.clear_frames(error.__traceback__)
    if failed:
        import torch

        gc.collect()
        torch.cuda.empty_cache()
