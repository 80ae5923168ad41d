"""Rows whose times are doubtful: others used the processor meanwhile, or Full ran on another machine or in other hours.

A run's own threads make a load, too. What they leave unexplained is others' work. So is a run of another process that
went on at the same time on the same processor, whatever the load says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from harness.results.alarms.alarm import AlarmRow
from harness.results.run_folder import StoredRun
from methods.tiers.tier import DEVICE, TIERS

SHARED = "shared_machine"
Info = Mapping[str, Any]
HARDWARE = ("cpu", "device_name", "cpus_usable", "memory_bytes")


def shared(rows: Sequence[AlarmRow]) -> list[AlarmRow]:
    """Return the rows that show times and were disturbed: by others' load, or by another row that ran in a process
    beside."""
    ran = [one for row in rows for one in sessions(row.run)]
    timed = [row for row in rows if shows_times(row.summary)]
    return [row for row in timed if any(one.crowded or any(map(one.beside, ran)) for one in sessions(row.run))]


def full_elsewhere(rows: Sequence[AlarmRow]) -> list[AlarmRow]:
    """Return the rows that show times, in a table that shows their Full's, and ran on another machine than it, or more
    than `SAME_HOURS` from it, because one machine's speed changes from hour to hour."""
    timed = {row.run.folder: row for row in rows if shows_times(row.summary)}
    return [row for row in timed.values() if row.full and row.full.folder in timed and _apart(row.run, row.full)]


def _apart(run: StoredRun, full: StoredRun) -> bool:
    """Return whether the times of two runs are not alike, as far as both say where and when they ran."""
    ours, theirs = sessions(run), sessions(full)
    elsewhere = any(
        a.place[key] != b.place[key] for a in ours for b in theirs for key in a.place.keys() & b.place.keys()
    )
    return elsewhere or max(a.gap(b) for a in ours for b in theirs) > SAME_HOURS


def shows_times(summary: Mapping[str, Any]) -> bool:
    """Return whether a table has a time of this row; under a shared prefill only that of its traced steps."""
    return not summary["simulated"] or bool(summary.get("trace"))


SAME_HOURS = timedelta(hours=1)  # from the end of one session to the start of the other
MARGIN, MARGIN_SHARE = 0.5, 0.1  # load that the system makes by itself: of a CPU, or a share of them where that is more


@dataclass(frozen=True, slots=True)
class RunSession:
    """Holds one process' part of a run, with times in ISO 8601, UTC; processor and process are null where not noted."""

    began: str
    ended: str
    processor: str | None
    process: int | None
    own: int  # load that it makes by itself
    cpus: int | None
    loads: tuple[float, ...]  # over the minute before it began, and before it ended; as far as they were recorded
    place: Mapping[str, Any]  # what tells machines apart, as far as it was recorded

    @property
    def crowded(self) -> bool:
        """Return whether others used the machine."""
        system = max(MARGIN, MARGIN_SHARE * (self.cpus or 0))
        return any(load > self.own + system for load in self.loads)

    def beside(self, other: RunSession) -> bool:
        """Return whether it ran at the same time in another process on the same processor."""
        if self.processor is None or self.processor != other.processor or self.process == other.process:
            return False
        return self.began < other.ended and other.began < self.ended

    def gap(self, other: RunSession) -> timedelta:
        """Return the time from the end of the earlier one to the start of the later one; 0 where they overlap, or where
        nobody noted when they ran."""
        if not (self.began and other.began):
            return timedelta(0)
        ended, began = min(self.ended, other.ended), max(self.began, other.began)
        return max(datetime.fromisoformat(began) - datetime.fromisoformat(ended), timedelta(0))


def sessions(run: StoredRun) -> list[RunSession]:
    """The last one at the end."""
    return [_session(run.config, info) for info in (*(run.info.get("earlier") or []), run.info)]


def _session(config: Info, info: Info) -> RunSession:
    """info: run.json, or what it says of an earlier session."""
    known = info.get("provenance") or {}
    machine, process = known.get("machine") or {}, known.get("process") or {}
    cpus, began = machine.get("cpus_usable"), str(info.get("started") or "")
    loads = [one[0] for one in (machine.get("load_average"), info.get("load_average_ended")) if one]
    place = {"host": process.get("host")} | {key: machine.get(key) for key in HARDWARE}
    return RunSession(
        began=began,
        ended=str(info.get("ended") or began),
        processor=_processor(config, process, machine),
        process=process.get("pid"),
        own=_own_load(config, machine),
        cpus=cpus,
        loads=tuple(loads) if cpus else (),
        place={key: value for key, value in place.items() if value is not None},
    )


def _processor(config: Info, process: Info, machine: Info) -> str | None:
    """Hosts may share a name (containers do), so what is known of the hardware goes with it."""
    device = "cpu" if config.get("device") == "cpu" else machine.get("device_id")
    host = process.get("host")
    return f"{host} {device} {machine.get('cpu')} {machine.get('memory_bytes')}" if host and device else None


def _own_load(config: Info, machine: Info) -> int:
    """Its threads, and one more where files are read and written beside them. A GPU needs one CPU that is free."""
    cpus = machine.get("cpus_usable") or 0
    threads = (machine.get("threads") or cpus) if config.get("device", "cpu") == "cpu" else cpus - 1
    placement = TIERS.get(config.get("placement", DEVICE))
    return threads + ((placement is not None and placement.in_files) or config.get("history") == "store")
