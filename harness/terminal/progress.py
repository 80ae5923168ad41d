"""Progress on stderr: a line per run, and how far it is.

A bar on a terminal, a line now and then in a log.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from time import monotonic
from typing import Protocol, TypeVar

from tqdm import tqdm


class Made(Protocol):
    """What is waited for: an example, a turn."""

    @property
    def prompt_tokens(self) -> int: ...


T = TypeVar("T", bound=Made)
EVERY_S = 30.0  # between two lines of a log
_counter: ContextVar[str] = ContextVar("counter", default="")  # "job 3/12 "
_alone: ContextVar[bool] = ContextVar("alone", default=True)
_named: set[Path] = set()  # folders of this command: Full's is beside many a run


@contextmanager
def numbered(job: int, jobs: int, alone: bool = True) -> Iterator[None]:
    """What is said inside bears the number of the job, where there are several. A terminal that other processes write
    to, too (not `alone`), gets lines in place of a bar."""
    counter, before = _counter.set(f"job {job}/{jobs} " if jobs > 1 else ""), _alone.set(alone)
    try:
        yield
    finally:
        _counter.reset(counter)
        _alone.reset(before)


def forget() -> None:
    """A new command begins."""
    _named.clear()


def announce(label: str, folder: Path, found: int, wanted: int) -> None:
    """One line per folder and command: where the run is, and what of it was there already."""
    if folder in _named:
        return
    _named.add(folder)
    state = "finished, reused" if found >= wanted else f"resumed, {found} of {wanted} were done" if found else "new"
    _say(f"{label}: {state}: {folder}")


def progress(
    made: Iterator[T],
    label: str,
    tokens: Sequence[int],
    shown: bool,
    *,
    what: str = "examples",
    clock: Callable[[], float] = monotonic,
) -> Iterator[T]:
    """`made` as they come, one per prompt; `tokens`: of each prompt."""
    if not shown:
        return made
    bar = _alone.get() and sys.stderr.isatty()
    return _bar(made, label, tokens, what) if bar else _lines(made, label, len(tokens), what, clock)


def _bar(made: Iterator[T], label: str, tokens: Sequence[int], what: str) -> Iterator[T]:
    """Over prompt tokens, since they are what takes the time."""
    with tqdm(total=sum(tokens), desc=f"{_counter.get()}{label}", unit="tok", unit_scale=True) as bar:
        for done, one in enumerate(made, 1):
            yield one
            bar.set_postfix_str(f"{done}/{len(tokens)} {what}", refresh=False)
            bar.update(one.prompt_tokens)


def _lines(made: Iterator[T], label: str, wanted: int, what: str, clock: Callable[[], float]) -> Iterator[T]:
    begun = last = clock()
    for done, one in enumerate(made, 1):
        yield one
        if done == wanted or clock() - last >= EVERY_S:
            last = clock()
            _say(f"{label}: {done}/{wanted} {what}, {last - begun:.0f} s")


def _say(line: str) -> None:
    print(f"{_counter.get()}{line}", file=sys.stderr, flush=True)
