"""An alarm as a value, and a row of the table that it stands above."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.results.run_folder import StoredRun

RED = ("above_full", "same_as_full")
MEANINGS = {  # what a kind of alarm says of the rows that it counts, the most important first
    "above_full": "score above Full, so look for a bug",
    "same_as_full": "all outputs are Full's though only a part was read: did the method run?",
    "at_chance": "Full itself is near guessing, so no loss can show",
    "simulated": "simulated",
    "budgets_differ": "budgets do not mean the same in all rows",
    "shared_machine": "others used the machine, so times mean little",
    "full_elsewhere": "Full ran on another machine or more than an hour apart, so do not compare times with Full's",
    "lost_turns": "stored histories were lost and computed again, so answers may differ",
    "tuning_seed": "these are the examples on which harness.tune chooses parameters: do not report them",
}


@dataclass(frozen=True, slots=True)
class Alarm:
    """`count` rows `of` the rows of a table deserve doubt for one reason."""

    kind: str  # one of MEANINGS
    count: int
    of: int
    rows: tuple[str, ...]  # their titles
    reason: str = ""  # what is simulated, or what a budget means

    @property
    def red(self) -> bool:
        """Return whether something is wrong until it is explained; otherwise the rows mean less than they seem to."""
        return self.kind in RED

    @property
    def text(self) -> str:
        """Return the alarm in words, with the rows that it counts."""
        rows = "all rows" if self.count == self.of > 1 else ", ".join(self.rows)
        if self.kind == "simulated":
            return f"{rows}: {self.reason}"
        return f"{rows}: {MEANINGS[self.kind]}{f': {self.reason}' if self.reason else ''}"


class AlarmRow(NamedTuple):
    """A run in its table."""

    title: str
    run: StoredRun
    full: StoredRun | None
    summary: Mapping[str, Any]
    p: float | None = None  # of its difference to Full, as the table stars it: corrected where the table corrects
