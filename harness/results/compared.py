"""Runs and records side by side: the examples that two share, and their scores by group."""

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
    """Return what the run was given, by the names of `GIVEN`: the hash of its model, of its prompts, and of the right
    answers that its scores, perhaps later ones, come from. A part is None where the run is older than it."""
    identity, again = run.info.get("identity") or {}, (run.info.get("rescored") or {}).get("present") or {}
    return {name: again.get(name, identity.get(name)) for name in GIVEN}


def paired(records: Sequence[Record], others: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return the examples of both runs that have the same id and the same prompt."""
    known = {(other.id, other.prompt_sha256): other for other in others}
    return [(r, known[r.id, r.prompt_sha256]) for r in records if (r.id, r.prompt_sha256) in known]


def for_statistics(pairs: Sequence[tuple[Record, Record]]) -> tuple[list[float], list[float], list[str], list[str]]:
    """Return pairs as evals/stats.py takes them: our scores, theirs, groups and units."""
    ours = [record for record, _ in pairs]
    scores, theirs = [record.score for record in ours], [record.score for _, record in pairs]
    return scores, theirs, [record.group for record in ours], [record.independent for record in ours]


def group_means(records: Sequence[Record]) -> dict[str, float]:
    """Return the mean score of each group."""
    groups: dict[str, list[float]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record.score)
    return {group: fmean(scores) for group, scores in groups.items()}


def mean_score(records: Sequence[Record]) -> float:
    """Return the mean of group means."""
    return fmean(group_means(records).values())
