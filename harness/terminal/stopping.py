"""Signals that end a command as Ctrl-C does: a scheduler's SIGTERM, and the SIGHUP of a terminal that is closed.

Inside `Stoppable` the first of them raises `Stopped`, a KeyboardInterrupt: folders are closed and temporary files go on
the way out. It waits for the end of a write (`whole`). A second one ends the process at once, yet never within a write.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import ContextDecorator, suppress
from time import monotonic
from types import FrameType
from typing import Any, Self

from harness.terminal.notices import warn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNTAKEN = (signal.SIG_DFL, signal.default_int_handler)  # neither ignored, as under nohup, nor submitit's or Ray's own
ECHO_S = 0.5  # `timeout`, srun and shells send a signal twice: to the process, and to the group that it is in


class Stopped(KeyboardInterrupt):
    """A signal has asked this process to end."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__("interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}")
        self.number = number


class _Process:
    """What this process has heard, and what it is at."""

    def __init__(self) -> None:
        self.asked: int | None = None  # the first signal
        self.asked_s = 0.0
        self.waits = self.hurries = False  # for the end of a write; to be gone, after a second signal
        self.depth = 0  # of the main thread's writes, one within the other
        self.writes: list[None] = []  # one for each that goes on in any thread; append and pop cannot be torn
        self.inside: list[Stoppable] = []

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between two of its instructions."""
        if self.asked is None:
            self.asked, self.asked_s = number, monotonic()
            self.waits = self.depth > 0
            if not self.waits:
                raise Stopped(number)
        elif number != signal.SIGHUP and monotonic() - self.asked_s > ECHO_S:  # a shell and the system both hang up
            self.hurries = True
            self.end_unless_writing()

    def end_unless_writing(self) -> None:
        if not self.writes and self.asked is not None:
            sentence = _sentence(Stopped(self.asked), *(command.go_on for command in self.inside))
            with suppress(OSError):
                os.write(2, f"\n{sentence}\n".encode())
            os._exit(128 + self.asked)

    def forget(self) -> None:
        self.asked, self.waits, self.hurries = None, False, False


_process = _Process()


class Stoppable:
    """Signals end what runs inside. Leaving it says that, and how to `go_on`. `code` is the exit code then, and 0 where
    nothing asked to end: not even a signal that a destructor or a library swallowed."""

    code = 0

    def __init__(self, go_on: str = "") -> None:
        self.go_on = go_on
        self._taken: dict[int, Any] = {}  # what each signal did before

    def __enter__(self) -> Self:
        _process.inside.append(self)
        if _is_main():
            found = {number: signal.getsignal(number) for number in SIGNALS}
            self._taken = {number: handler for number, handler in found.items() if handler in UNTAKEN}
            for number in self._taken:
                signal.signal(number, _process.hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        _process.depth += 1  # a signal that comes now is counted, and raises nothing
        for number, handler in self._taken.items():
            signal.signal(number, handler)
        asked = _process.asked if self._taken else None
        stop = error if isinstance(error, Stopped) else Stopped(asked or signal.SIGINT)
        if isinstance(error, KeyboardInterrupt) or asked:
            self.code = 128 + stop.number
            if self.go_on:
                warn(f"\n{_sentence(stop, self.go_on)}")
        _process.inside.remove(self)
        _process.depth -= 1
        if self._taken:
            _process.forget()
        return isinstance(error, KeyboardInterrupt)


class whole(ContextDecorator):
    """A write that no signal tears: what one asks for comes at the end. It should be short."""

    def __enter__(self) -> None:
        if _is_main():
            if _process.asked and not _process.waits and sys.exception() is None:  # swallowed: nobody is on the way out
                raise Stopped(_process.asked)
            _process.depth += 1
        _process.writes.append(None)

    def __exit__(self, *_: object) -> None:
        _process.writes.pop()
        if _process.hurries:
            _process.end_unless_writing()
        if _is_main():
            _process.depth -= 1
            if _process.waits and not _process.depth:
                _process.waits = False
                raise Stopped(_process.asked or signal.SIGINT)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _sentence(stop: Stopped, *go_on: str) -> str:
    return "; ".join([str(stop), *filter(None, go_on)])
