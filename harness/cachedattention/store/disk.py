"""The disk tier: a folder of block files and their index, of one process at a time.

One thread opens it. Afterwards another one makes all changes, in their order, and any may read files whose blocks it
was given, so the folder is always what it would have been a moment ago without threads.

The spare copies that sessions leave when they move into memory (`DiskAccount`) outlive a crash too.
"""

from __future__ import annotations

import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from harness.cachedattention.store import index
from harness.cachedattention.store.block import Block, write
from harness.cachedattention.store.index import Index, StoredSession
from harness.cachedattention.store.placement import DiskAccount
from harness.cachedattention.store.policies import EvictionPolicy
from harness.config.settings import SettingsError
from harness.results.files import unwritable
from harness.results.lock import FolderInUse, FolderLock, owner
from harness.terminal.stopping import whole
from methods.tiers.tier import DISK, TIERS

Wall = Callable[[], float]


class HistoryWarning(UserWarning):
    """The warning that a session is lost, and that its tokens will be computed again."""


class HistoryError(ValueError):
    """Raised where a store cannot be opened or used like this; the message says what to do."""


def check_arguments(
    capacities: Mapping[str, object], *, folder: Path | None, policy: object, ttl_s: float, **numbers: object
) -> None:
    """Raise `HistoryError` where a store cannot be made of these arguments. `capacities`: bytes by tier."""
    tiers = [name for name, tier in TIERS.items() if name == DISK or not tier.in_files]
    for name in capacities:
        if name not in tiers:
            raise HistoryError(f"a store has no {name}: name its settings, or bytes of {', '.join(tiers)}")
    for name, value in (*capacities.items(), *numbers.items()):
        least = int(name == "block_tokens")
        if not isinstance(value, int) or value < least:
            raise HistoryError(f"{name}={value!r} should be a whole number, at least {least}; sizes are in bytes")
    if not ttl_s > 0:
        raise HistoryError(f"ttl_s={ttl_s} should be seconds, above 0; leave it out for no end")
    if not isinstance(policy, EvictionPolicy | None):
        raise HistoryError(f"policy={policy!r} should be an object, such as LRU() of store/policies.py")
    if bool(capacities.get(DISK)) != (folder is not None):
        raise HistoryError("a disk tier needs both: disk, its bytes, and folder, its place")


@contextmanager
def named_in_settings() -> Iterator[None]:
    """Turn an error about a store's folder into one of the setting that names the folder."""
    try:
        yield
    except HistoryError as error:
        raise SettingsError(f"store.folder: {error}.") from error


def check_folder(folder: Path) -> None:
    """Raise `HistoryError` where `folder` cannot be made or written to."""
    if why := unwritable(folder):
        raise HistoryError(f"the store cannot use {folder}: {why}; name another folder")


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HistoryError(f"the store cannot use {folder} ({error.strerror}): name another folder") from error


class Disk:
    """A folder with room for `capacity` bytes of rows; a file's header and its tokens come on top. `wait` for another
    owner to end."""

    def __init__(self, folder: Path, capacity: int, *, wait: bool = False, wall: Wall = time.time) -> None:
        self.folder, self.files, self._wall = folder, DiskAccount[str](capacity), wall
        try:
            with _usable(folder):
                (folder / "blocks").mkdir(parents=True, exist_ok=True)
                self._lock = FolderLock(folder, wait=wait)
        except FolderInUse as error:
            raise HistoryError(
                f"{folder} is in use by another store, of {owner(folder)}: wait until that ends, or name another folder"
            ) from error
        try:
            self._index, self.entries = self._opened()
            self._sweep()
        except BaseException:
            self._lock.release()
            raise
        self._used = max((entry.used for entry in self.entries.values()), default=0)
        for key, entry in self.entries.items():
            self.files.hold(key, _sizes(entry.blocks))

    def _opened(self) -> tuple[Index, dict[str, StoredSession]]:
        try:
            opened, entries, wrong = index.opened(self.folder)
        except (sqlite3.Error, OSError) as error:
            raise HistoryError(
                f"the store cannot keep an index in {self.folder} ({error}): free some space there, or name another "
                "folder"
            ) from error
        if not wrong and opened.fresh and any(self._files()):
            wrong = "is missing"
        if wrong:
            warn(f"the index of {self.folder} {wrong}: all its sessions are dropped")
        return opened, entries

    def _sweep(self) -> None:
        """Remove what a crash left: files that no session names, and sessions that lack a file."""
        found = {path: path.lstat().st_size for path in self._files()}
        for key, entry in list(self.entries.items()):
            if any(found.get(self.path(block)) != block.file.bytes for block in entry.blocks if block.file):
                warn(f"{self.folder}: files of a session are missing or cut off; it is dropped")
                del self.entries[key]
                with suppress(sqlite3.Error):  # a full disk: it is dropped again when the folder is opened again
                    self._index.drop(key)
        named = {self.path(block) for entry in self.entries.values() for block in entry.blocks}
        for path in found.keys() - named:
            _unlink(path)

    def restored(self, now: float, wall: float) -> list[tuple[str, StoredSession, float]]:
        """Return the sessions that an earlier process left, the least recently used first, each with the time of its
        last use on the clock that says `now`. Their order holds wherever the wall's clock stood."""
        found, youngest = [], now
        for key, entry in reversed(self.entries.items()):
            youngest = min(youngest, now - max(0.0, wall - entry.used_at))
            found.append((key, entry, youngest))
        return found[::-1]

    @whole()
    def write(self, key: str, blocks: Sequence[Block], lineage: str) -> tuple[int, list[Block]]:
        """Make `blocks` of `lineage` the session. Return the bytes written, which are those of blocks that it had not
        yet, and all blocks as they lie on disk."""
        entry = self.entries.get(key, StoredSession([], 0, 0.0))
        known = {block.name: block for block in entry.blocks}
        new = [block for block in blocks if block.name not in known]
        names = {block.name for block in blocks}
        gone = [block for block in entry.blocks if block.name not in names]
        self.files.make_room(key, _sizes(blocks), self.drop)
        written = known | {block.name: block for block in self._written(new)}
        self._used += 1
        made = StoredSession([written[block.name] for block in blocks], self._used, self._wall(), lineage)
        try:
            self._index.replace(key, made)
        except sqlite3.Error:
            self._remove(new)
            raise
        self._remove(gone)
        self.entries[key] = made
        return self.files.hold(key, _sizes(blocks)), list(made.blocks)

    def touch(self, key: str) -> None:
        """Note that the session was used, wherever it was found. A disk that is too full for this forgets it."""
        if key in self.entries:
            self._used += 1
            with suppress(sqlite3.Error):
                self._index.touch(key, self._used, self._wall())

    @whole()
    def drop(self, key: str) -> None:
        """Drop the session, even where the disk is too full to note it in the index: a session without files is dropped
        when the folder is opened."""
        entry = self.entries.pop(key, None)
        if entry:
            with suppress(sqlite3.Error):
                self._index.drop(key)
            self._remove(entry.blocks)
            self.files.drop(key)

    def close(self) -> None:
        self._index.close()
        self._lock.release()

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
            _unlink(self.path(block))

    def _files(self) -> Iterator[Path]:
        return (self.folder / "blocks").glob("*/*")

    def path(self, block: Block) -> Path:
        return self.folder / "blocks" / block.name[:2] / f"{block.name}.safetensors"


def _unlink(path: Path) -> None:
    """Remove a file. What cannot be removed now is named by no session, and goes when the folder is opened again."""
    with suppress(OSError):
        path.unlink()


def _sizes(blocks: Sequence[Block]) -> dict[str, int]:
    return {block.name: block.size for block in blocks}


def _sync(folder: Path) -> None:
    """Make the names in a folder reach the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def warn(message: str) -> None:
    warnings.warn(message, HistoryWarning, stacklevel=3)
