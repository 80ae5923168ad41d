"""Runs and records side by side: the examples that two share, their scores by group, and which runs are copies."""

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


def merged(runs: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """Return runs that are copies in one list, the one with most records first: they have one identity, one
    configuration, one machine, and no example with another answer or score."""
    groups: list[list[StoredRun]] = []
    for run in sorted(runs, key=lambda run: -len(run.records)):
        copies = next((group for group in groups if _is_copy(run, group[0])), None)
        if copies is None:
            groups.append([run])
        else:
            copies.append(run)
    return sorted(groups, key=lambda group: runs.index(group[0]))


def _is_copy(run: StoredRun, other: StoredRun) -> bool:
    alike = (_conditions(run) == _conditions(other)) and run.info.get("identity_sha256") is not None
    pairs = paired(run.records, other.records)
    return alike and all((ours.answer, ours.score) == (theirs.answer, theirs.score) for ours, theirs in pairs)


def _conditions(run: StoredRun) -> list[Any]:
    """Return the identity of a run, and what its answers and times depend on besides."""
    machine = run.provenance("machine")
    config = {key: value for key, value in run.config.items() if key != "results"}
    return [run.info.get("identity_sha256"), config, machine.get("cpu"), machine.get("device_name")]
