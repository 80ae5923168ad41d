"""Runs actions in threads in parallel to the model, each lane in its order, and records when they
ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Condition
from typing import Any, TypeVar

T = TypeVar("T")


class TransferLane:
    """Run submitted actions in order, in as many threads of its own as `threads` says; with 0, the
    caller runs each at once."""

    def __init__(self, name: str = "", threads: int = 0) -> None:
        """`name`: what the threads are called, after `transfer-`. `threads`: how many actions run
        at a time; 0: the caller runs them."""
        self.beside = threads > 0
        self._name, self._count = f"transfer-{name}", threads
        self._threads: ThreadPoolExecutor | None = None  # from the first thing on
        # how many actions are neither done nor cancelled
        self._held, self._changed = 0, Condition()

    def submit(self, action: Callable[[], T], after: Iterable[Future[Any]] = ()) -> Future[T]:
        """Run `action` once all of `after` have ended, whether or not they failed, and return a
        future of its result. While it waits, other actions in this lane may run. One that has not
        begun can be cancelled."""
        handle: Future[T] = Future()
        if self.beside:
            with self._changed:
                self._held += 1
            handle.add_done_callback(self._let_go)
        _when_ended(iter(list(after)), partial(self._begin, handle, action))
        return handle

    def close(self) -> None:
        """Wait until all submitted actions are done, also those that wait for others, and end the
        threads. Later actions start new ones."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def _let_go(self, _: Future[T]) -> None:
        with self._changed:
            self._held -= 1
            self._changed.notify_all()

    def _begin(self, handle: Future[T], action: Callable[[], T]) -> None:
        if not self.beside:
            _do(handle, action)
            return
        try:
            with self._changed:
                self._threads = self._threads or ThreadPoolExecutor(self._count, self._name)
                self._threads.submit(_do, handle, action)
        except RuntimeError:  # Python is about to end, and starts no threads any more
            _do(handle, action)


INLINE = TransferLane()


def _do(handle: Future[T], action: Callable[[], T]) -> None:
    if not handle.set_running_or_notify_cancel():
        return
    try:
        result = action()
    except BaseException as error:
        handle.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        handle.set_result(result)


def _when_ended(others: Iterator[Future[Any]], begin: Callable[[], None]) -> None:
    """Call `begin` when all of `others` have ended: at once, or in the thread that ends the
    last."""
    for other in others:
        if not other.done():
            other.add_done_callback(lambda _: _when_ended(others, begin))
            return
    begin()


class Spans:
    """Hold spans of time as pairs of start and end, in seconds of one clock. Any thread may add
    one."""

    def __init__(self, *spans: tuple[float, float]) -> None:
        self._spans = list(spans)

    def add(self, began: float, ended: float) -> None:
        self._spans.append((began, ended))

    def since(self, moment: float) -> Spans:
        """Return the spans after `moment`; one that contains it is cut there."""
        return Spans(*((max(start, moment), end) for start, end in self._spans if end > moment))

    def __add__(self, other: Spans) -> Spans:
        return Spans(*self._spans, *other._spans)

    @property
    def seconds(self) -> float:
        """Return the seconds in which at least one span ran; where spans overlap, time counts
        once."""
        total, until = 0.0, 0.0
        for start, end in sorted(self._spans):
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total

    def seconds_without(self, other: Spans) -> float:
        """Return the seconds in which at least one of these spans ran, and none of `other`."""
        return (self + other).seconds - other.seconds
