"""Decides who moves rows and changes files: threads of their own, or the caller."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Inline(Executor):
    """Does at once what is submitted, in the caller's own thread."""

    def submit(self, action: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(action(*args, **named))
        except Exception as error:
            future.set_exception(error)
        return future


INLINE = Inline()


class Threads:
    """Keeps `count` threads that read what a job waits for. One more reads ahead of the jobs, one copies to the device,
    one from it, and one makes all changes on disk, in their order. With 0 the caller does everything itself, at once.
    """

    def __init__(self, count: int) -> None:
        if count < 0:
            raise ValueError(f"io_threads={count} should be 0, for none, or more")
        self.count, self.beside = max(1, count), count > 0
        self.reading, self.ahead, self.copying, self.leaving, self.writing = (
            ThreadPoolExecutor(number, f"transfer-{name}") if count else INLINE
            for name, number in (("read", count), ("ahead", 1), ("copy", 1), ("leave", 1), ("write", 1))
        )

    def close(self) -> None:
        """Wait until all that was submitted is done, and end the threads."""
        for pool in (self.leaving, self.writing, self.ahead, self.reading, self.copying):
            pool.shutdown()
