"""Compares two runs: the examples that both have, mean scores by group, and what else a task averages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from evals.base import Task
from harness.results.records import Record

FULL = "full"  # the method that runs are held against


def paired(records: Sequence[Record], others: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return the pairs of records that have the same id and the same prompt in both runs."""
    known = {(other.id, other.prompt_sha256): other for other in others}
    return [(r, known[r.id, r.prompt_sha256]) for r in records if (r.id, r.prompt_sha256) in known]


def for_statistics(
    pairs: Sequence[tuple[Record, Record]],
) -> tuple[list[float], list[float], list[str], list[str]]:
    """Return four lists, as evals/stats.py takes them: our scores, their scores, groups, and units
    (the texts or examples that count as independent)."""
    ours = [record for record, _ in pairs]
    scores, theirs = [record.score for record in ours], [record.score for _, record in pairs]
    return (
        scores,
        theirs,
        [record.group for record in ours],
        [record.independent for record in ours],
    )


def group_means(records: Sequence[Record]) -> dict[str, float]:
    """Return the mean score of each group of examples, by the group's name."""
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record.score)
    return {group: fmean(scores) for group, scores in groups.items()}


def mean_score(records: Sequence[Record]) -> float:
    """Return the mean of the group means, so that every group of examples counts the same."""
    return fmean(group_means(records).values())


def averages(task: Task, records: Sequence[Record]) -> dict[str, float]:
    """Return the averages that the task itself defines over its groups, such as category means or
    the perplexity of a whole text; empty if there is no record."""
    if not records:
        return {}
    details: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.details.items():
            if isinstance(value, (int, float)):
                details[name].append(value)
    return task.averages(
        group_means(records), {name: fmean(values) for name, values in details.items()}
    )
