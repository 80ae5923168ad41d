"""Lets a command outlive the reader of its output: `| head` has seen enough, an ssh session drops,
and the runs go on."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TextIO, cast

from harness.terminal.notices import warn


@contextmanager
def lasting_output() -> Iterator[None]:
    """Drop what cannot be printed inside this block, whoever prints it: output decides nothing
    about a run."""
    before: tuple[TextIO | None, TextIO | None] = sys.stdout, sys.stderr
    with ExitStack() as opened:
        sys.stdout, sys.stderr = (_lasting(stream, opened) for stream in before)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # while it cannot raise
            sys.stdout, sys.stderr = cast(tuple[TextIO, TextIO], before)


class _Lasting:
    """Wrap a stream so that it never raises for lack of a reader."""

    def __init__(self, below: TextIO) -> None:
        self._below = below

    def write(self, text: str) -> int:
        try:
            return self._below.write(text)
        except UnicodeError:  # a subclass of ValueError, but another fault
            raise
        except (OSError, ValueError) as error:  # no reader, a terminal that is gone; a stream that was closed
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._below.flush()
        except (OSError, ValueError) as error:
            self._discard(error)

    def isatty(self) -> bool:
        return not self._below.closed and self._below.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def _discard(self, error: Exception) -> None:
        """Redirect the stream to nothing, including what is still in its buffer: Python would raise
        for that when it exits."""
        with suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), self._below.fileno())
        if self is sys.stdout and isinstance(error, OSError) and error.errno != errno.EPIPE:
            warn(f"note: nothing more is printed: {error.strerror}.")


def _lasting(stream: TextIO | None, opened: ExitStack) -> TextIO:
    """Return `stream` wrapped. It is None in Python if it was closed from the start; it is then
    replaced, because the next opened file, maybe a run's, would get its number."""
    if isinstance(stream, _Lasting):
        return cast(TextIO, stream)
    return cast(TextIO, _Lasting(stream or opened.enter_context(open(os.devnull, "w"))))
