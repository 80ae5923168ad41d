"""The threads of a store: lanes in which rows travel, and buffers that bound what waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from harness.cachedattention.store.statistics import Statistics
from methods.tiers.lanes import TransferLane
from methods.tiers.transfer import TransferEngine


class StoreLanes:
    """The lanes in which a store's rows travel. `reading` reads what a job waits for, in `count` threads, and `ahead`
    what the next jobs will; `copying` brings rows to the device, with those that the engine moves for caches, and
    `leaving` away from it; `writing` makes all changes on disk, in their order. With no threads the caller does
    everything itself, at once."""

    def __init__(self, engine: TransferEngine, count: int) -> None:
        self.engine, self.count, self.beside = engine, max(1, count), count > 0
        self.reading, self.ahead, self.writing = (
            engine.lane(name, number if count else 0) for name, number in (("read", count), ("ahead", 1), ("write", 1))
        )
        self.leaving = engine.lane("leave", 1 if count else 0)
        self.copying = engine.copy_lane if engine.beside or not count else engine.lane("copy", 1)

    def close(self) -> None:
        """Wait until all that was submitted is done, and end the store's own threads."""
        for lane in (self.leaving, self.writing, self.ahead, self.reading):
            lane.close()
        if self.copying is not self.engine.copy_lane:
            self.copying.close()


T = TypeVar("T")


class WriteBuffer:
    """A buffer in which `capacity` bytes of rows may wait for `worker`; what comes on top makes the caller wait. The
    caller's own thread learns what became of them when it asks."""

    def __init__(self, worker: TransferLane, capacity: int, statistics: Statistics) -> None:
        self._worker, self.capacity, self._statistics = worker, capacity, statistics
        self._changes: deque[tuple[Future[Any], int, Callable[[Future[Any]], None]]] = deque()
        self.held = 0

    def submit(self, action: Callable[[], T], finished: Callable[[Future[T]], None], size: int = 0) -> None:
        """Run `action` after all that were submitted before. `size`: bytes that wait for it in memory."""
        self.follow(self._worker.submit(partial(self._timed, action)), finished, size)

    def follow(self, future: Future[T], finished: Callable[[Future[T]], None], size: int) -> None:
        """Track a future that was submitted elsewhere."""
        self._changes.append((future, size, finished))
        self.held += size
        self.collect()
        if self.held > self.capacity:
            self._wait()

    def collect(self) -> None:
        """Call `finished` of everything that is done by now."""
        while self._changes and self._changes[0][0].done():
            self._finish_oldest()

    def drain(self) -> None:
        """Wait for everything."""
        while self._changes:
            self._finish_oldest()

    def _wait(self) -> None:
        began = perf_counter()
        while self._changes and self.held > self.capacity:
            self._finish_oldest()
        self._statistics.write_waits += 1
        self._statistics.write_wait_s += perf_counter() - began

    def _finish_oldest(self) -> None:
        """Wait for the oldest and call its `finished`, which may submit more."""
        future, size, finished = self._changes.popleft()
        future.exception()  # waits
        self.held -= size
        finished(future)

    def _timed(self, action: Callable[[], T]) -> T:
        began = perf_counter()
        try:
            return action()
        finally:
            self._statistics.saving_s += perf_counter() - began
