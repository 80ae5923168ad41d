"""Compares two runs: the examples that both have, and mean scores by group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from harness.results.records import Record
from harness.results.run_folder import StoredRun

FULL = "full"  # the method that runs are held against
GIVEN = ("model_revision", "prompts", "answers")  # parts of an identity; runs that differ in one are not compared


def given(run: StoredRun) -> dict[str, Any]:
    """Return what the run was given, by the names in `GIVEN`: hashes of its model, of its prompts
    and of its right answers (of today's, if the run was scored again). None for a hash that an
    older run does not have."""
    identity, again = run.info.get("identity") or {}, (run.info.get("rescored") or {}).get("present") or {}
    return {name: again.get(name, identity.get(name)) for name in GIVEN}


def paired(records: Sequence[Record], others: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return the pairs of records that have the same id and the same prompt in both runs."""
    known = {(other.id, other.prompt_sha256): other for other in others}
    return [(r, known[r.id, r.prompt_sha256]) for r in records if (r.id, r.prompt_sha256) in known]


def for_statistics(pairs: Sequence[tuple[Record, Record]]) -> tuple[list[float], list[float], list[str], list[str]]:
    """Return four lists, as evals/stats.py takes them: our scores, their scores, groups, and units
    (the texts or examples that count as independent)."""
    ours = [record for record, _ in pairs]
    scores, theirs = [record.score for record in ours], [record.score for _, record in pairs]
    return scores, theirs, [record.group for record in ours], [record.independent for record in ours]


def group_means(records: Sequence[Record]) -> dict[str, float]:
    """Return the mean score of each group of examples, by the group's name."""
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record.score)
    return {group: fmean(scores) for group, scores in groups.items()}


def mean_score(records: Sequence[Record]) -> float:
    """Return the mean of the group means, so that every group of examples counts the same."""
    return fmean(group_means(records).values())
