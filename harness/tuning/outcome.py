"""What a search found, as rows of a table: scores with intervals, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from evals import stats
from harness.results import pairs
from harness.results.measures import over_known
from harness.results.pairs import mean_score, paired
from harness.results.records import Record
from harness.terminal.tables import BYTES, Column, percent, probability, scaled
from methods.tiers.tier import DEVICE, TIERS


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate on the examples it ran on; `beside`: against the start on the same ones."""

    label: str
    records: Sequence[Record]
    start: Sequence[Record]

    @property
    def n(self) -> int:
        return len(self.records)

    @property
    def mean(self) -> float:
        return mean_score(self.records)

    @property
    def interval(self) -> stats.Interval:
        units = [r.independent for r in self.records]
        found = stats.interval([r.score for r in self.records], [r.group for r in self.records], units=units)
        assert found is not None
        return found

    @property
    def beside(self) -> stats.Paired:
        return stats.paired(*pairs.columns(paired(self.records, self.start)))

    @property
    def detectable(self) -> float | None:
        """The gain that these examples would have shown with 80 % power."""
        return stats.detectable(*pairs.columns(paired(self.start, self.records)))

    @property
    def read(self) -> float | None:
        """Share of the prompt read per step."""
        return over_known(fmean, [record.attended_share for record in self.records])

    @property
    def device_bytes(self) -> float:
        return fmean(record.kv[DEVICE] for record in self.records)

    @property
    def moved_bytes(self) -> float | None:
        return over_known(fmean, [record.measured.get("moved_bytes_per_step") for record in self.records])

    @property
    def score(self) -> str:
        """ "40.0 [22.7, 59.4]" """
        return spelled(self.mean, self.interval)


def columns(rows: Sequence[Row]) -> list[Column]:
    """The first row is the start."""
    tests = [None, *(row.beside for row in rows[1:])]
    device, device_unit = scaled([row.device_bytes for row in rows], BYTES)
    moved, moved_unit = scaled([row.moved_bytes for row in rows], BYTES)
    return [
        Column("parameters", "", [row.label for row in rows], left=True),
        Column("score", "95% CI", [row.score for row in rows]),
        Column("vs first", "95% CI", [spelled(one.diff, one.ci, sign=True) if one else "" for one in tests]),
        Column("p", "", [probability(one.p) if one else "" for one in tests]),
        Column("attended", "%", [percent(row.read) for row in rows]),
        Column(TIERS[DEVICE].head, device_unit, device),
        Column("moved", f"{moved_unit}/step", moved if any(row.moved_bytes for row in rows) else [""] * len(rows)),
        Column("n", "", [str(row.n) for row in rows]),
    ]


def spelled(mean: float, ends: stats.Interval, sign: bool = False) -> str:
    low, high = (percent(end, sign=sign) for end in (ends.low, ends.high))
    return f"{percent(mean, sign=sign)} [{low}, {high}]"
