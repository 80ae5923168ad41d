"""Cautions about times: others used the processor meanwhile, or a GPU's steps were not captured."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from harness.results.alarms.alarm import Alarm, Row, named, titles
from harness.results.alarms.sessions import Session, sessions
from harness.terminal.tables import digits

SHARED = "shared_machine"


def shared(rows: Sequence[Row]) -> Iterator[Alarm]:
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


def launched(rows: Sequence[Row]) -> Iterator[Alarm]:
    """Of rows that show times of a GPU: those whose decode steps were launched operation by operation."""
    plain = [row for row in rows if row.run.info.get("plain_steps") and shows_times(row.summary)]
    if plain:
        reasons = dict.fromkeys(str(row.run.info["plain_steps"]) for row in plain)
        text = (
            "decode steps were not captured as CUDA graphs, so their times hold the launch of every operation: "
            f"{named(plain, rows)} ({'; '.join(reasons)})"
        )
        yield Alarm("launches", text, titles(plain))


def shows_times(summary: Mapping[str, Any]) -> bool:
    """Whether a table has a time of this row; under a shared prefill, of its traced steps alone."""
    return not summary["simulated"] or bool(summary.get("trace"))


def _load(ran: Sequence[Session]) -> str:
    crowded = [one for one in ran if one.crowded]
    loads = _span([max(one.loads) for one in crowded])
    cpus, own = _span([one.cpus or 0 for one in crowded]), _span([one.own for one in crowded])
    return f"load {loads} on {cpus} CPUs, of which a run's own work accounts for {own}"


def _span(numbers: Collection[float]) -> str:
    ends = (min(numbers), max(numbers))
    return " to ".join(dict.fromkeys(str(end) if isinstance(end, int) else digits(end) for end in ends))
