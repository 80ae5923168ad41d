"""Scores by group, and the examples that a run shares with its Full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from harness.results.records import Record

FULL = "full"  # the method that runs are held against


def paired(records: Sequence[Record], others: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Examples of both runs with the same id and the same prompt."""
    known = {(other.id, other.prompt_sha256): other for other in others}
    return [(r, known[r.id, r.prompt_sha256]) for r in records if (r.id, r.prompt_sha256) in known]


def columns(pairs: Sequence[tuple[Record, Record]]) -> tuple[list[float], list[float], list[str], list[str]]:
    """As evals/stats.py takes them: our scores and theirs, groups, units."""
    ours = [record for record, _ in pairs]
    scores, theirs = [record.score for record in ours], [record.score for _, record in pairs]
    return scores, theirs, [record.group for record in ours], [record.independent for record in ours]


def group_means(records: Sequence[Record]) -> dict[str, float]:
    return {group: fmean(scores) for group, scores in by_group(records).items()}


def mean_score(records: Sequence[Record]) -> float:
    """Mean of group means."""
    return fmean(group_means(records).values())


def by_group(records: Sequence[Record]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record.score)
    return groups
