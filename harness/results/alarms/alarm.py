"""An alarm, and a row of the table that it stands above."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.results.run_folder import StoredRun


@dataclass(frozen=True, slots=True)
class Alarm:
    """`red`: something is wrong until it is explained. Otherwise the rows mean less than a reader may think."""

    kind: str
    text: str
    rows: tuple[str, ...]  # titles
    red: bool = False


class AlarmRow(NamedTuple):
    """A run in its table."""

    title: str
    run: StoredRun
    full: StoredRun | None
    summary: Mapping[str, Any]
    p: float | None = None  # of its difference to Full, as the table stars it: corrected where the table corrects


def named(found: Sequence[AlarmRow], rows: Sequence[AlarmRow]) -> str:
    """By their titles, unless they are all of several."""
    return "all rows" if len(found) == len(rows) > 1 else ", ".join(titles(found))


def titles(rows: Iterable[AlarmRow]) -> tuple[str, ...]:
    return tuple(row.title for row in rows)
