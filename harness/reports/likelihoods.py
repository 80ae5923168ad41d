"""Columns on the likelihood of the right answers: one in the main table, and a table of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.reports.compare import Comparison
from harness.reports.labels import budget
from harness.terminal.tables import Column, counts, digits, number, probability

CAPTION = "Likelihood of the right answer"
MEANING = (
    "NLL: cost of the right answer in nats per token behind the seal, mean over groups, 0 where the answer is certain; "
    "NLL vs full: paired difference and interval of the signed-rank test, which a few failed prompts hardly move; "
    "mean: the mean difference, which they do; p: that test's, uncorrected"
)


def cost_difference(table: Comparison) -> Column:
    """Return the main table's column: by how much more a right answer costs than under Full, with its interval."""
    found = [_beside(entry.summary) for entry in table.entries]
    cells = [f"{_with_ci(one)}{'*' * (i in table.significant_costs)}" for i, one in enumerate(found)]
    return Column("NLL vs full", "nats, 95% CI", cells, values=[one.get("diff") for one in found])


def likelihood_table(table: Comparison) -> list[Column]:
    """Return a row for each run; empty where no likelihood was measured."""
    rows = [entry.summary for entry in table.entries]
    own, found = [row["likelihood"] or {} for row in rows], [_beside(row) for row in rows]
    if not any(own):
        return []
    ps = [f"{probability(one.get('p'))}{'*' * (i in table.significant_costs)}" for i, one in enumerate(found)]
    means = [one.get("mean_diff") for one in found]
    return [
        Column("method", "", [entry.label for entry in table.entries], left=True),
        Column("budget", "", [budget(row) for row in rows]),
        number("NLL", "nats/token", [one.get("mean") for one in own]),
        cost_difference(table),
        Column("mean", "nats", [_signed(mean) for mean in means], values=means),
        Column("p", "", ps, values=[one.get("p") for one in found]),
        counts("n", [one.get("n") for one in own]),
    ]


def _beside(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    return (summary["likelihood"] or {}).get("full") or {}


def _with_ci(beside: Mapping[str, Any]) -> str:
    low, high = beside.get("ci95") or (None, None)
    span = f" [{_signed(low)}, {_signed(high)}]" if low is not None else ""
    return f"{_signed(beside.get('diff'))}{span}"


def _signed(nats: float | None) -> str:
    """Write a difference with its sign; none but 0 reads as 0, so that an interval shows on which side it lies."""
    if not nats:
        return "" if nats is None else "0"
    size = abs(nats)
    return ("-" if nats < 0 else "+") + (digits(size) if size >= 0.001 else f"{size:.0e}")
