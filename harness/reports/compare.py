"""Sorts finished runs into tables of rows: which runs share a table, what each row is called, which
run of Full it is compared with. The cells of a row are made in columns.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
    """A row of a table: a run, its summary, and the run of Full (dense attention, the baseline)
    that it is compared with. `label` and budget together name the row in its table."""

    run: StoredRun
    full: StoredRun | None
    summary: dict[str, Any]
    label: str
    # why it is held against no Full, where there is one that might have been
    not_held: str | None = None
    # of the difference of its score to Full's, after Holm's correction over the table
    score_p: float | None = None
    cost_p: float | None = None  # the same of the likelihoods of the right answers
    printed: str | None = None  # its budget, where it is not written as in a report

    @property
    def budget(self) -> str:
        return self.printed or budget(self.summary)

    @property
    def title(self) -> str:
        return f"{self.label} {self.budget}".strip()

    @property
    def cost(self) -> Mapping[str, Any]:
        """The comparison of the run's likelihoods with Full's; an empty mapping if there is
        none."""
        return (self.summary["likelihood"] or {}).get("full") or {}

    @property
    def score_differs(self) -> bool:
        return self.score_p is not None and self.score_p < ALPHA

    @property
    def cost_differs(self) -> bool:
        return self.cost_p is not None and self.cost_p < ALPHA


@dataclass(frozen=True)
class Comparison:
    """Hold one table: the runs of one task, model and protocol, Full first."""

    title: str
    metric: str
    entries: list[ReportRow]

    @property
    def of_perplexity(self) -> bool:
        """True if the texts were fed by force in place of answers, so that likelihoods take the
        place of scores."""
        return self.metric == PERPLEXITY

    @cached_property
    def alarms(self) -> list[Alarm]:
        """The alarms of this table (harness/results/alarms.py), the most serious first."""
        return table_alarms(
            [
                AlarmRow(
                    row.title,
                    row.run,
                    row.full,
                    row.summary,
                    row.cost_p if self.of_perplexity else row.score_p,
                )
                for row in self.entries
            ]
        )


def comparisons(runs: Sequence[StoredRun]) -> list[Comparison]:
    """Return the tables of these runs: runs that must not be mixed (another task, model or
    protocol) are in different tables. All numbers are computed from the records; no folder is
    written to."""
    tables: dict[str, list[StoredRun]] = defaultdict(list)
    for run in runs:
        tables[combination(run)].append(run)
    groups = list(tables.values())
    names = titles(
        [next((run for run in group if run.info.get("presets")), group[0]) for group in groups],
        ONE_TABLE,
    )
    neighbours = Neighbours(runs)
    return [
        _comparison(group, title, neighbours) for group, title in zip(groups, names, strict=True)
    ]


def _comparison(runs: Sequence[StoredRun], title: str, neighbours: Neighbours) -> Comparison:
    """Return the table of `runs`, each compared with a run of Full (dense attention) if one of
    `neighbours` fits. If one almost fits a row, the row keeps the reason why it does not."""
    entries = []
    for run, label in zip(runs, labels(runs), strict=True):
        full = reference(run, neighbours.known(run)) or reference(run, neighbours.beside(run))
        reason = None if full else not_held(run, [*neighbours.known(run), *neighbours.beside(run)])
        entries.append(ReportRow(run, full, summary_of(run, full), label, reason))
    entries.sort(
        key=lambda entry: (method_of(entry.run) != FULL, entry.label, asked(entry.summary))
    )
    if any(run.config.get("budget_rule") == "paper" for run in runs):
        title += ", budget_rule=paper"
    metric = str(runs[0].info.get("task_info", {}).get("metric", "score"))
    return Comparison(title, metric, corrected(entries, has_scores=metric != PERPLEXITY))


def corrected(entries: Sequence[ReportRow], has_scores: bool) -> list[ReportRow]:
    """Return the rows with the p values of their comparisons with Full, the baseline, after Holm's
    correction over the whole table. With `has_scores`, p values of scores and of likelihoods are
    corrected together."""
    scores = [
        entry.summary["full"]["p"] if has_scores and entry.summary["full"] else None
        for entry in entries
    ]
    ps = [*scores, *(entry.cost.get("p") for entry in entries)]
    adjusted = iter(stats.holm([p for p in ps if p is not None]))
    placed = [None if p is None else next(adjusted) for p in ps]
    return [
        replace(entry, score_p=score_p, cost_p=cost_p)
        for entry, score_p, cost_p in zip(entries, placed, placed[len(entries) :], strict=False)
    ]


def asked(summary: Mapping[str, Any]) -> float:
    """Return the budget as a number to sort rows by: a share (below 1), a number of tokens, or
    bytes; 0 without a budget."""
    budget = summary["budget"]
    return float(budget.get("bytes") or budget["asked"] or 0)
