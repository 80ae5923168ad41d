"""Faults while a store is at work: each of its writes finds the disk full, files are damaged, the folder is gone. Every
call goes on, and what is found is what was stored."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.cachedattention.store import block as blocks
from harness.cachedattention.store.disk import HistoryWarning
from harness.cachedattention.store.history_store import HistoryStore
from harness.cachedattention.store.index import Index
from tests.harness.cachedattention.store.test_damaged_folder import cut, delete, flip, garbage
from tests.histories import TOKEN_BYTES, opened, right, rows
from tests.warned import all_warnings

Fault = Callable[[int], bool]  # the number of a write -> whether it finds the disk full


class Writes:
    """Counts what the store asks of a disk, and lets some of it fail."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: Fault) -> None:
        self.count, self.fails = 0, fails
        no_room = partial(OSError, errno.ENOSPC, "No space left on device")
        full = partial(sqlite3.OperationalError, "database or disk is full")
        for owner, name, error in (
            (blocks, "open", no_room),
            (Path, "replace", no_room),
            (Path, "mkdir", no_room),
            (Path, "unlink", no_room),
            (Index, "replace", full),
            (Index, "touch", full),
            (Index, "drop", full),
        ):
            patch.setattr(owner, name, self._counted(getattr(owner, name, open), error), raising=False)
        patch.setattr(os, "fsync", self._counted(lambda fd: None, no_room))

    def _counted(self, real: Callable[..., Any], error: Callable[[], Exception]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.count += 1
            if self.fails(self.count):
                raise error()
            return real(*given, **named)

        return call


class Work:
    """Sessions that come, grow, are cut and asked for. What is there must be right."""

    def __init__(self, store: HistoryStore, seed: int) -> None:
        self.store, self.rng = store, random.Random(seed)
        self.known: dict[str, tuple[list[int], int]] = {}  # tokens, and how many were cut off before them

    def step(self) -> None:
        name = f"s{self.rng.randrange(5)}"
        tokens, dropped = self.known.get(name, ([], 0))
        new = [self.rng.randrange(500) for _ in range(self.rng.randrange(1, 12))]
        do = self.rng.choice(("put", "extend", "extend", "get", "get", "truncate"))
        if do == "truncate" and tokens:
            self.store.truncate(name)
            if self.store.lineage(name) is not None:
                self.known[name] = tokens[len(tokens) - len(tokens) // 2 :], dropped + len(tokens) - len(tokens) // 2
        elif do == "extend" and self.store.extend(
            name, len(tokens), new, rows(name, new, dropped + len(tokens)), lineage=self.store.lineage(name) or ""
        ):
            self.known[name] = [*tokens, *new], dropped
        elif do != "get":
            self.store.put(name, new, rows(name, new))
            self.known[name] = new, 0
        self.look(name)

    def look(self, name: str) -> int:
        tokens, dropped = self.known.get(name, ([], 0))
        found = self.store.get(name, tokens, self.store.lineage(name) or "")
        assert right(found, name, tokens, dropped)
        return found.tokens


def work(folder: Path, seed: int, steps: int, between: Callable[[int], None] = lambda step: None, **how: Any) -> Work:
    """Of a store with room for some of its sessions in memory, and for most on disk."""
    sizes = {"host": 30 * TOKEN_BYTES, "disk": 80 * TOKEN_BYTES}
    with opened(folder, **sizes | how) as store:
        done = Work(store, seed)
        for step in range(steps):
            between(step)
            done.step()
        for name in done.known:
            done.look(name)
    return done


def is_sound(folder: Path, done: Work) -> None:
    """What another process finds: nothing wrong, nothing left over, and it goes on."""
    with opened(folder, host=0) as store:
        again = Work(store, 0)
        again.known = done.known
        for name in again.known:
            again.look(name)
        store.put("new", [1, 2, 3], rows("new", [1, 2, 3]))
        assert store.get("new", [1, 2, 3]).tokens == 3
        assert store.contents.disk
        named = sum(len(entry.blocks) for entry in store.contents.disk.entries.values())
    assert len([path for path in (folder / "blocks").rglob("*") if path.is_file()]) == named


@pytest.mark.filterwarnings("ignore::harness.cachedattention.store.disk.HistoryWarning")
@pytest.mark.parametrize("lasting", [False, True], ids=["for a moment", "from then on"])
@pytest.mark.parametrize("every", [31, pytest.param(1, marks=pytest.mark.slow)])
def test_each_write_may_find_the_disk_full(every: int, lasting: bool, tmp_path: Path) -> None:
    def writes(folder: Path, fails: Fault) -> tuple[int, Work]:
        """From the first step on, how many there are."""
        with pytest.MonkeyPatch.context() as patch:
            made: list[Writes] = []
            done = work(folder, 1, 25, lambda step: made.append(Writes(patch, fails)) if not made else None)
            return made[0].count, done

    count, _ = writes(tmp_path / "whole", lambda number: False)
    assert count > 150
    for nth in range(1, count, every):
        folder = tmp_path / str(nth)
        fails = [lambda number, nth=nth: number == nth, lambda number, nth=nth: number >= nth][lasting]
        is_sound(folder, writes(folder, fails)[1])


@pytest.mark.filterwarnings("ignore::harness.cachedattention.store.disk.HistoryWarning")
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize(("seed", "rounds"), [(3, 6), pytest.param(4, 200, marks=pytest.mark.slow)])
def test_files_that_are_damaged_under_a_running_store(seed: int, rounds: int, threads: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    for number in range(rounds):
        folder = tmp_path / str(number)

        def damage(step: int, folder: Path = folder) -> None:
            files = sorted(folder.rglob("*.safetensors"))
            if files and rng.random() < 0.5:
                with suppress(FileNotFoundError):  # a thread of the store has deleted it since
                    rng.choice((flip, cut, delete, garbage))(rng.choice(files), rng)

        is_sound(folder, work(folder, number, 30, damage, io_threads=threads))


@pytest.mark.parametrize("left", ["nothing", "blocks", "a file"])
@pytest.mark.parametrize("threads", [0, 2])
def test_a_folder_that_goes_away_costs_what_it_held(left: str, threads: int, tmp_path: Path) -> None:
    folder = tmp_path / "store"

    def remove(step: int) -> None:
        if step == 15:
            (folder if left == "nothing" else folder / "blocks").rename(tmp_path / "gone")
            if left == "a file":
                (folder / "blocks").touch()

    with all_warnings() as noticed:
        done = work(folder, 5, 40, remove, io_threads=threads)
    assert noticed
    assert {one.category for one in noticed} == {HistoryWarning}
    assert done.known
