"""Runs candidates on a part of the examples: all with one prefill, and Full too, in folders that
the same command finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from harness.jobs.evaluate import evaluate_together, reporting
from harness.jobs.job import Job
from harness.jobs.planning.examples import PreparedExample
from harness.jobs.planning.machine import free_bytes
from harness.results.measures import over_known
from harness.results.records import Record
from harness.results.run_folder import load
from harness.tuning.space import START, Point, Space
from methods.base import Method

MOST = 12  # most candidates that share a prefill: each holds a cache of the prompt until it has sealed
TOLERANCE = 0.02  # share by which the read tokens may exceed the budget


@dataclass
class Trials:
    """Run candidates, keep their records, and discard those that fail or read more than the budget
    allows. `start`: the job of the start, with the tuning seed."""

    space: Space
    start: Job
    records: dict[Point, list[Record]] = field(default_factory=dict)  # over all parts it ran on
    full: list[Record] = field(default_factory=list)
    discarded: dict[Point, str] = field(default_factory=dict)
    _allowed: float = 1.0  # multiple of the budget that the start reads, if that is more

    def run(self, points: Sequence[Point], part: str, items: Sequence[PreparedExample]) -> None:
        """Run `points` on `items` and add the results to their records; finished runs are read.
        Each part has a folder of its own, so that no run is taken for the rest of another."""
        start, results = self.start, self.start.wanted.results
        here = replace(start.wanted, results=replace(results, root=f"{results.root}/{part}"))

        def job(point: Point) -> Job:
            return Job.plan(self.space.method(point), start.task, start.model, here, items, start.presets)

        room = _room(job(points[0]))
        for first in range(0, len(points), room):
            self._run(points[first : first + room], job)

    def left(self, points: Sequence[Point]) -> list[Point]:
        return [point for point in points if point not in self.discarded]

    def _run(self, points: Sequence[Point], plan: Callable[[Point], Job]) -> None:
        """Run points with one shared prefill."""
        jobs, failed = dict[Point, Job](), list[Exception]()
        for point in points:
            with reporting(failed.append):
                jobs[point] = plan(point)
        runs = evaluate_together(list(jobs.values()), failed.append)
        done = {run.folder: run.records for run in runs}
        for point in points:
            job = jobs.get(point)
            self._take(point, job, done.get(job.folder) if job else None)
        if START in self.discarded:
            raise failed[0]  # nothing can be compared with the start
        self._take_full([run.full_folder for run in runs])

    def _take(self, point: Point, job: Job | None, made: list[Record] | None) -> None:
        if job is None or made is None:
            self.discarded[point] = "it failed" + (f": {job.folder} says why" if job else "")
            return
        self.records[point] = [*self.records.get(point, []), *made]
        read, allowed = _read(made), _allowed(job, self.space.start, made)
        if read is None or not allowed:
            return
        if point == START:
            self._allowed = max(self._allowed, read / allowed)
        elif read > allowed * self._allowed * (1 + TOLERANCE):
            longest = fmean(record.sealed_tokens for record in made)
            self.discarded[point] = (
                f"it reads {100 * read / longest:.1f} % of the prompt, and the budget allows "
                f"{100 * allowed * self._allowed / longest:.1f} %"
            )

    def _take_full(self, folders: Sequence[Path | None]) -> None:
        known = {record.id for record in self.full}
        for folder in dict.fromkeys(folder for folder in folders if folder is not None):
            self.full += [record for record in load(folder).records if record.id not in known]


def _room(job: Job) -> int:
    """Return how many candidates' caches fit with the weights and Full's cache."""
    need, free = job.need(), free_bytes(job.settings.device)
    if free is None or not need.kv:
        return MOST
    return max(1, min(MOST, int((free - need.total) // need.kv)))


def _read(records: Sequence[Record]) -> float | None:
    """Return the prompt tokens that a step reads, mean over the examples."""
    return over_known(fmean, [record.measured.get("attended_prompt") for record in records])


def _allowed(job: Job, start: Method, records: Sequence[Record]) -> float | None:
    """Return the prompt tokens that the budget lets a head read, mean over layers and examples; the
    dense layers of the start read all."""
    if job.budget is None:
        return None
    dense, layers = set(getattr(start, "dense_layers", ())), range(job.model.describe().num_whole_layers)
    lengths = [record.sealed_tokens for record in records if record.measured.get("attended_prompt") is not None]
    per_layer = ((n if layer in dense else job.budget.tokens(n, layer)) for n in lengths for layer in layers)
    return fmean(per_layer) if lengths else None
