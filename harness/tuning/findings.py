"""Reports the result of a search, and writes it as a preset: a yaml file with the chosen parameters
and comments on where they come from."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import yaml

from evals import stats
from evals.stats import ALPHA
from harness.config.catalogue import CONF, Entry
from harness.config.plugins import build, describe
from harness.config.settings import SettingsError
from harness.results.alarms import at_chance
from harness.results.compared import for_statistics, mean_score, paired
from harness.results.files import write_atomically
from harness.results.measures import over_known
from harness.results.provenance import git
from harness.results.records import Record
from harness.terminal.tables import BYTES, Column, percent, probability, quantity, text_table, with_ci
from harness.tuning.plan import SearchPlan
from harness.tuning.search import ParameterSearch, Trials
from harness.tuning.space import START, Point
from methods.base import Method
from methods.tiers.tier import DEVICE, TIERS

WIDTH = 118


def search(plan: SearchPlan, say: Callable[[str], None]) -> Findings:
    """Run the planned search, reusing runs that are finished, and return its findings. `say` prints
    progress."""
    trials, held_out = (Trials(plan.space, plan.start) for _ in range(2))
    searching = ParameterSearch(plan.space, plan.examples, trials, say)
    best = searching.run()
    say(f"held out: {len(plan.examples.held_out)} examples")
    held_out.run(list(dict.fromkeys([START, best])), "held-out", plan.examples.held_out)
    return Findings(plan, searching, best, held_out)


@dataclass(frozen=True)
class Findings:
    """The result of a finished search. A point is a candidate: the parameters in which it differs
    from the start. `held_out`: the runs of the `best` point and of the start on examples that had
    no part in the choice."""

    plan: SearchPlan
    search: ParameterSearch
    best: Point
    held_out: Trials

    @cached_property
    def rows(self) -> list[Outcome]:
        """The points that ran on all examples to choose by, with their records; the start first."""
        points = [START, *(point for point in self.search.ranked(self.search.finished()) if point != START)]
        return [self._row(self.search.trials, point) for point in points]

    @cached_property
    def reported(self) -> list[Outcome]:
        """The start, the chosen point and Full on the held-out examples."""
        trials = self.held_out
        rows = [self._row(trials, point) for point in dict.fromkeys([START, self.best])]
        return [*rows, Outcome("full", trials.full, trials.records[START])] if trials.full else rows

    def verdict(self) -> Iterator[str]:
        """Yield sentences on the result: is the chosen point better than the start on held-out
        examples, and can such a result be trusted?"""
        if self.best == START:
            yield f"No other value did better than {self.start_name} as it is, on the examples to choose by."
        else:
            row, what = self.reported[1], self.plan.space.label(self.best)
            gain = f"{spelled(row.beside.diff, row.beside.ci, sign=True)} points, p = {probability(row.beside.p)}"
            chance = "" if row.beside.p < ALPHA else ", which may be chance"
            yield f"{what} was best where it was chosen. On the {row.n} examples held out: {gain}{chance}."
        if self.plan.start.model.describe().weights == "random":
            yield "Random weights, so scores mean nothing."
        if at_chance(self.held_out.full, self.plan.start.task.chance):
            full = percent(mean_score(self.held_out.full))
            yield f"Full scores {full}, near guessing: values cannot be told apart here."

    def lines(self) -> Iterator[str]:
        yield f"Chosen by {self.plan.examples.choosing} examples:"
        yield text_table(columns(self.rows))
        for point, reason in self.search.trials.discarded.items():
            yield f"  left out: {self.plan.space.label(point)}: {reason}"
        yield f"\nHeld out, {len(self.plan.examples.held_out)} other examples:"
        yield text_table(columns(self.reported))
        yield "\n" + " ".join(self.verdict())

    def write_preset(self, path: Path, base: Entry, command: str) -> None:
        """Write the chosen method as a preset to `path`. `base`: the yaml file of the start;
        `command`: the command line of the search, which goes into a comment."""
        changes = self.plan.space.label(self.best) or "the start's own values"
        headline = f"{self.start_name} tuned on {self.plan.start.label.split()[0]}: {changes}."
        comments = [headline, command]
        for paragraph in self._origin():
            comments += textwrap.wrap(paragraph, WIDTH, break_on_hyphens=False, break_long_words=False)
        usual, values, defaults = describe(build(base.values(), "method")), describe(self.method), list[str]()
        if base.file.parent in (CONF / "method", path.parent.resolve()):
            values = {name: value for name, value in values.items() if value != usual[name]}
            defaults = [f"defaults: [{base.name}]"]
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        body = yaml.safe_dump(plain, default_flow_style=None, sort_keys=False, width=1000) if plain else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "\n".join([*(f"# {line}" for line in comments), *defaults, body]))

    def _origin(self) -> Iterator[str]:
        info, seed = self.plan.start.model.describe(), self.plan.start.wanted.seed
        revision = f" ({info.revision.rpartition(':')[2][:12]})" if info.revision else ""
        yield f"Model {info.name}{revision}, examples of seed {seed}, commit {str(git()['commit'] or 'unknown')[:12]}."
        scores = ", ".join(f"{row.label} {row.score}" for row in self.reported)
        yield f"Held out, {self.reported[0].n} other examples: {scores}."
        yield " ".join(self.verdict())

    @property
    def method(self) -> Method:
        return self.plan.space.method(self.best)

    @property
    def start_name(self) -> str:
        return (self.plan.start.presets or {})["method"]

    def _row(self, trials: Trials, point: Point) -> Outcome:
        return Outcome(self._label(point), trials.records[point], trials.records[START])

    def _label(self, point: Point) -> str:
        return self.plan.space.label(point) or self.start_name


@dataclass(frozen=True, slots=True)
class Outcome:
    """The records of one candidate and of the start. `beside` is the paired comparison of the
    two."""

    label: str
    records: Sequence[Record]
    start: Sequence[Record]

    @property
    def n(self) -> int:
        return len(self.records)

    @property
    def score(self) -> str:
        """Return the mean with its interval, such as "40.0 [23, 59]"."""
        units = [record.independent for record in self.records]
        groups = [record.group for record in self.records]
        interval = stats.interval([record.score for record in self.records], groups, units=units)
        return spelled(mean_score(self.records), interval)

    @property
    def beside(self) -> stats.Paired:
        return stats.paired(*for_statistics(paired(self.records, self.start)))


def columns(rows: Sequence[Outcome]) -> list[Column]:
    """Return the columns of a table of candidates, each compared with the first, the start."""
    tests = [None, *(row.beside for row in rows[1:])]
    read = [over_known(fmean, [record.attended_share for record in row.records]) for row in rows]
    device = [fmean(record.kv[DEVICE] for record in row.records) for row in rows]
    moved = [over_known(fmean, [r.measured.get("moved_bytes_per_step") for r in row.records]) for row in rows]
    return [
        Column("parameters", "", [row.label for row in rows], left=True),
        Column("score", "95% CI", [row.score for row in rows]),
        Column("vs first", "95% CI", [spelled(test.diff, test.ci, sign=True) if test else "" for test in tests]),
        Column("p", "", [probability(test.p) if test else "" for test in tests]),
        Column("attended", "%", [percent(share) for share in read]),
        quantity(TIERS[DEVICE].head, device, BYTES),
        quantity("moved", moved, BYTES, per="/step", hide_zeros=True),
        Column("n", "", [str(row.n) for row in rows]),
    ]


def spelled(mean: float, ends: stats.Interval | None, sign: bool = False) -> str:
    return with_ci(mean, [ends.low, ends.high] if ends else None, sign)


def preset_path(folder: Path, method: str, command: str) -> Path:
    """Return the file of a method's preset in `folder`. Raise `SettingsError` if it exists and
    another command wrote it."""
    path = folder / "method" / f"{method}_tuned.yaml"
    if path.is_file() and f"# {command}" not in path.read_text(encoding="utf-8").splitlines():
        raise SettingsError(f"{path} is there already, and not from this search: give another --out.")
    return path
