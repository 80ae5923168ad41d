"""Jobs from open folder to summary, alone or in a sweep. `evaluate` is the Python name of a run.

evaluate(PQCache(...), Niah(...), SmolLM2(), budget=0.2).summary["score"]

Jobs run in groups (harness/jobs/group.py). A job with a prefill of its own is a group of one; under
`shared_prefill=true` all jobs whose prompt outputs are Full's are one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from evals.base import Task
from harness.config.settings import Settings, SettingsError
from harness.jobs.group import OnError, reporting, run_group
from harness.jobs.job import Job, Presets
from harness.models.base import ModelSource
from harness.results.run_folder import StoredRun
from harness.terminal.lasting_output import lasting_output
from methods.base import Method, refuse_other_than_method

OF_COMMANDS = ("dry_run", "wandb.project")  # settings that `python -m harness` reads before it runs jobs


@lasting_output()
def evaluate(
    method: Method,
    task: Task,
    model: ModelSource,
    settings: Settings | None = None,
    *,
    presets: Presets | None = None,
    **changes: Any,
) -> StoredRun:
    """Run `task` with `model` under `method`, beside Full unless `baseline=off`. `changes` are fields of `Settings`.
    `presets`: what tables call method, task and model, in place of the names of their modules.

    The same call again finds the finished run; an interrupted one goes on where it stopped.
    """
    refuse_other_than_method(method)
    asked = replace(settings or Settings(), **changes)
    for name in OF_COMMANDS:
        if (value := attrgetter(name)(asked)) != attrgetter(name)(Settings()):
            raise SettingsError(f"{name}={value} is for the command line, and evaluate does not read it: leave it out.")
    return evaluate_together([Job.plan(method, task, model, asked, presets=presets)])[-1]


@lasting_output()
def evaluate_together(jobs: Sequence[Job], on_error: OnError | None = None) -> list[StoredRun]:
    """Runs jobs, and the Full beside them unless that was there, and reads what they left. Under `shared_prefill=true`
    they must have the same prompts.

    A job that fails, Full too, leaves nothing here and all others alone. Its error goes to `on_error`; without one, the
    first is raised once all jobs are through.
    """
    errors = list[Exception]()
    report = on_error or errors.append
    made: dict[Path, StoredRun] = {}
    for group in _groups(jobs):
        with reporting(report):
            for job in run_group(group, report):
                full = job.full
                made[job.folder] = job.stored((made.get(full.folder) or full.finished()) if full else None)
    if errors:
        raise errors[0]
    return list(made.values())


def _groups(jobs: Sequence[Job]) -> Iterable[list[Job]]:
    """Jobs that run together, each folder once: those with a shared prefill, with `baseline=run` Full among them, and
    each of the others alone."""
    found: dict[str, dict[Path, Job]] = {}
    for job in jobs:
        full = [job.full] if job.full and job.settings.baseline == "run" else []
        for one in (*full, job):
            name = "shared" if one.settings.shared_prefill else str(one.folder)
            found.setdefault(name, {}).setdefault(one.folder, one)
    return [list(group.values()) for group in found.values()]
