"""A stored run with all that an explanation of it may rest on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.results.pairs import FULL
from harness.results.records import StoreError
from harness.results.store import StoredRun, load
from harness.results.summary_file import current_summary, reference


@dataclass(frozen=True)
class Subject:
    """`full`: the Full beside it. `traced`: the same run with trace=on, itself where it is that one."""

    run: StoredRun
    summary: dict[str, Any]
    full: StoredRun | None
    full_summary: dict[str, Any] | None
    traced: dict[str, Any] | None  # `trace` of its summary

    @property
    def is_full(self) -> bool:
        return bool(self.summary["method"] == FULL)


def subject(folder: Path) -> Subject:
    """With what lies beside the folder of the run."""
    run = load(folder)
    others = list(_beside(folder))
    full = reference(run, others)
    twin = next((other for other in (run, *others) if _traced(run, other)), None)
    return Subject(
        run,
        current_summary(run, full),
        full,
        current_summary(full, None) if full else None,
        current_summary(twin, None)["trace"] if twin else None,
    )


def _beside(folder: Path) -> Iterator[StoredRun]:
    for path in sorted(folder.resolve().parent.glob("*/run.json")):
        if path.parent != folder.resolve():
            with suppress(StoreError):
                yield load(path.parent)


def _traced(run: StoredRun, other: StoredRun) -> bool:
    """Whether `other` is `run` with its steps clocked."""
    ours, theirs = run.info.get("identity", {}), other.info.get("identity", {})
    same = other is run or {**ours, "trace": "on"} == theirs
    return bool(other.records) and other.config.get("trace") == "on" and same
