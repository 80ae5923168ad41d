"""Methods against methods: every row of a table held against one that was named, on the same prompts."""

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
    """Return the tables anew, with the rows called `reference` in place of Full. It is a label or preset, which stands
    for the row of the same budget, or has a budget (`snapkv 20%`) and stands for that row alone."""
    known = {called for table in tables for entry in table.entries for called in _names(entry)}
    if reference not in known:
        raise StoreError(f"--against {reference}: no run is called so{suggestion(reference, sorted(known))}")
    compared = []
    for table in tables:
        named = [entry for entry in table.entries if reference in _names(entry)]
        by_budget = {budget(entry.summary): entry for entry in named}
        rows = []
        for entry in table.entries:
            other = named[0] if len(named) == 1 else by_budget.get(budget(entry.summary))
            if other is not None and entry not in named:
                summary, label = summary_of(entry.run, other.run), f"{entry.label} against {other.title}"
                rows.append(replace(entry, full=other.run, summary=summary, label=label))
        if rows:
            entries = corrected(rows, has_scores=not table.of_perplexity)
            compared.append(replace(table, title=f"Against {reference}: {table.title}", entries=entries))
    return compared


def _names(entry: ReportRow) -> set[str]:
    """Return the names that a user may give a row: its label or its preset, each with or without its budget."""
    called = {entry.label, name(entry.run, "method")}
    return called | {f"{label} {budget(entry.summary)}".strip() for label in called}


def differences(table: Comparison) -> list[Column]:
    """Return the columns of such a table."""
    return [replace(column, head=HEADS[column.head]) for column in measurements(table) if column.head in HEADS]
