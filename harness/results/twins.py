"""Runs that are there more than once, copied or made again, and what two runs differ in by arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.results.pairs import paired
from harness.results.store import StoredRun

SETTINGS = ("dtype", "device", "batch", "threads", "prefill_chunk")
VERSIONS, MACHINE = ("torch", "transformers", "triton"), ("cpu", "device_name", "threads")


def arithmetic(run: StoredRun) -> dict[str, Any]:
    """What rounding depends on, as far as it was recorded: settings, kernels, versions, machine."""
    known = run.info.get("provenance") or {}
    versions, machine = known.get("versions") or {}, known.get("machine") or {}
    found = {
        **{key: run.config.get(key) for key in SETTINGS},
        **{key: run.info.get(key) for key in ("backends", "own_forward", "plain_steps")},
        **{f"version of {key}": versions.get(key) for key in VERSIONS},
        **{f"machine's {key}": machine.get(key) for key in MACHINE},
    }
    return {key: value for key, value in found.items() if value is not None}


def round_alike(a: StoredRun, b: StoredRun) -> bool:
    """Whether nothing that is known of both may change a rounding."""
    ours, theirs = arithmetic(a), arithmetic(b)
    return all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys())


def same(a: StoredRun, b: StoredRun) -> bool:
    """Whether they are one run by identity and conditions, and so should have the same answers."""
    mine = a.info.get("identity_sha256")
    return mine is not None and mine == b.info.get("identity_sha256") and round_alike(a, b)


def changed(a: StoredRun, b: StoredRun) -> int:
    """How many answers to the same prompts differ, or are scored otherwise."""
    return sum(
        (ours.answer, ours.score) != (theirs.answer, theirs.score) for ours, theirs in paired(a.records, b.records)
    )


def merged(runs: Sequence[StoredRun]) -> list[list[StoredRun]]:
    """Runs that are one with the same answers side by side, the one with most records first."""
    groups: list[list[StoredRun]] = []
    for run in sorted(runs, key=lambda one: -len(one.records)):
        found = next((group for group in groups if same(group[0], run) and not changed(group[0], run)), None)
        if found is None:
            groups.append([run])
        else:
            found.append(run)
    return sorted(groups, key=lambda group: runs.index(group[0]))
