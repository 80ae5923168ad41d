"""Tasks as columns, as papers print them: a row per method and budget, over all tables of one model and protocol."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from harness.reports.compare import Comparison, asked
from harness.reports.labels import budget, name, titles
from harness.results.compared import given
from harness.results.files import canonical
from harness.results.identity import model_name
from harness.results.summary import ONE_TABLE
from harness.terminal.tables import Column, digits, percent

SHARED = tuple(key for key in ONE_TABLE if key != "task")
MEANING = "scores from 0 to 100, perplexities where a column says so; *: as in the task's own table"


@dataclass(frozen=True)
class TaskColumns:
    """The tables of one model and protocol as one."""

    title: str
    columns: list[Column]


def by_task(tables: Sequence[Comparison]) -> list[TaskColumns]:
    """Return one table for each set of tables that differ in their task alone, of at least two."""
    sets: dict[str, list[Comparison]] = defaultdict(list)
    for table in tables:
        run = table.entries[0].run
        shared = {key: run.config.get(key) for key in SHARED} | {"model_revision": given(run)["model_revision"]}
        sets[canonical(shared)].append(table)
    return [_joined(some) for some in sets.values() if len(some) > 1]


def _joined(tables: Sequence[Comparison]) -> TaskColumns:
    runs = [table.entries[0].run for table in tables]
    title = f"{model_name(runs[0].config)}, protocol={runs[0].config.get('protocol')}"
    heads = [one.replace(f", {title}", "") for one in titles(runs, ("task",))]
    found = [
        {(entry.label, budget(entry.summary)): _cell(table, i) for i, entry in enumerate(table.entries)}
        for table in tables
    ]
    order = {(entry.label, budget(entry.summary)): entry for table in tables for entry in table.entries}
    keys = sorted(order, key=lambda key: (name(order[key].run, "method") != "full", key[0], asked(order[key].summary)))
    return TaskColumns(
        title,
        [
            Column("method", "", [label for label, _ in keys], left=True),
            Column("budget", "", [asked_for for _, asked_for in keys]),
            *(
                Column(head, table.metric if table.of_perplexity else "", [cells.get(key, "") for key in keys])
                for head, table, cells in zip(heads, tables, found, strict=True)
            ),
        ],
    )


def _cell(table: Comparison, place: int) -> str:
    summary = table.entries[place].summary
    if table.of_perplexity:
        likelihood = summary["likelihood"]
        return digits(exp(likelihood["mean"])) + "*" * (place in table.significant_costs) if likelihood else ""
    return percent(summary["score"]["mean"]) + "*" * (place in table.significant)
