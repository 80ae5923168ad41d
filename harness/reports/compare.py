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
from harness.results.compared import FULL, merged, paired
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
from harness.terminal.tables import Column

PERPLEXITY = "perplexity"  # the metric of tasks whose texts are fed in place of answers


@dataclass(frozen=True)
class ReportRow:
    """A run in its table. `label` tells it from its neighbours, but for the budget. What takes a test is worked out
    once, however many forms the table is shown in."""

    run: StoredRun
    full: StoredRun | None
    summary: dict[str, Any]
    label: str
    copies: tuple[StoredRun, ...] = ()  # the same run with the same answers, found in other folders
    not_held: str | None = None  # why it is held against no Full, where there is one that might have been

    @property
    def title(self) -> str:
        return f"{self.label} {budget(self.summary)}".strip()

    @property
    def unfinished(self) -> str:
        """Return what pictures add to the name of a run that is not complete."""
        return "" if self.summary["status"] == "complete" else " (incomplete)"

    @cached_property
    def significant_groups(self) -> set[str]:
        """Groups whose difference to Full holds after Holm's correction over this run's groups; of one alone, none."""
        groups: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        for ours, theirs in paired(self.run.records, self.full.records if self.full else []):
            groups[ours.group].append((ours.score, theirs.score, ours.independent))
        if len(groups) < 2:
            return set()
        adjusted = stats.holm([stats.p_value(*zip(*pairs, strict=True)) for pairs in groups.values()])
        return {group for group, p in zip(groups, adjusted, strict=True) if p < ALPHA}


@dataclass(frozen=True)
class Comparison:
    """Holds the runs of one task, model and protocol, Full first. Tests are computed once."""

    title: str
    metric: str
    entries: list[ReportRow]
    heads: tuple[
        str, ...
    ] = ()  # of the main table's columns that are shown, but for the two that name a row; empty: all

    def under_runs(self, columns: Sequence[Column]) -> list[Column]:
        """Columns, one for each run, with its name and budget above them."""
        return [
            replace(column, head=row.label, unit=" ".join(filter(None, (budget(row.summary), column.unit))))
            for row, column in zip(self.entries, columns, strict=True)
        ]

    @property
    def of_perplexity(self) -> bool:
        """Return whether texts were fed in place of answers, so that only likelihoods can be compared."""
        return self.metric == PERPLEXITY

    @property
    def tested(self) -> list[int]:
        """Rows whose scores are held against Full's."""
        return [] if self.of_perplexity else [i for i, entry in enumerate(self.entries) if entry.summary["full"]]

    @property
    def costed(self) -> list[int]:
        """Rows whose likelihoods of the right answers are held against Full's."""
        return [i for i, entry in enumerate(self.entries) if beside_full(entry.summary).get("p") is not None]

    def beside(self, entry: ReportRow) -> Mapping[str, Any] | None:
        """A row's difference to Full, which pictures show: of its score, 0-1, or where texts were fed in nats per
        token, with a sign that makes more the better as well; None where there is none with an interval."""
        if not self.of_perplexity:
            beside: Mapping[str, Any] | None = entry.summary["full"]
            return beside
        cost = beside_full(entry.summary)
        if cost.get("ci95") is None:
            return None
        low, high = cost["ci95"]
        return {"diff": -cost["diff"], "ci95": [-high, -low], "p": cost["p"]}

    @cached_property
    def _corrected(self) -> list[float]:
        """p after Holm's correction over this table: of the scores first, then of the likelihoods."""
        rows = [entry.summary for entry in self.entries]
        scores = [rows[i]["full"]["p"] for i in self.tested]
        return stats.holm([*scores, *(rows[i]["likelihood"]["full"]["p"] for i in self.costed)])

    @property
    def adjusted(self) -> dict[int, float]:
        """Per row that is held against Full, the corrected p of its score."""
        return dict(zip(self.tested, self._corrected, strict=False))

    @property
    def adjusted_costs(self) -> dict[int, float]:
        """Per row whose likelihood is held against Full's, the corrected p of that."""
        return dict(zip(self.costed, self._corrected[len(self.tested) :], strict=True))

    @property
    def significant(self) -> set[int]:
        """Rows whose difference to Full in the score holds after this correction."""
        return {i for i, p in self.adjusted.items() if p < ALPHA}

    @property
    def significant_costs(self) -> set[int]:
        """Rows whose difference to Full in the likelihood holds after this correction."""
        return {i for i, p in self.adjusted_costs.items() if p < ALPHA}

    @cached_property
    def alarms(self) -> list[Alarm]:
        """Return what a reader must know before the table, the most serious first."""
        p = self.adjusted_costs if self.of_perplexity else self.adjusted
        rows = [AlarmRow(one.title, one.run, one.full, one.summary, p.get(i)) for i, one in enumerate(self.entries)]
        return table_alarms(rows)


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
    """reported: the runs of all tables."""
    entries, found = [], merged(runs)
    runs = [group[0] for group in found]
    for (run, *copies), label in zip(found, labels(runs), strict=True):
        full = reference(run, runs) or reference(run, neighbours.fulls(run))
        reason = None if full else not_held(run, [*reported, *neighbours.fulls(run)])
        entries.append(ReportRow(run, full, summary_of(run, full), label, tuple(copies), reason))
    entries.sort(key=lambda entry: (method_of(entry.run) != FULL, entry.label, asked(entry.summary)))
    if any(run.config.get("budget_rule") == "paper" for run in runs):
        title += ", budget_rule=paper"
    metric = str(runs[0].info.get("task_info", {}).get("metric", "score"))
    return Comparison(title, metric.removeprefix("1/"), entries)  # older runs say 1/perplexity


def beside_full(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the comparison of a run's likelihoods with Full's from its summary, or an empty mapping."""
    return (summary["likelihood"] or {}).get("full") or {}


def asked(summary: Mapping[str, Any]) -> float:
    """The budget, in the order of budgets: shares below 1, tokens above, or bytes; 0 where there is none."""
    layers = summary["budget"]["layers"]
    return fmean(layers) if layers else float(summary["budget"].get("bytes") or summary["budget"]["asked"] or 0)
