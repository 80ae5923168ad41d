"""Lets signals end a command as Ctrl-C does: a scheduler's SIGTERM, and the SIGHUP of a closed
terminal.

Inside `Stoppable` the first signal raises `Stopped`, a KeyboardInterrupt: folders are closed and
temporary files are removed on the way out. It waits for the end of a write (`whole`). A second
signal ends the process at once; the next start removes what that leaves."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ContextDecorator, suppress
from time import monotonic
from types import FrameType
from typing import Any, Self

from harness.terminal import early
from harness.terminal.notices import warn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNTAKEN = (
    signal.SIG_DFL,
    signal.default_int_handler,
    early.end,
)  # handlers that may be replaced: signals are not ignored, as under nohup, nor handled by submitit or Ray
ECHO_S = 0.5  # `timeout`, srun and shells send a signal twice: to the process and to its group


class Stopped(KeyboardInterrupt):
    """A signal has asked this process to end."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(
            "interrupted"
            if number == signal.SIGINT
            else f"stopped by {signal.Signals(number).name}"
        )
        self.number = number


class _Process:
    """Keeps the first signal that this process has received, and how many writes are going on,
    which signals wait for."""

    def __init__(self) -> None:
        self.asked: int | None = None  # the first signal
        self.asked_s = 0.0
        self.waits = False  # the signal waits for the end of a write
        self.depth = 0  # how many writes of the main thread are nested

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: raise `Stopped`, or remember it during a write; a second one ends the
        process at once. Python calls this in the main thread."""
        if self.asked is None:
            self.asked, self.asked_s = number, monotonic()
            self.waits = self.depth > 0
            if not self.waits:
                raise Stopped(number)
        elif number != signal.SIGHUP and monotonic() - self.asked_s > ECHO_S:
            # a shell and the system both hang up
            with suppress(OSError):
                os.write(2, f"\n{Stopped(self.asked)}\n".encode())
            os._exit(128 + self.asked)


_process = _Process()


class Stoppable:
    """Lets SIGINT, SIGTERM and SIGHUP end what runs inside by raising `Stopped`. On leaving it
    prints how to `go_on`. `code` is the exit code then, or 0 if no signal came."""

    code = 0

    def __init__(self, go_on: str = "") -> None:
        self.go_on = go_on
        self._taken: dict[int, Any] = {}  # what each signal did before

    def __enter__(self) -> Self:
        if _is_main():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            self._taken = {
                number: handler for number, handler in handlers.items() if handler in UNTAKEN
            }
            for number in self._taken:
                signal.signal(number, _process.hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        _process.depth += 1  # a signal that comes now is counted, and raises nothing
        for number, handler in self._taken.items():
            signal.signal(number, handler)
        asked = _process.asked if self._taken else None
        stop = error if isinstance(error, Stopped) else Stopped(asked or signal.SIGINT)
        if isinstance(error, KeyboardInterrupt) or asked:
            self.code = 128 + stop.number
            if self.go_on:
                warn(f"\n{stop}; {self.go_on}")
        _process.depth -= 1
        if self._taken:
            _process.asked, _process.waits = None, False
        return isinstance(error, KeyboardInterrupt)


class whole(ContextDecorator):
    """Protects a short write of the main thread from signals: one that comes during the write takes
    effect after it."""

    def __enter__(self) -> None:
        if _is_main():
            _process.depth += 1

    def __exit__(self, *_: object) -> None:
        if _is_main():
            _process.depth -= 1
            if _process.waits and not _process.depth:
                _process.waits = False
                raise Stopped(_process.asked or signal.SIGINT)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
