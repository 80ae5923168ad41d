"""Stamps of a row: letters that say what its numbers are not, explained below the table."""

from __future__ import annotations

from collections.abc import Iterator

from harness.reports.compare import Comparison, ReportRow
from harness.results.alarms import SHARED
from methods.tiers.tier import TIERS, bytes_key

BEFORE = {
    "S": "simulated: the cost is not paid in this code path, so speed is left out",
    "T": "traced: the clocks inside a step cost time, so speed is left out",
    "L": "load: others used the machine while it ran, so its times mean little",
}
BEHIND = {
    "X": "stored histories were lost, and computing them again changed what the method holds: answers may be others",
    "P": "plain steps: times hold the launch of each operation, for the reason in `plain_steps` of run.json",
    "C": "continued: times come from more than one session",
    "R": "running",
    "I": "interrupted",
    "F": "failed",
    "!": "see the notes",
}


def meanings() -> dict[str, str]:
    """Return the meaning of every stamp in the order in which a row shows them; TIERS holds those of tiers."""
    return BEFORE | dict(tier.stamp for tier in TIERS.values() if tier.stamp) | BEHIND


def stamps(entry: ReportRow, comparison: Comparison) -> str:
    row = entry.summary
    marks = {
        "S": row["simulated"],
        "T": row["traced"],
        "L": entry.title in loaded(comparison),
        **{
            tier.stamp[0]: row["host_is_cpu"] and row["memory"].get(bytes_key(name))
            for name, tier in TIERS.items()
            if tier.stamp
        },
        "X": row.get("lost_turns"),
        "P": entry.run.info.get("plain_steps"),
        "C": entry.run.info.get("earlier"),
    }
    status = {"running": "R", "interrupted": "I", "failed": "F"}.get(row["status"], "")
    return "".join(mark for mark, true in marks.items() if true) + status + "!" * bool(row["warnings"])


def loaded(comparison: Comparison) -> tuple[str, ...]:
    """Titles of the rows whose times others had a part in."""
    return next((alarm.rows for alarm in comparison.alarms if alarm.kind == SHARED), ())


def legend(comparison: Comparison) -> Iterator[str]:
    """A line per stamp that is used; what `!` points to are the notes themselves."""
    used = {stamp for entry in comparison.entries for stamp in stamps(entry, comparison)}
    yield from (f"{stamp}: {meaning}" for stamp, meaning in meanings().items() if stamp in used and stamp != "!")


def caution(comparison: Comparison) -> str:
    """Return a caution for a table of times without stamps; empty where no other process used the machine."""
    rows = loaded(comparison)
    named = "all rows" if len(rows) == len(comparison.entries) > 1 else ", ".join(rows)
    return f"others used the machine while these ran, so their times mean little: {named}" if rows else ""
