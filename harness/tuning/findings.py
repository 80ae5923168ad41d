"""Reports what a search found: its tables, its verdict, and what a preset says about its origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

from evals import stats
from evals.stats import ALPHA
from harness.results.alarms import at_chance
from harness.results.compared import for_statistics, mean_score, paired
from harness.results.measures import over_known
from harness.results.provenance import git
from harness.results.records import Record
from harness.terminal.tables import BYTES, Column, percent, probability, quantity, scaled, text_table
from harness.tuning.plan import SearchPlan
from harness.tuning.search import ParameterSearch, Say
from harness.tuning.space import START, Point
from harness.tuning.trials import Trials
from methods.base import Method
from methods.tiers.tier import DEVICE, TIERS


def search(plan: SearchPlan, say: Say) -> Findings:
    """Run what has not run yet and return the findings; the same plan gives the same findings."""
    trials, held_out = (Trials(plan.space, plan.start) for _ in range(2))
    searching = ParameterSearch(plan.space, plan.examples, trials, say)
    best = searching.run()
    say(f"held out: {len(plan.examples.held_out)} examples")
    held_out.run(list(dict.fromkeys([START, best])), "held-out", plan.examples.held_out)
    return Findings(plan, searching, best, held_out)


@dataclass(frozen=True)
class Findings:
    """Hold a finished search, and `held_out`, the runs of its `best` point and the start on the
    other examples."""

    plan: SearchPlan
    search: ParameterSearch
    best: Point
    held_out: Trials

    @cached_property
    def rows(self) -> list[Outcome]:
        """Return the points that ran on all examples to choose by, the start first."""
        points = [START, *(point for point in self.search.ranked(self.search.finished()) if point != START)]
        return [self._row(self.search.trials, point) for point in points]

    @cached_property
    def reported(self) -> list[Outcome]:
        """Return the start, the chosen point and Full on the examples that had no part in the
        choice."""
        trials = self.held_out
        rows = [self._row(trials, START)]
        rows += [] if self.best == START else [self._row(trials, self.best)]
        return [*rows, Outcome("full", trials.full, trials.records[START])] if trials.full else rows

    @property
    def verdict(self) -> str:
        if self.best == START:
            return f"No other value did better than {self.start_name} as it is, on the examples to choose by."
        row, what = self.reported[1], self.plan.space.label(self.best)
        gain = f"{spelled(row.beside.diff, row.beside.ci, sign=True)} points, p = {probability(row.beside.p)}"
        if row.beside.p < ALPHA:
            return f"{what}: {gain} on the {row.n} examples held out."
        return f"{what} was best where it was chosen. On the {row.n} examples held out: {gain}, which may be chance."

    @property
    def cautions(self) -> Iterator[str]:
        """Yield the warnings that runs of these examples deserve, besides the verdict."""
        if self.plan.start.model.describe().weights == "random":
            yield "Random weights, so scores mean nothing."
        chance = self.plan.start.task.chance
        if at_chance(self.held_out.full, chance):
            full = percent(mean_score(self.held_out.full))
            yield f"Full scores {full}, near the {percent(chance, 0)} of guessing: values cannot be told apart here."

    def lines(self) -> Iterator[str]:
        yield f"Chosen by {self.plan.examples.choosing} examples:"
        yield text_table(columns(self.rows))
        for point, reason in self.search.trials.discarded.items():
            yield f"  left out: {self.plan.space.label(point)}: {reason}"
        yield f"\nHeld out, {len(self.plan.examples.held_out)} other examples:"
        yield text_table(columns(self.reported))
        yield "\n" + " ".join([self.verdict, *self.cautions])

    def provenance(self) -> Iterator[str]:
        """Yield the lines for the comment of the preset."""
        info, seed = self.plan.start.model.describe(), self.plan.start.wanted.seed
        revision = f" ({info.revision.rpartition(':')[2][:12]})" if info.revision else ""
        commit = str(git()["commit"] or "unknown")[:12]
        yield f"Model {info.name}{revision}, examples of seed {seed}, commit {commit}."
        tested = len(self.search.trials.records)
        chosen = next(row for row in self.rows if row.label == self._label(self.best))
        yield (
            f"Chosen among {tested} points by {chosen.n} examples, where {self.start_name} scores {self.rows[0].score} "
            f"and this {chosen.score}."
        )
        scores = ", ".join(f"{row.label} {row.score}" for row in self.reported)
        yield f"Held out, {self.reported[0].n} other examples: {scores}."
        yield " ".join([self.verdict, *self.cautions])
        if self.best != START:
            yield self._cost(*self.reported[:2])

    @property
    def method(self) -> Method:
        return self.plan.space.method(self.best)

    @property
    def headline(self) -> str:
        changes = self.plan.space.label(self.best) or "the start's own values"
        return f"{self.start_name} tuned on {self.plan.start.label.split()[0]}: {changes}."

    @property
    def curves(self) -> dict[str, Curve]:
        """Return the curve of each parameter; points that were discarded are missing."""
        space, trials = self.plan.space, self.search.trials
        curves = {}
        for name in space.grids:
            points = {space.value(point, name): point for point in trials.left(space.curve(name))}
            rows = {value: self._row(trials, points[value]) for value in space.grids[name] if value in points}
            curves[name] = Curve(rows, space.value(START, name), space.value(self.best, name))
        return curves

    @property
    def full(self) -> float | None:
        """Return Full's score on the examples to choose by."""
        return mean_score(self.search.trials.full) if self.search.trials.full else None

    @property
    def start_name(self) -> str:
        return self.plan.names["method"]

    def _cost(self, before: Outcome, after: Outcome) -> str:
        (old, new), unit = scaled([before.device_bytes, after.device_bytes], BYTES)
        moved, moved_unit = scaled([before.moved_bytes, after.moved_bytes], BYTES)
        traffic = f"; moves {moved[1]} {moved_unit} per step (before: {moved[0]})" if before.moved_bytes else ""
        return (
            f"Reads {percent(after.read)} % of the prompt (before: {percent(before.read)}); holds {new} {unit} on the "
            f"device (before: {old}){traffic}."
        )

    def _row(self, trials: Trials, point: Point) -> Outcome:
        return Outcome(self._label(point), trials.records[point], trials.records[START])

    def _label(self, point: Point) -> str:
        return self.plan.space.label(point) or self.start_name


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold the records of one candidate, and those of the start; `beside` compares both on the same
    examples."""

    label: str
    records: Sequence[Record]
    start: Sequence[Record]

    @property
    def n(self) -> int:
        return len(self.records)

    @property
    def mean(self) -> float:
        return mean_score(self.records)

    @property
    def interval(self) -> stats.Interval:
        units = [r.independent for r in self.records]
        interval = stats.interval([r.score for r in self.records], [r.group for r in self.records], units=units)
        assert interval is not None
        return interval

    @property
    def beside(self) -> stats.Paired:
        return stats.paired(*for_statistics(paired(self.records, self.start)))

    @property
    def read(self) -> float | None:
        """Return the share of the prompt that a step reads."""
        return over_known(fmean, [record.attended_share for record in self.records])

    @property
    def device_bytes(self) -> float:
        return fmean(record.kv[DEVICE] for record in self.records)

    @property
    def moved_bytes(self) -> float | None:
        return over_known(fmean, [record.measured.get("moved_bytes_per_step") for record in self.records])

    @property
    def score(self) -> str:
        """Return the mean with its interval, such as "40.0 [22.7, 59.4]"."""
        return spelled(self.mean, self.interval)


class Curve(NamedTuple):
    """Hold rows by value, in the order of the grid; `start` and `chosen` are values on it."""

    rows: Mapping[Any, Outcome]
    start: Any
    chosen: Any


def columns(rows: Sequence[Outcome]) -> list[Column]:
    """Return the columns of a table whose first row is the start."""
    tests = [None, *(row.beside for row in rows[1:])]
    return [
        Column("parameters", "", [row.label for row in rows], left=True),
        Column("score", "95% CI", [row.score for row in rows]),
        Column("vs first", "95% CI", [spelled(test.diff, test.ci, sign=True) if test else "" for test in tests]),
        Column("p", "", [probability(test.p) if test else "" for test in tests]),
        Column("attended", "%", [percent(row.read) for row in rows]),
        quantity(TIERS[DEVICE].head, [row.device_bytes for row in rows], BYTES),
        quantity("moved", [row.moved_bytes for row in rows], BYTES, per="/step", hide_zeros=True),
        Column("n", "", [str(row.n) for row in rows]),
    ]


def spelled(mean: float, ends: stats.Interval, sign: bool = False) -> str:
    low, high = (percent(end, sign=sign) for end in (ends.low, ends.high))
    return f"{percent(mean, sign=sign)} [{low}, {high}]"
