"""Cautions about times: others used the processor meanwhile, a GPU's steps were not captured, or Full's times come from
another machine or other hours.

A run's own threads make a load, too. What they leave unexplained is others' work. So is a run of another process that
went on at the same time on the same processor, whatever the load says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Any

from harness.results.alarms.alarm import Alarm, AlarmRow, named, titles
from harness.results.run_folder import StoredRun
from harness.terminal.tables import digits
from methods.tiers.tier import DEVICE, TIERS

SHARED = "shared_machine"
Info = Mapping[str, Any]
HARDWARE = ("cpu", "device_name", "cpus_usable", "memory_bytes")


def shared(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    """Of rows that show times: others' load, or another row that ran in a process beside."""
    found = [sessions(row.run) for row in rows]
    timed = [i for i, row in enumerate(rows) if shows_times(row.summary)]
    crowded = [i for i in timed if any(one.crowded for one in found[i])]
    beside = [i for i in timed if any(one.beside(other) for one in found[i] for other in chain(*found))]
    told = []
    if crowded:
        told.append(f"{_load([one for i in crowded for one in found[i]])}: {named([rows[i] for i in crowded], rows)}")
    if beside:
        told.append(f"processes ran side by side on one processor: {named([rows[i] for i in beside], rows)}")
    if told:
        text = f"others used the machine, so times mean little: {'; '.join(told)}"
        yield Alarm(SHARED, text, titles(rows[i] for i in sorted({*crowded, *beside})))


def full_elsewhere(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    """Of rows that show times in a table that shows their Full's: those that ran on another machine than it, or more
    than `SAME_HOURS` from it, because one machine's speed changes from hour to hour."""
    timed = {row.run.folder: row for row in rows if shows_times(row.summary)}
    held = [(row, timed.get(row.full.folder)) for row in timed.values() if row.full]
    apart = [(row, reason) for row, full in held if full and (reason := _apart(row.run, full.run))]
    if apart:
        told = ", ".join(f"{row.title} ({reason})" for row, reason in apart)
        text = (
            "Full ran on another machine than these rows, or more than an hour from them, so their times are not to be "
            f"compared with Full's: {told}; run Full again together with them, in another results.root"
        )
        yield Alarm("full_elsewhere", text, titles([row for row, _ in apart]))


def _apart(run: StoredRun, full: StoredRun) -> str | None:
    """Return why the times of two runs are not alike, as far as both say where and when they ran."""
    ours, theirs = sessions(run), sessions(full)
    if any(a.place[key] != b.place[key] for a in ours for b in theirs for key in a.place.keys() & b.place.keys()):
        return "another machine"
    gap = max(a.gap(b) for a in ours for b in theirs)
    return f"{gap / timedelta(hours=1):.1f} hours apart" if gap > SAME_HOURS else None


def launched(rows: Sequence[AlarmRow]) -> Iterator[Alarm]:
    """Of rows that show times of a GPU: those whose decode steps were launched operation by operation."""
    plain = [row for row in rows if row.run.info.get("plain_steps") and shows_times(row.summary)]
    if plain:
        reasons = dict.fromkeys(str(row.run.info["plain_steps"]) for row in plain)
        text = (
            "decode steps were not captured, so their times hold the launch of every operation: "
            f"{named(plain, rows)} ({'; '.join(reasons)})"
        )
        yield Alarm("launches", text, titles(plain))


def shows_times(summary: Mapping[str, Any]) -> bool:
    """Whether a table has a time of this row; under a shared prefill, of its traced steps alone."""
    return not summary["simulated"] or bool(summary.get("trace"))


def _load(ran: Sequence[RunSession]) -> str:
    crowded = [one for one in ran if one.crowded]
    loads = _span([max(one.loads) for one in crowded])
    cpus, own = _span([one.cpus or 0 for one in crowded]), _span([one.own for one in crowded])
    return f"load {loads} on {cpus} CPUs, of which a run's own work accounts for {own}"


def _span(numbers: Collection[float]) -> str:
    ends = (min(numbers), max(numbers))
    return " to ".join(dict.fromkeys(str(end) if isinstance(end, int) else digits(end) for end in ends))


SAME_HOURS = timedelta(hours=1)  # from the end of one session to the start of the other
MARGIN, MARGIN_SHARE = 0.5, 0.1  # load that the system makes by itself: of a CPU, or a share of them where that is more


@dataclass(frozen=True, slots=True)
class RunSession:
    """One process' part of a run, times in ISO 8601, UTC. Where nobody noted processor or process, they are null."""

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
        """Whether others used the machine."""
        system = max(MARGIN, MARGIN_SHARE * (self.cpus or 0))
        return any(load > self.own + system for load in self.loads)

    def beside(self, other: RunSession) -> bool:
        """Whether it went on at the same time in another process, on the same processor."""
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
