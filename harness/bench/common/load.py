"""Seconds that know whether other processes held one up while they passed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import perf_counter
from typing import NamedTuple

TOLERATED = 0.02  # share of a measured time that its threads may wait for a CPU
SLICE_S = 0.004  # a thread that was put off waits about that long, where the system does not count it


class MarkedSeconds(float):
    """A measured time, and what it holds besides: a moment in which other processes had our CPU; on a GPU, launches."""

    disturbed: bool
    launches: bool

    def __new__(cls, value: float, disturbed: bool = False, launches: bool = False) -> MarkedSeconds:
        made = super().__new__(cls, value)
        made.disturbed, made.launches = disturbed, launches
        return made


class LoadCounts(NamedTuple):
    """Of all threads of a process, so far."""

    switches: int  # involuntary: a thread could go on, and somebody else got its CPU
    waited_s: float  # ready to run, without a CPU


class LoadWatch:
    """Over this process, or another one of this machine, from its making on."""

    def __init__(self, process: int | None = None) -> None:
        self.process = process
        self._before, self._began = counts(process), perf_counter()

    def seconds(self) -> MarkedSeconds:
        return MarkedSeconds(perf_counter() - self._began, self.disturbed())

    def disturbed(self) -> bool:
        """A thread lost its CPU to somebody, and all together waited a noticeable share of the time.

        Lost alone says little of a long time, for the system itself takes a CPU now and then; waited alone says little
        of a short one, for every thread that wakes up waits a little.
        """
        passed, now = perf_counter() - self._began, counts(self.process)
        switches, waited_s = (after - before for after, before in zip(now, self._before, strict=True))
        return switches > 0 and waited_s > TOLERATED * passed


def counts(process: int | None) -> LoadCounts:
    """Linux counts them by thread; elsewhere the waiting is estimated, and nothing is known of other processes."""
    threads = list(_threads(Path(f"/proc/{process or 'self'}/task")))
    if threads:
        return LoadCounts(*map(sum, zip(*threads, strict=True)))
    switches = getrusage(RUSAGE_SELF).ru_nivcsw if process is None else 0
    return LoadCounts(switches, switches * SLICE_S)


def _threads(folder: Path) -> Iterator[LoadCounts]:
    for task in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError, IndexError, ValueError):  # it has just ended, or the system does not count
            switches = int((task / "status").read_text().rpartition("nonvoluntary_ctxt_switches:")[2])
            yield LoadCounts(switches, int((task / "schedstat").read_text().split()[1]) / 1e9)
