"""Scores by group of examples, and what a task makes of its groups: a row or a column per run, whichever are fewer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evals.base import AVERAGES
from harness.reports.columns import names
from harness.reports.compare import PERPLEXITY, Comparison
from harness.reports.likelihoods import perplexity_of_groups
from harness.terminal.tables import Column, counts, digits, number, percent


def by_run(table: Callable[[Comparison], list[Column]], comparison: Comparison) -> list[Column]:
    """A table with a column per run turned round, as papers print it: a row per run. The two are never both there: this
    one is where runs outnumber the rows, `by_column` where they do not."""
    columns, count = table(comparison), len(comparison.entries)
    if not _is_tall(columns, comparison):
        return []
    heads, runs = columns[:-count], columns[-count:]
    sizes = [f"n = {size}" for size in heads[1].cells] if len(heads) > 1 else [""] * len(heads[0].cells)
    return [
        *names(comparison.entries),
        *(
            Column(name, size, [run.cells[i] for run in runs], values=[run.values[i] for run in runs])
            for i, (name, size) in enumerate(zip(heads[0].cells, sizes, strict=True))
        ),
    ]


def by_column(table: Callable[[Comparison], list[Column]], comparison: Comparison) -> list[Column]:
    """The table as it is, where it has no fewer rows than runs."""
    columns = table(comparison)
    return [] if _is_tall(columns, comparison) else columns


def _is_tall(columns: Sequence[Column], comparison: Comparison) -> bool:
    return bool(columns) and len(comparison.entries) > len(columns[0].cells)


def group_table(comparison: Comparison) -> list[Column]:
    """Score per group of examples; empty where there is one group alone. *: differs from Full, after Holm over them."""
    scores = [entry.summary["score"]["groups"] for entry in comparison.entries]
    groups = list(dict.fromkeys(group for run in scores for group in run))
    if len(groups) < 2:
        return []
    sizes = {group: max(run[group]["n"] for run in scores if group in run) for group in groups}
    heads = [Column("group", "", groups, left=True), counts("n", list(sizes.values()))]
    if comparison.of_perplexity:
        found = [[run.get(group) for group in groups] for run in perplexity_of_groups(comparison)]
        return [*heads, *comparison.under_runs([number("", "", values) for values in found])]
    columns = []
    for entry, run in zip(comparison.entries, scores, strict=True):
        holds = entry.significant_groups
        cells = [_group_cell(run[group], sizes[group], group in holds) if group in run else "" for group in groups]
        columns.append(Column("", "", cells, values=[run.get(group, {}).get("mean") for group in groups]))
    return [*heads, *comparison.under_runs(columns)]


def _group_cell(score: Mapping[str, Any], size: int, holds: bool) -> str:
    """An unfinished group says over how many examples its mean is."""
    return percent(score["mean"]) + "*" * holds + (f" ({score['n']})" if score["n"] < size else "")


def average_table(comparison: Comparison) -> list[Column]:
    """Return the averages that the task makes of its groups; empty where that is only their mean. Values above 1 are no
    scores and stay raw."""
    runs = [entry.summary["score"]["averages"] for entry in comparison.entries]
    shown_above = {"mean", PERPLEXITY} if comparison.of_perplexity else {"mean"}
    listed = [name for name in dict.fromkeys(name for run in runs for name in run) if name not in shown_above]
    if not listed:
        return []
    raw = {name for name in listed if any(run.get(name, 0) > 1 for run in runs)}
    columns = []
    for run in runs:
        shown = {name: digits(value) if name in raw else percent(value) for name, value in run.items()}
        cells = [shown.get(name, "") for name in listed]
        columns.append(Column("", "", cells, values=[run.get(name) for name in listed]))
    return [Column("average", "", listed, left=True), *comparison.under_runs(columns)]


def average_meanings(comparison: Comparison) -> str:
    """The note below that table: what its names do not say."""
    shown = {name for entry in comparison.entries for name in entry.summary["score"]["averages"]}
    return "; ".join(f"{name}: {meaning}" for name, meaning in AVERAGES.items() if name in shown)
