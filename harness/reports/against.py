"""Compares every row of a table with one row that the user names (`--against snapkv`), in place of
Full, on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.config.plugins import suggestion
from harness.reports.columns import measurements
from harness.reports.compare import Comparison, ReportRow, corrected
from harness.reports.labels import budget, name
from harness.results.records import StoreError
from harness.results.summary import summary_of
from harness.terminal.tables import Column

MEANING = (
    "differences on the same prompts, of scores in points and of the right answer's cost in nats per token (less is "
    "better); *: holds after Holm's correction over this table"
)
HEADS = {"method": "method", "budget": "budget", "vs full": "score", "p": "p", "NLL vs full": "NLL"}


def against(tables: Sequence[Comparison], reference: str) -> list[Comparison]:
    """Return the tables again, with rows compared with the method `reference` instead of Full. It
    is a row's label or preset, which means the row of the same budget, or a label with a budget
    (`snapkv 20%`), which means that row alone. Raise `StoreError` if no row has that name."""
    known = {called for table in tables for entry in table.entries for called in _names(entry)}
    if reference not in known:
        raise StoreError(
            f"--against {reference}: no run is called so{suggestion(reference, sorted(known))}"
        )
    compared = []
    for table in tables:
        named = [entry for entry in table.entries if reference in _names(entry)]
        by_budget = {budget(entry.summary): entry for entry in named}
        rows = []
        for entry in table.entries:
            other = named[0] if len(named) == 1 else by_budget.get(budget(entry.summary))
            if other is not None and reference not in _names(entry):
                summary = summary_of(entry.run, other.run)
                label = f"{entry.label} against {other.title}"
                rows.append(replace(entry, full=other.run, summary=summary, label=label))
        if rows:
            entries = corrected(rows, has_scores=not table.of_perplexity)
            compared.append(
                replace(table, title=f"Against {reference}: {table.title}", entries=entries)
            )
    return compared


def _names(entry: ReportRow) -> set[str]:
    """Return the names by which a user may call a row: label or preset, each with or without the
    budget."""
    called = {entry.label, name(entry.run, "method")}
    return called | {f"{label} {budget(entry.summary)}".strip() for label in called}


def differences(table: Comparison) -> list[Column]:
    """Return the columns of a table whose rows `against` has compared with a method other than
    Full: method, budget, and the differences in score and likelihood."""
    return [
        replace(column, head=HEADS[column.head])
        for column in measurements(table)
        if column.head in HEADS
    ]
