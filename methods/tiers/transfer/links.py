"""Says when what crosses a link has arrived: by the clock of the machine, or by arithmetic.

Where the tiers share one memory there is no bus to hide. `Links` then says how long one would take: ready = max(now,
link free) + bytes / bandwidth, and whoever waits, waits until then.
"""

from __future__ import annotations

from time import perf_counter, sleep
from typing import Protocol

from methods.tiers.traffic import Traffic

_AWAKE_S = 0.005  # before a moment to wait for: a timer wakes milliseconds late beside a busy thread


class TransferClock(Protocol):
    """Tells the time in seconds, and lets it pass."""

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None: ...


class WallClock:
    """Is the clock of the machine."""

    now = staticmethod(perf_counter)

    def wait_until(self, moment: float) -> None:
        """Sleep, and stay awake for the last milliseconds."""
        while (left := moment - perf_counter()) > 0:
            if left > _AWAKE_S:
                sleep(left - _AWAKE_S)


class Link:
    """Carries bytes one after the other, in the order in which they come."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free = 0.0  # from this moment on it carries nothing

    def carry(self, size: int, from_moment: float) -> tuple[float, float]:
        """Return when `size` bytes, given to it at a moment, begin to move and when they have arrived."""
        began = max(from_moment, self.free)
        self.free = began + size / self.bytes_per_s
        return began, self.free


class Links:
    """Says how long transfers take that cross no real bus: over a link in each direction between host and device, and
    over one from disk to host. None: as long as they really take."""

    def __init__(self, bus: float | None = None, disk: float | None = None) -> None:
        """Take the bandwidths in bytes per second."""
        self.rates = bus, disk
        self.to_device, self.to_host, self.from_disk = (Link(rate) if rate else None for rate in (bus, bus, disk))

    def carry(self, moved: Traffic, from_moment: float) -> tuple[float, float] | None:
        """Return when bytes begin to move that were asked for at a moment, and when all have arrived; None where no
        link says. What comes from disk takes the bus after that."""
        began, ready = None, from_moment
        for link, size in (
            (self.from_disk, moved.from_disk_bytes),
            (self.to_device, moved.in_all("to_device_bytes")),
            (self.to_host, moved.to_host_bytes),
        ):
            if link is not None and size:
                start, ready = link.carry(size, ready)
                began = start if began is None else began
        return None if began is None else (began, ready)
