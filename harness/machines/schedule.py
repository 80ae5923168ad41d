"""A schedule: what a generation does in which order, without a clock, so that it can be replayed on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Lane = Literal["compute", "to device", "to host", "disk", "workers"]
COMPUTE: Lane = "compute"
TO_DEVICE: Lane = "to device"
TO_HOST: Lane = "to host"
DISK_LANE: Lane = "disk"
WORKERS: Lane = "workers"
LANES: tuple[Lane, ...] = (COMPUTE, TO_DEVICE, TO_HOST, DISK_LANE, WORKERS)


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that the device computes: bytes that it reads and writes, and floating-point operations."""

    name: str
    read: int = 0
    written: int = 0
    flop: int = 0


@dataclass(frozen=True, slots=True)
class Submitted:
    """Work that is handed over to another lane, and goes on beside what follows, until a `Waited` names its `key`.

    It begins once the work of the keys in `after` has ended. On a link `pieces` is how many pieces of memory its bytes
    lie in, and `gather` says that a kernel on the device collects them, which slows the device down meanwhile. Workers
    have `flop` as well.
    """

    key: int
    lane: Lane
    name: str
    nbytes: int
    pieces: int = 1
    after: tuple[int, ...] = ()
    gather: bool = False
    flop: int = 0


@dataclass(frozen=True, slots=True)
class Waited:
    """The device goes on only when the work of that key has ended."""

    key: int


@dataclass(frozen=True, slots=True)
class LayerBorder:
    """A layer of this number begins to attend."""

    layer: int


@dataclass(frozen=True, slots=True)
class TokenOut:
    """A token is complete. The first one ends the prefill, and the clock of a schedule starts before it."""


ScheduleEvent = Operation | Submitted | Waited | LayerBorder | TokenOut


def launches(schedule: Sequence[ScheduleEvent]) -> dict[str, int]:
    """How often each operation runs, by its name."""
    counts: dict[str, int] = {}
    for event in schedule:
        if isinstance(event, Operation):
            counts[event.name] = counts.get(event.name, 0) + 1
    return counts
