"""What is done one after the other behind the caller's back: rows leave the device, the disk is changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from harness.cachedattention.store.statistics import Statistics
from methods.tiers.transfer.lanes import TransferLane

T = TypeVar("T")


class Saving:
    """A write buffer: `capacity` bytes of rows may wait for `worker`, and what comes on top makes the caller wait.
    What became of them is told to the caller's own thread, when it asks."""

    def __init__(self, worker: TransferLane, capacity: int, statistics: Statistics) -> None:
        self._worker, self.capacity, self._statistics = worker, capacity, statistics
        self._changes: deque[tuple[Future[Any], int, Callable[[Future[Any]], None]]] = deque()
        self.held = 0

    def submit(self, action: Callable[[], T], finished: Callable[[Future[T]], None], size: int = 0) -> None:
        """`action` runs after all that were submitted before. `size`: bytes that wait for it in memory."""
        self.follow(self._worker.submit(partial(self._timed, action)), finished, size)

    def follow(self, future: Future[T], finished: Callable[[Future[T]], None], size: int) -> None:
        """Of what runs already."""
        self._changes.append((future, size, finished))
        self.held += size
        self.collect()
        if self.held > self.capacity:
            self._wait()

    def collect(self) -> None:
        """Tell what has been done by now."""
        while self._changes and self._changes[0][0].done():
            self._tell()

    def drain(self) -> None:
        """Wait for all."""
        while self._changes:
            self._tell()

    def _wait(self) -> None:
        began = perf_counter()
        while self._changes and self.held > self.capacity:
            self._tell()
        self._statistics.write_waits += 1
        self._statistics.write_wait_s += perf_counter() - began

    def _tell(self) -> None:
        """Of the oldest; `finished` may submit more."""
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
