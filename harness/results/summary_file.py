"""The summary of a run, worked out from its records; which Full it is held against; and `summary.json`, its copy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.results import files
from harness.results.compared import FULL
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
        """Those in the folder that holds the run's own, which is left out."""
        own = run.folder.resolve()
        folders = sorted(path.parent for path in own.parent.glob(f"{named}/{INFO}"))
        found = [self._run(folder) for folder in folders if folder != own]
        return [other for other in found if other is not None]

    def full_of(self, run: StoredRun) -> StoredRun | None:
        """The Full beside a run to hold it against."""
        return None if method_of(run) == FULL else reference(run, self.beside(run, f"*-{FULL}-*"))

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
    summary = summarise(run.records, config=run.config, info=info, full=records)
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
    """The Full to hold `run` against; where several fit, the one of the same sources and settings, then the largest.
    The times of one that brings its prompt back in every step are no baseline."""
    if method_of(run) == FULL:
        return None
    fit = [other for other in others if _is_baseline(other) and other.records and _comparable(run, other)]
    return max(fit, key=lambda other: _nearness(run, other), default=None)


def _is_baseline(run: StoredRun) -> bool:
    return method_of(run) == FULL and run.config.get("placement", DEVICE) == DEVICE


def combination(run: StoredRun) -> str:
    return files.canonical({name: run.config.get(name) for name in ONE_TABLE})


def _comparable(run: StoredRun, full: StoredRun) -> bool:
    same = all(run.config.get(name) == full.config.get(name) for name in SAME_NUMBERS)
    return same and combination(run) == combination(full)


def _nearness(run: StoredRun, full: StoredRun) -> tuple[bool, int, int]:
    code = [_code(one) for one in (run, full)]
    common = code[0].keys() & code[1].keys()
    shared = sum(run.config.get(name) == full.config.get(name) for name in run.config)
    return all(code[0][name] == code[1][name] for name in common), shared, len(full.records)


def _code(run: StoredRun) -> dict[str, Any]:
    """What the identity says of the code: modules by name, and all that is shared."""
    identity = run.info.get("identity", {})
    return {name: identity.get(name) for name in ("sources", "core")} | dict(identity.get("code", {}))


def method_of(run: StoredRun) -> str:
    return str(run.info.get("method"))
