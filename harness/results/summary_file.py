"""`summary.json`: which Full a run is held against, and the one place that writes the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.results import files, triage
from harness.results.pairs import FULL
from harness.results.records import StoreError
from harness.results.store import EXAMPLES, StoredRun, load
from harness.results.summary import SCHEMA, summarise
from methods.tiers.tier import DEVICE

NAME = "summary.json"
ONE_TABLE = ("task", "model", "protocol", "chat", "generation", "seed")  # never mixed in one table
SAME_NUMBERS = ("dtype", "device")  # a Full that differs here differs by rounding alone


def write_summary(run: StoredRun, full: StoredRun | None) -> dict[str, Any]:
    """Derives the summary of `run` beside `full` and writes it into the run's folder."""
    summary = _derived(run, full)
    files.write_json(run.folder / NAME, summary)
    return summary


def current_summary(run: StoredRun, full: StoredRun | None) -> dict[str, Any]:
    """summary.json as it is, or made again from the records where it is missing or older than what it rests on."""
    path = run.folder / NAME
    with suppress(StoreError):
        if path.exists() and not _stale(stored := files.read_json(path), path, run, full):
            return stored
    full = full or reference(run, list(_neighbours(run)))
    try:
        return write_summary(run, full)
    except OSError:  # results that may only be read are reported as well
        return _derived(run, full)


def _derived(run: StoredRun, full: StoredRun | None) -> dict[str, Any]:
    """Names its Full by folder and hash, where it is held against one."""
    records = full.records if full else None
    triaged = triage.read(run.folder, run.info)
    info = run.info | {"status": run.status}
    summary = summarise(run.records, config=run.config, info=info, full=records, triaged=triaged)
    if full and summary["full"]:
        summary["full"] |= _identity(full)
    return summary


def _identity(full: StoredRun) -> dict[str, Any]:
    return {"folder": full.folder.name, "identity_sha256": full.info.get("identity_sha256")}


def reference(run: StoredRun, others: Sequence[StoredRun]) -> StoredRun | None:
    """The Full to hold `run` against; where several fit, the one of the same sources and settings, then the largest.
    The times of one that brings its prompt back in every step are no baseline."""
    if method_of(run) == FULL:
        return None
    fit = [other for other in others if _is_baseline(other) and other.records and _comparable(run, other)]
    return max(fit, key=lambda other: _nearness(run, other), default=None)


def _is_baseline(run: StoredRun) -> bool:
    return method_of(run) == FULL and run.config.get("placement", DEVICE) == DEVICE


def _stale(summary: Mapping[str, Any], path: Path, run: StoredRun, full: StoredRun | None) -> bool:
    if summary.get("schema") != SCHEMA or summary.get("status") != run.status:
        return True
    if summary.get("num_examples") != len(run.records) or (full is not None and not _names(summary, full)):
        return True
    sources = [one.folder / name for one in (run, full) if one for name in (EXAMPLES, "run.json", triage.NAME)]
    return any(source.exists() and source.stat().st_mtime > path.stat().st_mtime for source in sources)


def _neighbours(run: StoredRun) -> Iterator[StoredRun]:
    """Runs of Full beside the run's own folder."""
    for folder in sorted(run.folder.parent.glob(f"*-{FULL}-*")):
        with suppress(StoreError):
            yield load(folder)


def _names(summary: Mapping[str, Any], full: StoredRun) -> bool:
    """Whether the summary is held against this Full."""
    named = summary.get("full") or {}
    return all(named.get(key) == value for key, value in _identity(full).items())


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
