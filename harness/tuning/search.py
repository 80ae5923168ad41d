"""Searches for a method's best parameters: first one curve per parameter around the start, then
combinations of the best few values.

The curves run on all examples to choose by. The combinations are halved: each round adds examples
and keeps the better half, so that most of the work goes to what may win. Nothing is random, so the
same command finds the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.jobs.evaluate import evaluate_together, reporting
from harness.jobs.examples import PreparedExample, Prompts
from harness.jobs.job import Job
from harness.results.compared import mean_score
from harness.results.measures import over_known
from harness.results.records import Record
from harness.results.run_folder import load
from harness.tuning.space import START, Point, Space
from methods.base import Method

BEST = 2  # values of a parameter that enter the combinations, besides the start's
COMBINATIONS = 16  # most combinations, chosen by the curves
KEPT = 0.5  # share of the combinations that stay from round to round
MOST = 12  # most candidates that share a prefill: each holds a cache of the prompt until it has sealed
TOLERANCE = 0.02  # share by which the read tokens may exceed the budget


@dataclass(frozen=True)
class Examples:
    """The examples of a search. `rounds`: disjoint parts of the examples to choose by; `held_out`:
    those for the report. Every group of the task has examples in each."""

    rounds: tuple[list[PreparedExample], ...]
    held_out: list[PreparedExample]

    @property
    def choosing(self) -> int:
        return sum(map(len, self.rounds))


@dataclass(frozen=True)
class ParameterSearch:
    """Searches one space of parameters. `trials` runs candidates on the examples to choose by;
    `say` prints progress."""

    space: Space
    examples: Examples
    trials: Trials
    say: Callable[[str], None]

    def run(self) -> Point:
        """Run the search and return the best candidate among those that ran on all examples."""
        rounds = range(len(self.examples.rounds))
        points = curve_points(self.space)
        for number in rounds:
            points = self.trials.left(points)
            self._round(points, number, f"curves: {len(points)} points")
        field = self._combinations()
        for number in rounds:
            if not field:
                break
            self._round(field, number, f"together: {len(field)} combinations")
            field = self.ranked(self.trials.left(field))
            field = field[: max(1, round(len(field) * KEPT))]
        return self.ranked(self.finished())[0]

    def finished(self) -> list[Point]:
        """Return the candidates that ran on every example to choose by and were not discarded."""
        ran = self.trials.records
        return [point for point in self.trials.left(list(ran)) if len(ran[point]) == self.examples.choosing]

    def ranked(self, points: Sequence[Point]) -> list[Point]:
        """Return candidates, best first. Among equal scores the method's present parameters (the
        start) come first, then the candidate that reads fewest tokens (in whole percents), then the
        one nearest to the start."""

        def rank(point: Point) -> tuple[float, ...]:
            read = fmean(record.attended_share or 0.0 for record in self.trials.records[point])
            return -self._mean(point), point != START, round(read, 2), *self.space.distance(point)

        return sorted(points, key=rank)

    def _combinations(self) -> list[Point]:
        """Return candidates that change at least two parameters, each to one of its best values.
        First comes the one with the largest gain if the gains of its single parameters add up."""
        best = dict[str, list[Any]]()
        for name in self.space.grids:
            curve = self.ranked(self.trials.left(self.space.curve(name)))
            better = [point for point in curve if self._mean(point) > self._mean(START)]
            best[name] = [self.space.value(point, name) for point in [START, *better[:BEST]]]

        def promise(point: Point) -> float:
            return sum(self._mean((change,)) - self._mean(START) for change in point)

        new = [point for point in self.space.combinations(best) if len(point) > 1]
        return sorted(new, key=lambda point: (-promise(point), *self.space.distance(point)))[:COMBINATIONS]

    def _round(self, points: Sequence[Point], number: int, what: str) -> None:
        rounds = self.examples.rounds
        self.say(f"{what}, part {number + 1}/{len(rounds)}: {len(rounds[number])} examples")
        self.trials.run(points, f"choose-{number + 1}", rounds[number])

    def _mean(self, point: Point) -> float:
        return mean_score(self.trials.records[point])


def curve_points(space: Space) -> list[Point]:
    """Return the candidates of all curves: the start (the method's present parameters), and every
    candidate that differs from it in one parameter."""
    return list(dict.fromkeys([START, *(point for name in space.grids for point in space.curve(name))]))


def most_combinations(space: Space) -> int:
    """Return the largest number of combinations that the search may try after the curves."""
    better = [min(BEST, len(values) - 1) for values in space.grids.values()]
    return min(COMBINATIONS, prod(1 + count for count in better) - sum(better) - 1)


@dataclass
class Trials:
    """Runs candidates (points of the space of parameters) and keeps their records; discards those
    that fail or read more than the budget allows. `start`: the job of the method's present
    parameters."""

    space: Space
    start: Job
    records: dict[Point, list[Record]] = field(default_factory=dict)  # over all parts it ran on
    full: list[Record] = field(default_factory=list)
    discarded: dict[Point, str] = field(default_factory=dict)
    _allowed: float = 1.0  # multiple of the budget that the start reads, if that is more

    def run(self, points: Sequence[Point], part: str, items: Sequence[PreparedExample]) -> None:
        """Run the candidates `points` on `items` and add the results to their records. `part` names
        a subfolder of results for these items, so that runs on different items stay apart; runs
        that are finished there are only read."""
        start, results = self.start, self.start.wanted.results
        here = replace(start.wanted, results=replace(results, root=f"{results.root}/{part}"))

        def job(point: Point) -> Job:
            return Job.plan(self.space.method(point), start.task, start.model, here, Prompts(items), start.presets)

        room = _room(job(points[0]))
        for first in range(0, len(points), room):  # the points that share a prefill
            jobs, failed = dict[Point, Job](), list[Exception]()
            for point in points[first : first + room]:
                with reporting(failed.append):
                    jobs[point] = job(point)
            runs = evaluate_together(list(jobs.values()), failed.append)
            records = {run.folder: run.records for run in runs}
            for point in points[first : first + room]:
                self._take(point, jobs.get(point), records)
            if START in self.discarded:
                raise failed[0]  # nothing can be compared with the start
            known = {record.id for record in self.full}
            for folder in dict.fromkeys(run.full_folder for run in runs if run.full_folder):
                self.full += [record for record in load(folder).records if record.id not in known]

    def left(self, points: Sequence[Point]) -> list[Point]:
        return [point for point in points if point not in self.discarded]

    def _take(self, point: Point, job: Job | None, by_folder: Mapping[Path, list[Record]]) -> None:
        """Add the records of a candidate's run to those it has. Discard the candidate if its run
        failed or read more than the budget allows."""
        if job is None or job.folder not in by_folder:
            self.discarded[point] = "it failed" + (f": {job.folder} says why" if job else "")
            return
        records = by_folder[job.folder]
        self.records[point] = [*self.records.get(point, []), *records]
        read = over_known(fmean, [record.measured.get("attended_prompt") for record in records])
        allowed = _allowed(job, self.space.start, records)
        if read is None or not allowed:
            return
        if point == START:
            self._allowed = max(self._allowed, read / allowed)
        elif read > allowed * self._allowed * (1 + TOLERANCE):
            longest = fmean(record.sealed_tokens for record in records)
            self.discarded[point] = (
                f"it reads {100 * read / longest:.1f} % of the prompt, and the budget allows "
                f"{100 * allowed * self._allowed / longest:.1f} %"
            )


def _room(job: Job) -> int:
    """Return how many candidates fit into free memory at once; those that share a prefill all hold
    a cache."""
    need, (free, _) = job.need(), job.free
    if free is None or not need.kv:
        return MOST
    return max(1, min(MOST, int((free - need.total) // need.kv)))


def _allowed(job: Job, start: Method, records: Sequence[Record]) -> float | None:
    """Return how many prompt tokens the budget lets a head read, as a mean over layers and records;
    None without a budget. Layers that the method reads whole (`dense_layers`) count with all
    tokens."""
    if job.budget is None:
        return None
    dense, layers = set(getattr(start, "dense_layers", ())), range(job.model.describe().num_whole_layers)
    lengths = [record.sealed_tokens for record in records if record.measured.get("attended_prompt") is not None]
    per_layer = ((n if layer in dense else job.budget.tokens(n, layer)) for n in lengths for layer in layers)
    return fmean(per_layer) if lengths else None
