"""Jobs from open folder to summary, alone or in a sweep. `evaluate` is the Python name of a run.

evaluate(PQCache(...), Niah(...), SmolLM2(), budget=0.2).summary["score"]

Jobs run in groups (harness/jobs/group.py). A job with a prefill of its own is a group of one; under
`shared_prefill=true` all jobs whose prompt outputs are Full's are one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from evals.base import Task
from harness.config.settings import Settings, SettingsError
from harness.jobs.group import OnError, reporting, run_group
from harness.jobs.job import Evaluation, Job, Presets
from harness.jobs.planning.items import Item
from harness.jobs.planning.planner import Planner
from harness.jobs.triage import triage
from harness.models.base import ModelSource
from harness.terminal.lasting import lasting_output
from methods.base import Method, refuse_other_than_method

OF_COMMANDS = ("dry_run", "workers", "trackers")  # settings that `python -m harness` reads before it runs jobs
OnPlan = Callable[[int, Job, Job | None], None]  # number of the job, the job, the Full beside it


class Wanted(NamedTuple):
    """One job of a sweep. `items`: some of the task's examples, in place of all of them."""

    method: Method
    task: Task
    model: ModelSource
    settings: Settings
    presets: Presets | None = None
    items: Sequence[Item] | None = None


def evaluate(
    method: Method,
    task: Task,
    model: ModelSource,
    settings: Settings | None = None,
    *,
    presets: Presets | None = None,
    **changes: Any,
) -> Evaluation:
    """Run `task` with `model` under `method`, beside Full unless `baseline=off`. `changes` are fields of `Settings`.
    `presets`: what tables call method, task and model, in place of the names of their modules.

    The same call again finds the finished run; an interrupted one goes on where it stopped.
    """
    refuse_other_than_method(method)
    wanted = Wanted(method, task, model, replace(settings or Settings(), **changes), presets)
    for name in OF_COMMANDS:
        if (value := getattr(wanted.settings, name)) != getattr(Settings(), name):
            raise SettingsError(f"{name}={value} is for the command line, and evaluate does not read it: leave it out.")
    return evaluate_together([wanted])[-1]


@lasting_output()
def evaluate_together(
    wanted: Sequence[Wanted],
    on_error: OnError | None = None,
    on_plan: OnPlan | None = None,
    planner: Planner | None = None,
) -> list[Evaluation]:
    """The jobs' evaluations and those of the Full beside them, group by group.

    A job that fails, Full too, has no evaluation and leaves all others alone. Its error goes to `on_error`; without
    one, the first is raised once all groups are through. `on_plan` hears of each job that can start. `planner`: has the
    prompts of jobs before these.
    """
    sweep, errors = _Sweep(planner or Planner()), list[Exception]()
    report = on_error or errors.append
    for number, one in enumerate(wanted):
        with reporting(report):
            job, full = sweep.add(one)
            if on_plan:
                on_plan(number, job, full)
    sweep.planner.let_go()
    made: dict[Path, Evaluation] = {}
    for jobs in sweep.groups.values():
        with reporting(report):
            for job in run_group(jobs, report):
                if job.settings.triage == "on":
                    with reporting(report):
                        triage(job)
                made[job.folder] = job.evaluation(sweep.full_beside(job, made))
    if errors:
        raise errors[0]
    return list(made.values())


class _Sweep:
    """Planned jobs in groups, and the Full that each is held against."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.groups: dict[str, list[Job]] = {}
        self._full: dict[Path, Job] = {}  # by the folder of the job

    def add(self, wanted: Wanted) -> tuple[Job, Job | None]:
        """Puts a job into its group, and with `baseline=run` Full into its own, to run before or beside."""
        method, task, model, settings, presets, items = wanted
        key, job = self.planner.plan(method, task, model, settings, items, presets)
        if full := job.full(settings):
            self._full[job.folder] = full
            if settings.baseline == "run":
                self._join(key, full)
        self._join(key, job)
        return job, self._full.get(job.folder)

    def _join(self, key: str, job: Job) -> None:
        jobs = self.groups.setdefault(key if job.settings.shared_prefill else str(job.folder), [])
        if job.folder not in [known.folder for known in jobs]:
            jobs.append(job)

    def full_beside(self, job: Job, made: dict[Path, Evaluation]) -> Evaluation | None:
        """Full on the same examples, if it is complete."""
        full = self._full.get(job.folder)
        return None if full is None else made.get(full.folder) or full.finished()
