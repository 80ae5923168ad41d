"""Commands that get a signal at a place of their own choosing: real signals, and nothing that depends on time.

The functions here run in a process of its own (tests/forks.py).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from harness.terminal import stopping
from tests import forks

APPEND = "harness.results.run_folder:Run.append"


def from_a_terminal() -> None:
    """Signals as a shell leaves them, whatever started the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def before(place: str, act: Callable[[], object], call: int = 1, counts: Callable[[], bool] = lambda: True) -> None:
    """Has `act` done before the `call`-th call of the function at `place`, "module:name" or "module:Class.name", of the
    calls that count."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    really, left = getattr(owner, name), call

    def acting(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        if counts():
            left -= 1
            if not left:
                act()
        return really(*arguments, **named)

    setattr(owner, name, acting)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def at(place: str, call: int, numbers: tuple[int, ...], temporary: Path, name: str, *words: str) -> None:
    """`python -m NAME WORDS`, which gets the signals at `place`; its temporary files go to `temporary`."""
    from_a_terminal()
    _go(place, call, numbers, temporary, name, *words)


def under_nohup(place: str, temporary: Path, name: str, *words: str) -> None:
    """The command, started as by nohup, whose terminal hangs up at `place`."""
    from_a_terminal()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _go(place, 1, (signal.SIGHUP,), temporary, name, *words)


def killed_behind(record: int, temporary: Path, name: str, *words: str) -> None:
    """The command, killed as soon as so many records are on the disk."""
    before(APPEND, lambda: before("os:fsync", lambda: send(signal.SIGKILL)), record)
    _go(APPEND, 100, (), temporary, name, *words)


def twice(place: str, closing: str, echo_s: float, temporary: Path, name: str, *words: str) -> None:
    """The command, which gets a second SIGTERM at `closing`, on its way out. `echo_s`: in which two are one."""
    from_a_terminal()
    stopping.ECHO_S = echo_s
    before(closing, lambda: send(signal.SIGTERM), counts=lambda: stopping._process.asked is not None)
    _go(place, 1, (signal.SIGTERM,), temporary, name, *words)


def _go(place: str, call: int, numbers: tuple[int, ...], temporary: Path, name: str, *words: str) -> None:
    temporary.mkdir(exist_ok=True)
    tempfile.tempdir = str(temporary)
    before(place, lambda: send(*numbers), call)
    forks.module(name, *words)


def script(text: str, *words: str) -> None:
    """`python -c TEXT WORDS`."""
    sys.argv = ["-c", *words]
    forks.script(text)
