"""Output that outlives its reader: `| head` has seen enough, an ssh session drops, and the runs go on."""

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
    """What cannot be printed inside is dropped, whoever prints it: it decides nothing about a run."""
    before: tuple[TextIO | None, TextIO | None] = sys.stdout, sys.stderr
    with ExitStack() as opened:
        sys.stdout, sys.stderr = (_lasting(stream, opened) for stream in before)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # while nothing raises for it
            sys.stdout, sys.stderr = cast(tuple[TextIO, TextIO], before)


class _Lasting:
    """A stream that never raises for lack of a reader; in all else the one below."""

    def __init__(self, below: TextIO) -> None:
        self._below = below

    def write(self, text: str) -> int:
        try:
            return self._below.write(text)
        except UnicodeError:  # a ValueError too, and another fault
            raise
        except (OSError, ValueError) as error:  # no reader, a terminal that is gone; a stream that was closed
            self._let_go(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._below.flush()
        except (OSError, ValueError) as error:
            self._let_go(error)

    def isatty(self) -> bool:
        return not self._below.closed and self._below.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def _let_go(self, error: Exception) -> None:
        """From now on into nothing, with what is still in the buffer: Python would raise for it on its way out."""
        with suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), self._below.fileno())
        if self is sys.stdout and isinstance(error, OSError) and error.errno != errno.EPIPE:
            warn(f"note: nothing more is printed: {error.strerror}.")


def _lasting(stream: TextIO | None, opened: ExitStack) -> TextIO:
    """`stream` may be None, as Python has it for one that is closed from the start: what comes first takes its number
    otherwise, which may be a run's file."""
    if isinstance(stream, _Lasting):
        return cast(TextIO, stream)
    return cast(TextIO, _Lasting(stream or opened.enter_context(open(os.devnull, "w"))))
