"""The disk tier: a folder of block files and their index, of one process at a time.

It is opened by one thread. Afterwards another one makes all changes, in their order, and any may read files whose
blocks it was given: so the folder is always what it would have been a moment ago without threads.

A session that moved into memory leaves its files as a spare copy: it costs nothing while there is room, saves the
writing when the session comes back, and outlives a crash. Spare copies go first where room is needed.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from harness.history import index
from harness.history.block import Block
from harness.history.file import write
from harness.history.index import Entry, Index, OtherFormat
from harness.results.lock import FolderInUse, FolderLock

Wall = Callable[[], float]


class HistoryWarning(UserWarning):
    """A session is lost, and its tokens will be computed again."""


class HistoryError(ValueError):
    """The store cannot be opened or used like this; the message says what to do."""


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HistoryError(f"the store cannot use {folder.parent} ({error.strerror}): name another folder") from error


class Disk:
    """`capacity` counts bytes of rows; a file's header and its tokens come on top. `wait` for another owner to end."""

    def __init__(self, folder: Path, capacity: int, *, wait: bool = False, wall: Wall = time.time) -> None:
        self.folder, self.capacity, self._wall = folder, capacity, wall
        _make(folder / "blocks")
        try:
            self._lock = FolderLock(folder, wait=wait)
        except FolderInUse as error:
            raise HistoryError(
                f"{folder} is in use by another store: name another folder, or wait=True until that one is closed"
            ) from error
        try:
            self._index, self.entries = self._opened()
            self._sweep()
        except BaseException:
            self._lock.release()
            raise
        self._used = max((entry.used for entry in self.entries.values()), default=0)
        self.bytes = sum(block.size for entry in self.entries.values() for block in entry.blocks)
        self._spare: OrderedDict[str, None] = OrderedDict()  # the first became one first

    def _opened(self) -> tuple[Index, dict[str, Entry]]:
        try:
            return _read_index(self.folder)
        except sqlite3.OperationalError as error:
            raise HistoryError(f"cannot open {self.folder}: {error}") from error
        except (sqlite3.DatabaseError, TypeError, ValueError) as error:
            what = "of another version" if isinstance(error, OtherFormat) else "damaged"
            _warn(f"the index of {self.folder} is {what} ({error}): all its sessions are dropped")
            index.remove(self.folder)
            return Index(self.folder), {}

    def _sweep(self) -> None:
        """Removes what a crash left: files that no session names, sessions that lack a file."""
        found = {path: path.stat().st_size for path in (self.folder / "blocks").glob("*/*")}
        for key, entry in list(self.entries.items()):
            if any(found.get(self.path(block)) != block.file.bytes for block in entry.blocks if block.file):
                _warn(f"{self.folder}: files of a session are missing or cut off; it is dropped")
                self._index.drop(key)
                del self.entries[key]
        named = {self.path(block) for entry in self.entries.values() for block in entry.blocks}
        for path in found.keys() - named:
            path.unlink()

    def write(self, key: str, blocks: Sequence[Block], lineage: str) -> tuple[int, list[Block]]:
        """Makes `blocks` of `lineage` the session. -> bytes written, which are those of blocks that it had not yet;
        all blocks, as they lie on disk"""
        entry = self.entries.get(key, Entry([], 0, 0.0))
        known = {block.name: block for block in entry.blocks}
        new = [block for block in blocks if block.name not in known]
        names = {block.name for block in blocks}
        gone = [block for block in entry.blocks if block.name not in names]
        size = sum(block.size for block in new)
        self._make_room(size - sum(block.size for block in gone), key)
        written = known | {block.name: block for block in self._written(new)}
        self._used += 1
        made = Entry([written[block.name] for block in blocks], self._used, self._wall(), lineage)
        try:
            self._index.replace(key, made, _same(entry.blocks, blocks))
        except sqlite3.Error:
            self._remove(new)
            raise
        self._remove(gone)
        self.bytes += size - sum(block.size for block in gone)
        self.entries[key] = made
        self._spare.pop(key, None)
        return size, list(made.blocks)

    def touch(self, key: str) -> None:
        """It was used, wherever it was found. A disk too full to say so forgets it."""
        if key in self.entries:
            self._used += 1
            with suppress(sqlite3.Error):
                self._index.touch(key, self._used, self._wall())

    def spare(self, key: str) -> None:
        """The session lies in memory now."""
        if key in self.entries:
            self._spare[key] = None

    def drop(self, key: str) -> None:
        """Also where the disk is too full to say so in the index: a session without files is dropped on opening."""
        entry = self.entries.pop(key, None)
        if entry:
            with suppress(sqlite3.Error):
                self._index.drop(key)
            self._remove(entry.blocks)
            self.bytes -= sum(block.size for block in entry.blocks)
            self._spare.pop(key, None)

    def close(self) -> None:
        self._index.close()
        self._lock.release()

    def _make_room(self, size: int, key: str) -> None:
        while self.bytes + size > self.capacity:
            spare = next((other for other in self._spare if other != key), None)
            if spare is None:
                raise OSError(errno.ENOSPC, "no room in the disk tier", str(self.folder))
            self.drop(spare)

    def _written(self, blocks: Sequence[Block]) -> Iterator[Block]:
        folders = set()
        try:
            for block in blocks:
                path = self.path(block)
                path.parent.mkdir(exist_ok=True)
                folders.add(path.parent)
                yield replace(block, rows=None, file=write(path, block))
            for folder in folders:
                _sync(folder)
        except OSError:
            self._remove(blocks)
            raise

    def _remove(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.path(block).unlink(missing_ok=True)

    def path(self, block: Block) -> Path:
        return self.folder / "blocks" / block.name[:2] / f"{block.name}.safetensors"


def _read_index(folder: Path) -> tuple[Index, dict[str, Entry]]:
    found = Index(folder)
    try:
        return found, dict(found.entries())
    except BaseException:
        found.close()
        raise


def _same(first: Sequence[Block], second: Sequence[Block]) -> int:
    """How many blocks both begin with."""
    pairs = zip(first, second, strict=False)
    return len(list(takewhile(lambda pair: pair[0].name == pair[1].name, pairs)))


def _sync(folder: Path) -> None:
    """The names in it reach the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _warn(message: str) -> None:
    warnings.warn(message, HistoryWarning, stacklevel=3)
