"""Runs side by side: the examples that two share, their scores by group, and whether two are one run, copied or made
again."""

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
    """Examples of both runs with the same id and the same prompt."""
    known = {(other.id, other.prompt_sha256): other for other in others}
    return [(r, known[r.id, r.prompt_sha256]) for r in records if (r.id, r.prompt_sha256) in known]


def for_statistics(pairs: Sequence[tuple[Record, Record]]) -> tuple[list[float], list[float], list[str], list[str]]:
    """Return pairs as evals/stats.py takes them: our scores, theirs, groups and units."""
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


SETTINGS = ("dtype", "device", "batch", "threads", "prefill_chunk")
VERSIONS, MACHINE = ("torch", "transformers", "triton"), ("cpu", "device_name", "threads")


def arithmetic(run: StoredRun) -> dict[str, Any]:
    """Return what rounding depends on, as far as it was recorded: settings, kernels, versions and machine."""
    versions, machine = run.provenance("versions"), run.provenance("machine")
    found = {
        **{key: run.config.get(key) for key in SETTINGS},
        **{key: run.info.get(key) for key in ("backends", "own_forward", "plain_steps")},
        **{f"version of {key}": versions.get(key) for key in VERSIONS},
        **{f"machine's {key}": machine.get(key) for key in MACHINE},
    }
    return {key: value for key, value in found.items() if value is not None}


def round_alike(a: StoredRun, b: StoredRun) -> bool:
    """Return whether nothing that is known of both runs may change a rounding."""
    ours, theirs = arithmetic(a), arithmetic(b)
    return all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys())


def same_run(a: StoredRun, b: StoredRun) -> bool:
    """Return whether two runs have one identity and the same conditions, and so should have the same answers."""
    mine = a.info.get("identity_sha256")
    return mine is not None and mine == b.info.get("identity_sha256") and round_alike(a, b)


def changed(a: StoredRun, b: StoredRun) -> int:
    """Count the answers to the same prompts that differ or have another score."""
    return sum(
        (ours.answer, ours.score) != (theirs.answer, theirs.score) for ours, theirs in paired(a.records, b.records)
    )


def merged(runs: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """Runs that are one with the same answers side by side, the one with most records first."""
    groups: list[list[StoredRun]] = []
    for run in sorted(runs, key=lambda one: -len(one.records)):
        found = next((group for group in groups if same_run(group[0], run) and not changed(group[0], run)), None)
        if found is None:
            groups.append([run])
        else:
            found.append(run)
    return sorted(groups, key=lambda group: runs.index(group[0]))
