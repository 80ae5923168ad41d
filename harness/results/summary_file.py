"""The summary of a run, worked out from its records; which Full it is held against; and `summary.json`, its copy.

The command that makes or scores a run writes `summary.json`; reports only read, and never from that file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.results import files
from harness.results.compared import FULL, given, paired
from harness.results.identity import word
from harness.results.records import StoreError
from harness.results.run_folder import INFO, SUMMARY, StoredRun, load
from harness.results.summary import summarise
from methods.tiers.tier import DEVICE

ONE_TABLE = ("task", "model", "protocol", "chat", "generation", "seed")  # never mixed in one table
SAME_NUMBERS = ("dtype", "device")  # a Full that differs here differs by rounding alone


class Neighbours:
    """Runs beside others, each read once."""

    def __init__(self, known: Sequence[StoredRun] = ()) -> None:
        self._read: dict[Path, StoredRun | None] = {run.folder.resolve(): run for run in known}
        self._damage: dict[Path, str] = {}

    def beside(self, run: StoredRun, named: str = "*") -> list[StoredRun]:
        """Return the other runs in the folder that holds this run's folder."""
        own = run.folder.resolve()
        folders = sorted(path.parent for path in own.parent.glob(f"{named}/{INFO}"))
        found = [self._run(folder) for folder in folders if folder != own]
        return [other for other in found if other is not None]

    def fulls(self, run: StoredRun) -> list[StoredRun]:
        """Return the runs of Full in the folder that holds the run's own."""
        return self.beside(run, f"*-{FULL}-*")

    def damage(self, run: StoredRun) -> list[str]:
        """Sentences on those beside a run that were wanted and cannot be read."""
        beside = run.folder.resolve().parent
        return [text for folder, text in self._damage.items() if folder.parent == beside]

    def _run(self, folder: Path) -> StoredRun | None:
        if folder not in self._read:
            try:
                self._read[folder] = load(folder)
            except StoreError as error:
                self._read[folder], self._damage[folder] = None, str(error)
        return self._read[folder]


def summary_of(run: StoredRun, full: StoredRun | None) -> dict[str, Any]:
    """Worked out from the records of `run` beside those of `full`, which it names where it is held against one."""
    records, info = full.records if full else None, run.info | {"status": run.status}
    summary = summarise(run.records, config=run.config, info=info, full=records, failed=run.failed)
    if full and summary["full"]:
        summary["full"] |= {"folder": full.folder.name, "identity_sha256": full.info.get("identity_sha256")}
    return summary


def write_summary(run: StoredRun, summary: Mapping[str, Any]) -> None:
    """Bring summary.json up to date, a copy for other programs that nobody here reads back."""
    copy = json.loads(json.dumps(summary))
    with suppress(StoreError):
        if files.read_json(run.folder / SUMMARY) == copy:
            return
    files.write_json(run.folder / SUMMARY, copy)


def reference(run: StoredRun, others: Sequence[StoredRun]) -> StoredRun | None:
    """Return the Full to hold `run` against, or None: it has the same model, prompts and right answers and rounds
    alike. Where several fit, the one of the same sources and settings is taken, then the one that shares most examples.
    The times of one that brings its prompt back in every step are no baseline."""
    if method_of(run) == FULL:
        return None
    fit = [other for other in others if _is_kin(run, other) and not unlike(run, other)]
    return max(fit, key=lambda other: _nearness(run, other), default=None)


def not_held(run: StoredRun, others: Sequence[StoredRun]) -> str | None:
    """Return why a run for which `reference` finds nothing is held against none of `others`; None where none of them
    is a Full of the same task and settings."""
    found = [(unlike(run, other), other) for other in others if _is_kin(run, other)]
    if method_of(run) == FULL or not found:
        return None
    reasons, full = min(found, key=lambda pair: len(pair[0]))
    return f"{full.folder.name} differs in {' and '.join(reasons)}"


def unlike(run: StoredRun, full: StoredRun) -> list[str]:
    """Return, in words, what forbids to pair a run with a Full example by example; empty where nothing does."""
    ours, theirs = given(run), given(full)
    found = [
        word(key) + " (an older run does not say)" * (None in (ours[key], theirs[key]))
        for key in ours
        if ours[key] != theirs[key]
    ]
    found += [f"{key} ({full.config.get(key)})" for key in SAME_NUMBERS if run.config.get(key) != full.config.get(key)]
    if (placement := full.config.get("placement", DEVICE)) != DEVICE:
        found.append(f"placement ({placement})")
    if not found and run.records and not paired(run.records, full.records):
        found.append("every example")
    return found


def _is_kin(run: StoredRun, other: StoredRun) -> bool:
    """Return whether `other` is a Full with examples, of the task and settings of `run`."""
    return method_of(other) == FULL and bool(other.records) and _settings(run) == _settings(other)


def combination(run: StoredRun) -> str:
    """Return what all runs of one table share: settings, model, prompts and right answers."""
    return _settings(run) + files.canonical(given(run))


def _settings(run: StoredRun) -> str:
    return files.canonical({name: run.config.get(name) for name in ONE_TABLE})


def _nearness(run: StoredRun, full: StoredRun) -> tuple[bool, int, int]:
    code = [_code(one) for one in (run, full)]
    common = code[0].keys() & code[1].keys()
    shared = sum(run.config.get(name) == full.config.get(name) for name in run.config)
    pairs = len(paired(run.records, full.records))
    return all(code[0][name] == code[1][name] for name in common), shared, pairs


def _code(run: StoredRun) -> dict[str, Any]:
    """Return what the identity says of the code: modules by name, and the shared version."""
    identity = run.info.get("identity", {})
    return {name: identity.get(name) for name in ("sources", "core")} | dict(identity.get("code", {}))


def method_of(run: StoredRun) -> str:
    return str(run.info.get("method"))
