"""Runs side by side: which belong into one table, what each is called there, which Full each is held against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from evals import stats
from evals.stats import ALPHA
from harness.reports.labels import budget, labels, titles
from harness.results.alarms import Alarm, AlarmRow
from harness.results.alarms import alarms as table_alarms
from harness.results.compared import FULL
from harness.results.run_folder import StoredRun
from harness.results.summary import (
    ONE_TABLE,
    Neighbours,
    combination,
    method_of,
    not_held,
    reference,
    summary_of,
)

PERPLEXITY = "perplexity"  # the metric of tasks whose texts are fed in place of answers


@dataclass(frozen=True, slots=True)
class ReportRow:
    """A run in its table. `label` tells it from its neighbours, but for the budget."""

    run: StoredRun
    full: StoredRun | None
    summary: dict[str, Any]
    label: str
    not_held: str | None = None  # why it is held against no Full, where there is one that might have been
    score_p: float | None = None  # of the difference of its score to Full's, after Holm's correction over the table
    cost_p: float | None = None  # the same of the likelihoods of the right answers

    @property
    def title(self) -> str:
        return f"{self.label} {budget(self.summary)}".strip()

    @property
    def cost(self) -> Mapping[str, Any]:
        """Return the comparison of the run's likelihoods with Full's, or an empty mapping."""
        return (self.summary["likelihood"] or {}).get("full") or {}

    @property
    def score_differs(self) -> bool:
        return self.score_p is not None and self.score_p < ALPHA

    @property
    def cost_differs(self) -> bool:
        return self.cost_p is not None and self.cost_p < ALPHA


@dataclass(frozen=True)
class Comparison:
    """Holds the runs of one task, model and protocol, Full first."""

    title: str
    metric: str
    entries: list[ReportRow]

    @property
    def of_perplexity(self) -> bool:
        """Return whether texts were fed in place of answers, so that only likelihoods can be compared."""
        return self.metric == PERPLEXITY

    @cached_property
    def alarms(self) -> list[Alarm]:
        """Return what a reader must know before the table, the most serious first."""
        return table_alarms(
            [
                AlarmRow(row.title, row.run, row.full, row.summary, row.cost_p if self.of_perplexity else row.score_p)
                for row in self.entries
            ]
        )


def comparisons(runs: Sequence[StoredRun]) -> list[Comparison]:
    """Return one table for each combination of what must not be mixed, worked out from the records. No folder is
    written to."""
    tables: dict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        tables[combination(run)].append(run)
    groups = list(tables.values())
    names = titles([next((run for run in group if run.info.get("presets")), group[0]) for group in groups], ONE_TABLE)
    neighbours = Neighbours(runs)
    return [_comparison(group, title, neighbours, runs) for group, title in zip(groups, names, strict=True)]


def _comparison(
    runs: Sequence[StoredRun], title: str, neighbours: Neighbours, reported: Sequence[StoredRun]
) -> Comparison:
    """Return the table of `runs`; `reported` are the runs of all tables."""
    entries = []
    for run, label in zip(runs, labels(runs), strict=True):
        full = reference(run, runs) or reference(run, neighbours.fulls(run))
        reason = None if full else not_held(run, [*reported, *neighbours.fulls(run)])
        entries.append(ReportRow(run, full, summary_of(run, full), label, reason))
    entries.sort(key=lambda entry: (method_of(entry.run) != FULL, entry.label, asked(entry.summary)))
    if any(run.config.get("budget_rule") == "paper" for run in runs):
        title += ", budget_rule=paper"
    metric = str(runs[0].info.get("task_info", {}).get("metric", "score")).removeprefix("1/")  # of older runs
    return Comparison(title, metric, corrected(entries, has_scores=metric != PERPLEXITY))


def corrected(entries: Sequence[ReportRow], has_scores: bool) -> list[ReportRow]:
    """Return the rows with their p after Holm's correction over the scores and likelihoods of all of them."""
    scores = [entry.summary["full"]["p"] if has_scores and entry.summary["full"] else None for entry in entries]
    ps = [*scores, *(entry.cost.get("p") for entry in entries)]
    adjusted = iter(stats.holm([p for p in ps if p is not None]))
    placed = [None if p is None else next(adjusted) for p in ps]
    return [
        replace(entry, score_p=score_p, cost_p=cost_p)
        for entry, score_p, cost_p in zip(entries, placed, placed[len(entries) :], strict=False)
    ]


def asked(summary: Mapping[str, Any]) -> float:
    """Return the budget, in the order of budgets: shares below 1, tokens above, or bytes; 0 where there is none."""
    layers = summary["budget"]["layers"]
    return fmean(layers) if layers else float(summary["budget"].get("bytes") or summary["budget"]["asked"] or 0)
