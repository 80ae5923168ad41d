"""Shows progress on stderr: a line per run, and how far it is, as a bar on a terminal or a line now
and then in a log."""

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
EVERY_S = 30.0  # seconds between two lines of a log
_counter: ContextVar[str] = ContextVar("counter", default="")  # "job 3/12 "
_alone: ContextVar[bool] = ContextVar("alone", default=True)
_named: set[Path] = set()  # folders that this command has announced; several runs share Full's


@contextmanager
def numbered(job: int, jobs: int, alone: bool = True) -> Iterator[None]:
    """Begin all lines of progress inside with "job 3/12", if there are several jobs. `alone`: False
    if other processes write to the same terminal; then progress is printed as lines, not as a
    bar."""
    counter, before = _counter.set(f"job {job}/{jobs} " if jobs > 1 else ""), _alone.set(alone)
    try:
        yield
    finally:
        _counter.reset(counter)
        _alone.reset(before)


def forget() -> None:
    """Forget which run folders have been announced, because a new command begins in this
    process."""
    _named.clear()


def announce(label: str, folder: Path, found: int, wanted: int) -> None:
    """Print one line on a run that begins: its folder, and how many of its `wanted` examples were
    `found` there. A command prints it once per folder."""
    if folder in _named:
        return
    _named.add(folder)
    state = (
        "finished, reused"
        if found >= wanted
        else f"resumed, {found} of {wanted} were done"
        if found
        else "new"
    )
    warn(f"{_counter.get()}{label}: {state}: {folder}")


def progress(
    results: Iterator[T],
    label: str,
    sizes: Sequence[int],
    *,
    size: Callable[[T], int],
    before: int = 0,
    what: str = "examples",
    unit: str = "tok",
    clock: Callable[[], float] = monotonic,
) -> Iterator[T]:
    """Yield `results` as they come and show progress. `sizes`: the amount of work of each expected
    result (such as prompt tokens); `size`: a function that returns it for one result; `before`: how
    many results were there already."""
    title, is_log = f"{_counter.get()}{label}", not (_alone.get() and sys.stderr.isatty())
    begun, total = clock(), before + len(sizes)
    last = begun
    with tqdm(total=sum(sizes), desc=title, unit=unit, unit_scale=True, disable=is_log) as bar:
        for done, result in enumerate(results, before + 1):
            yield result
            bar.set_postfix_str(f"{done}/{total} {what}", refresh=False)
            bar.update(size(result))
            if is_log and (done == total or clock() - last >= EVERY_S):
                last = clock()
                warn(f"{title}: {done}/{total} {what}, {last - begun:.0f} s")
