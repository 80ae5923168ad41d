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
from typing import TypeVar

from tqdm import tqdm

from harness.terminal.notices import warn

T = TypeVar("T")
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
    warn(f"{_counter.get()}{label}: {state}: {folder}")


def progress(
    made: Iterator[T],
    label: str,
    sizes: Sequence[int],
    shown: bool,
    *,
    size: Callable[[T], int],
    what: str = "examples",
    unit: str = "tok",
    clock: Callable[[], float] = monotonic,
) -> Iterator[T]:
    """`made` as they come. `sizes`: of all that will come, in whatever takes the time; `size`: of one that has come."""
    if not shown:
        return made
    if _alone.get() and sys.stderr.isatty():
        return _bar(made, label, sizes, size, what, unit)
    return _lines(made, label, len(sizes), what, clock)


def _bar(
    made: Iterator[T], label: str, sizes: Sequence[int], size: Callable[[T], int], what: str, unit: str
) -> Iterator[T]:
    with tqdm(total=sum(sizes), desc=f"{_counter.get()}{label}", unit=unit, unit_scale=True) as bar:
        for done, one in enumerate(made, 1):
            yield one
            bar.set_postfix_str(f"{done}/{len(sizes)} {what}", refresh=False)
            bar.update(size(one))


def _lines(made: Iterator[T], label: str, wanted: int, what: str, clock: Callable[[], float]) -> Iterator[T]:
    begun = last = clock()
    for done, one in enumerate(made, 1):
        yield one
        if done == wanted or clock() - last >= EVERY_S:
            last = clock()
            warn(f"{_counter.get()}{label}: {done}/{wanted} {what}, {last - begun:.0f} s")
