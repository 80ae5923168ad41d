"""The seconds of a serving loop: those of the wall, or those that its own work took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

Seconds = Callable[[], float]


class Clock:
    """Runs from 0 at `start`. `source` gives seconds; `sleep` lets them pass, and without it the clock is set forward
    over what would be slept through."""

    def __init__(self, source: Seconds = time.perf_counter, sleep: Callable[[float], None] | None = None) -> None:
        self._source, self._sleep = source, sleep
        self.start()

    def start(self) -> None:
        self._began = self._source()
        self.idle_s = 0.0  # of the seconds since, in which there was nothing to do

    def now(self) -> float:
        return self._source() - self._began

    def wait_until(self, at_s: float) -> None:
        before = self.now()
        if before >= at_s:
            return
        if self._sleep:
            self._sleep(at_s - before)
        else:
            self._began -= at_s - before
        self.idle_s += self.now() - before


CLOCKS: Mapping[str, Callable[[], Clock]] = {
    "wall": partial(Clock, time.perf_counter, time.sleep),
    "busy": Clock,  # wall time, idle time skipped
    "cpu": partial(Clock, time.process_time),  # of all threads of this process: what others take is not in it
}
