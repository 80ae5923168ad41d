"""A stored run with all that an explanation of it may rest on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.results.compared import FULL
from harness.results.run_folder import StoredRun
from harness.results.summary_file import Neighbours, reference, summary_of


@dataclass(frozen=True)
class Subject:
    """`full`: the Full beside it. `traced`: the same run with trace=on, itself where it is that one."""

    run: StoredRun
    summary: dict[str, Any]
    full: StoredRun | None
    full_summary: dict[str, Any] | None
    traced: dict[str, Any] | None  # `trace` of its summary
    damage: list[str]  # sentences on folders beside it that cannot be read

    @property
    def is_full(self) -> bool:
        return bool(self.summary["method"] == FULL)


def subject(run: StoredRun, neighbours: Neighbours) -> Subject:
    """With what lies beside the folder of the run."""
    others = neighbours.beside(run)
    full = reference(run, others)
    twin = next((other for other in (run, *others) if _traced(run, other)), None)
    return Subject(
        run,
        summary_of(run, full),
        full,
        summary_of(full, None) if full else None,
        summary_of(twin, None)["trace"] if twin else None,
        neighbours.damage(run),
    )


def _traced(run: StoredRun, other: StoredRun) -> bool:
    """Whether `other` is `run` with its steps clocked."""
    ours, theirs = run.info.get("identity", {}), other.info.get("identity", {})
    same = other is run or {**ours, "trace": "on"} == theirs
    return bool(other.records) and other.config.get("trace") == "on" and same
