"""Columns on the likelihood of the right answers: one in the main table, and a table of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from typing import Any

from harness.reports.compare import Comparison, beside_full
from harness.reports.labels import budget
from harness.results.summary import MIN_WINDOWS
from harness.terminal.tables import Column, counts, digits, number, probability

CAPTION = "Likelihood of the right answer"
MEANING = (
    "NLL: cost of the right answer in nats per token behind the seal, mean over groups, 0 where the answer is certain; "
    "NLL vs full: paired difference and interval of the signed-rank test, which a few failed prompts hardly move; "
    "mean: the mean difference, which they do; p: that test's, uncorrected"
)


def cost_difference(table: Comparison) -> Column:
    """Return the main table's column: by how much more a right answer costs than under Full, with its interval."""
    found = [beside_full(entry.summary) for entry in table.entries]
    shown = [nats_with_ci(one.get("diff"), one.get("ci95")) for one in found]
    cells = [f"{text}{'*' * (i in table.significant_costs)}" for i, text in enumerate(shown)]
    return Column("NLL vs full", "nats, 95% CI", cells, values=[one.get("diff") for one in found])


def likelihood_table(table: Comparison) -> list[Column]:
    """Return a row for each run; empty where no likelihood was measured, or where it is the main table's own number."""
    rows = [entry.summary for entry in table.entries]
    own, found = [row["likelihood"] or {} for row in rows], [beside_full(row) for row in rows]
    if not any(own) or table.of_perplexity:
        return []
    means = [one.get("mean_diff") for one in found]
    return [
        Column("method", "", [entry.label for entry in table.entries], left=True),
        Column("budget", "", [budget(row) for row in rows]),
        number("NLL", "nats/token", [one.get("mean") for one in own]),
        cost_difference(table),
        Column("mean", "nats", [signed(mean) for mean in means], values=means),
        _p(table),
        counts("n", [one.get("n") for one in own]),
    ]


def perplexities(table: Comparison) -> list[Column]:
    """Return what stands in place of scores where texts were fed: perplexity, and the difference to Full with its p."""
    means = [(entry.summary["likelihood"] or {}).get("mean") for entry in table.entries]
    values = [None if mean is None else exp(mean) for mean in means]
    return [number("perplexity", "", values), cost_difference(table), _p(table)]


def perplexity_of_groups(table: Comparison) -> list[dict[str, float]]:
    """Return the perplexity of each group of texts, by run."""
    found = [(entry.summary["likelihood"] or {}).get("groups", {}) for entry in table.entries]
    return [{name: exp(group["mean"]) for name, group in groups.items()} for groups in found]


def perplexity_notes(table: Comparison) -> list[str]:
    """Return what a reader of such a table must know of its numbers."""
    few = [entry.title for entry in table.entries if beside_full(entry.summary) and not _has_p(entry.summary)]
    told = [
        "perplexity: exp of the mean cost per token, mean over groups, the smaller the better; NLL vs full: paired "
        "difference per token over windows, by the signed-rank test; bytes held are the largest of any example, bytes "
        "of a step the mean"
    ]
    if few:
        told.append(f"fewer than {MIN_WINDOWS} windows, so no interval says how sure a difference is: {', '.join(few)}")
    return told


def _has_p(summary: Mapping[str, Any]) -> bool:
    return beside_full(summary)["p"] is not None


def _p(table: Comparison) -> Column:
    values = [beside_full(entry.summary).get("p") for entry in table.entries]
    cells = [f"{probability(p)}{'*' * (i in table.significant_costs)}" for i, p in enumerate(values)]
    return Column("p", "", cells, values=values)


def nats_with_ci(diff: float | None, ci: Sequence[float] | None) -> str:
    """Write a difference in nats with the interval behind it."""
    span = f" [{signed(ci[0])}, {signed(ci[1])}]" if ci else ""
    return f"{signed(diff)}{span}"


def signed(nats: float | None) -> str:
    """Write a difference with its sign; none but 0 reads as 0, so that an interval shows on which side it lies."""
    if not nats:
        return "" if nats is None else "0"
    size = abs(nats)
    return ("-" if nats < 0 else "+") + (digits(size) if size >= 0.001 else f"{size:.0e}")
