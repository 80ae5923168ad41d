"""Prints what a command says: its output, notices while it runs, and why it ends.

Control characters in the text of a model, a data set or a run's folder are escaped, because a terminal obeys them. A
command outlives the reader of its output (`lasting_output`)."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from typing import Any, TextIO, cast
from unicodedata import category

KEPT = "\n\t\u200c\u200d"  # line ends, tabs, and the joiners used by scripts and emoji
BUILDING = "building kernels for this processor, once per machine and version: about a minute"
SLOW_FP16 = "fp16 is about ten times slower than bf16 on a CPU: use dtype=bf16, or fp32"


def visible(text: str) -> str:
    """Return `text` with escapes in place of control characters and of those that change the
    direction of writing, because a terminal would obey them."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    harmless = char.isprintable() or char in KEPT or category(char) == "Zs"
    return char if harmless else char.encode("unicode_escape").decode()


def say(text: str) -> None:
    """Print the output of a command on stdout, at once."""
    print(visible(text), flush=True)


def show(page: str) -> None:
    """Print a page that contains our own colour codes on stdout, at once. The caller has passed
    quoted text through `visible` already."""
    print(page, flush=True)


def warn(text: str) -> None:
    """Print a message on stderr, at once: progress, or something that is left out or done
    differently than asked. The command goes on."""
    print(visible(text), file=sys.stderr, flush=True)


def complain(error: object) -> None:
    """Print on stderr why a command ends without its result."""
    warn(f"error: {error}")


@cache
def say_once(message: str) -> None:
    """Print a note once per process, even if several jobs of a sweep cause it."""
    warn(f"note: {message}.")


@cache
def complain_once(message: str) -> None:
    """Print an error once per command, even if several of its jobs fail with it."""
    complain(message)


class _Builds(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say_once(record.getMessage() if record.levelno > logging.INFO else BUILDING)


def tell_of_builds() -> None:
    """Print a note from now on when C++ kernels are being compiled, because that takes about a
    minute."""
    log = logging.getLogger("kernels.cpu")
    if not any(isinstance(handler, _Builds) for handler in log.handlers):
        log.addHandler(_Builds(logging.INFO))
    log.setLevel(logging.INFO)


def alike(warnings: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Merge warnings that differ only in their numbers. Yield each as a text in which numbers that
    differ have become spans ("3 to 9"), with the count of merged warnings."""
    kinds: dict[tuple[str, ...], list[list[int]]] = defaultdict(list)
    for warning in warnings:
        words = tuple(re.split(r"\d+", warning))
        kinds[words].append([int(number) for number in re.findall(r"\d+", warning)])
    for words, numbers in kinds.items():
        spans = [
            " to ".join(map(str, sorted({min(column), max(column)})))
            for column in zip(*numbers, strict=True)
        ]
        yield "".join(chain.from_iterable(zip(words, [*spans, ""], strict=True))), len(numbers)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Ignore errors of printing inside this block, as when the reader of a pipe (`| head`) or the
    ssh session is gone, so that the runs go on."""
    before = sys.stdout, sys.stderr
    # Python has no stream where it was closed from the start: the next opened file, maybe a run's, would be it
    with open(os.devnull, "w") as nothing:
        sys.stdout, sys.stderr = (cast(TextIO, _Lasting(stream or nothing)) for stream in before)
        try:
            yield
        finally:
            sys.stdout.flush()  # while it cannot raise
            sys.stderr.flush()
            sys.stdout, sys.stderr = before


class _Lasting:
    """Wraps an output stream so that writing never raises when nobody reads it any more."""

    def __init__(self, below: TextIO) -> None:
        self._below = below

    def write(self, text: str) -> int:
        self._try(self._below.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._below.flush)

    def isatty(self) -> bool:
        return not self._below.closed and self._below.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def _try(self, act: Callable[..., object], *arguments: str) -> None:
        """Call `act`. If the stream has no reader any more, redirect it to nothing together with
        what its buffer holds, because Python would raise for that at exit."""
        try:
            act(*arguments)
        except UnicodeError:  # a subclass of ValueError, but another fault
            raise
        except (OSError, ValueError):
            # no reader, a terminal that is gone; a stream that was closed
            with suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), self._below.fileno())
