"""Prints what a command says: its output, notices while it runs, and why it ends."""

from __future__ import annotations

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain

from harness.terminal.control_characters import visible

BUILDING = "building kernels for this processor, once per machine and version: about a minute"
SLOW_FP16 = "fp16 is about ten times slower than bf16 on a CPU: use dtype=bf16, or fp32"


def say(text: str) -> None:
    """Print the output of a command on stdout, at once."""
    print(visible(text), flush=True)


def show(page: str) -> None:
    """Print a page with colours of ours on stdout, at once; what it quotes went through `visible`
    before."""
    print(page, flush=True)


def warn(text: str) -> None:
    """Print on stderr, at once, how far a command is, or what is left out or done differently than
    asked. The command goes on."""
    print(visible(text), file=sys.stderr, flush=True)


def complain(error: object) -> None:
    """Print on stderr why a command ends without its result."""
    warn(f"error: {error}")


@cache
def say_once(message: str) -> None:
    """Print a note once per process, however many jobs of a sweep it concerns."""
    warn(f"note: {message}.")


@cache
def complain_once(message: str) -> None:
    """Print an error once per command, however many of its jobs it ends."""
    complain(message)


class _Builds(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say_once(record.getMessage() if record.levelno > logging.INFO else BUILDING)


def tell_of_builds() -> None:
    """Announce from now on that C++ kernels are being compiled, which takes long."""
    log = logging.getLogger("kernels.cpu")
    if not any(isinstance(handler, _Builds) for handler in log.handlers):
        log.addHandler(_Builds(logging.INFO))
    log.setLevel(logging.INFO)


def alike(warnings: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Merge warnings that differ only in their numbers. Yield each with the span of every number,
    and how many were merged."""
    kinds: dict[tuple[str, ...], list[list[int]]] = defaultdict(list)
    for warning in warnings:
        words = tuple(re.split(r"\d+", warning))
        kinds[words].append([int(number) for number in re.findall(r"\d+", warning)])
    for words, numbers in kinds.items():
        spans = [" to ".join(map(str, sorted({min(column), max(column)}))) for column in zip(*numbers, strict=True)]
        yield "".join(chain.from_iterable(zip(words, [*spans, ""], strict=True))), len(numbers)
