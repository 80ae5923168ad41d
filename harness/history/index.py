"""Which blocks make up which session on disk: SQLite with a write-ahead log, so that a change is whole or not made.

A process may be killed at any moment. After a power cut the last changes may be missing; what they named or removed is
found when the folder is opened. So is what a damage has changed: each session has a digest of all that is said of it.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from harness.history.block import Block, File
from harness.history.fingerprint import EXACT

FORMAT = 4
NAME = "index.sqlite"
MOST_USES = 2**62  # a count that no store reaches
# the machine's doing, and no damage; READONLY may be either
NOT_DAMAGE = {
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
}  # fmt: skip
_TABLES = """
create table if not exists sessions (
    key text primary key, used integer not null, used_at real not null, lineage text not null, sha256 text not null
);
create table if not exists blocks (
    key text not null references sessions, place integer not null, name text not null, tokens blob not null,
    size integer not null, sha256 text not null, bytes integer not null, primary key (key, place)
);
"""
_BLOCKS = "select key, place, name, tokens, size, sha256, bytes from blocks"
_SESSIONS = "select key, used, used_at, lineage, sha256 from sessions"
NOT_AS_WRITTEN = (ValueError, TypeError, AttributeError)  # what rows of wrong types and texts that are none raise
IndexRow = Sequence[Any]  # of a damaged index, anything; texts come as bytes, for some may be none
PlainBlock = tuple[str, bytes, int, str, int]  # a block: its name, tokens, size, and its file's sha256 and bytes


class OtherFormat(sqlite3.DatabaseError):
    """Another version of the store wrote it."""


@dataclass(slots=True)
class StoredSession:
    """A session on disk. `used`: a count that grows with every use; `used_at`: the wall clock's seconds then.
    `lineage`: EXACT, or which cut its rows lie behind."""

    blocks: list[Block]  # without rows, with files
    used: int
    used_at: float
    lineage: str = EXACT


@dataclass(frozen=True, slots=True)
class Sound:
    """What of an index is as it was written: sessions by key, the least recently used first. `damage` says of an index
    what is wrong with it; empty where nothing is."""

    entries: dict[str, StoredSession]
    damage: str = ""


@contextmanager
def _readable() -> Iterator[None]:
    """SQLite quotes in its messages what it finds, which in a damaged file may be no text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"{NAME} has names that are no text") from error


class Index:
    """Raises sqlite3.Error where the file is damaged, or the disk full. Opened by one thread, then used by another."""

    def __init__(self, folder: Path) -> None:
        self._connection = sqlite3.connect(folder / NAME, check_same_thread=False)
        self._connection.text_factory = bytes
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    @_readable()
    def _prepare(self) -> None:
        connection = self._connection
        # of one owner: nothing is mapped then, as -shm would be, which ends a process if it is cut
        connection.execute("pragma locking_mode = exclusive")
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        (format_,) = connection.execute("pragma user_version").fetchone()
        self.fresh = format_ == 0  # there was none, or an empty file
        if format_ not in (0, FORMAT):
            raise OtherFormat(f"{NAME} has format {format_}, this version reads and writes {FORMAT}")
        connection.executescript(_TABLES)
        connection.execute(f"pragma user_version = {FORMAT}")

    @_readable()
    def read(self) -> Sound:
        """All that is as it was written. Raises sqlite3.DatabaseError where nothing can be read."""
        (found,) = self._connection.execute("pragma integrity_check(1)").fetchone()
        damage = "" if found == b"ok" else f"is damaged ({' '.join(found.decode(errors='replace').split())})"
        blocks: dict[Any, list[IndexRow]] = defaultdict(list)
        for key, *row in self._connection.execute(_BLOCKS).fetchall():
            blocks[key].append(row)
        sessions = self._connection.execute(_SESSIONS).fetchall()
        entries: dict[str, StoredSession] = {}
        for row in sessions:
            with suppress(*NOT_AS_WRITTEN):
                key, entry = _entry(row, blocks.pop(row[0], []))
                entries[key] = entry
        if lacking := max(len(sessions) - len(entries), len(blocks)):  # rows of one may have lost each other
            damage = damage or f"is damaged ({lacking} of its sessions are not what was written)"
        return Sound(dict(sorted(entries.items(), key=lambda one: one[1].used)), damage)

    @_readable()
    def replace(self, key: str, entry: StoredSession, unchanged: int) -> None:
        """The first `unchanged` blocks are those that it has already."""
        rows = [_plain(block) for block in entry.blocks]
        known = {"key": key, "used": entry.used, "at": entry.used_at, "lineage": entry.lineage}
        with self._connection as connection:
            connection.execute(
                "insert into sessions values (:key, :used, :at, :lineage, :sha256) "
                "on conflict do update set used = :used, used_at = :at, lineage = :lineage, sha256 = :sha256",
                known | {"sha256": _digest(key, entry.lineage, rows)},
            )
            connection.execute("delete from blocks where key = ? and place >= ?", (key, unchanged))
            connection.executemany(
                "insert into blocks values (?, ?, ?, ?, ?, ?, ?)",
                [(key, place, *rows[place]) for place in range(unchanged, len(rows))],
            )

    @_readable()
    def touch(self, key: str, used: int, used_at: float) -> None:
        with self._connection as connection:
            connection.execute("update sessions set used = ?, used_at = ? where key = ?", (used, used_at, key))

    @_readable()
    def drop(self, key: str) -> None:
        with self._connection as connection:
            connection.execute("delete from blocks where key = ?", (key,))
            connection.execute("delete from sessions where key = ?", (key,))

    def close(self) -> None:
        self._connection.close()


def opened(folder: Path) -> tuple[Index, Sound]:
    """The index of `folder`, and what it holds. One that is damaged, or of another version, is made anew with what is
    sound of it. Raises sqlite3.Error or OSError where there can be none, as on a full disk."""
    try:
        index = Index(folder)
        try:
            sound = index.read()
        except BaseException:
            index.close()
            raise
        if not sound.damage:
            return index, sound
        index.close()
    except OtherFormat as error:
        sound = Sound({}, f"is of another version ({error})")
    except sqlite3.Error as error:
        if not _is_damage(error, folder):
            raise
        sound = Sound({}, f"is damaged ({error})")
    remove(folder)
    return _made(folder, sound.entries), sound


def remove(folder: Path) -> None:
    """A damaged one, with its log."""
    for path in folder.glob(f"{NAME}*"):
        path.unlink()


def _made(folder: Path, entries: Mapping[str, StoredSession]) -> Index:
    index = Index(folder)
    try:
        for key, entry in entries.items():
            index.replace(key, entry, 0)
    except BaseException:
        index.close()
        raise
    return index


def _is_damage(error: sqlite3.Error, folder: Path) -> bool:
    """Whether the file is at fault, and not the machine. A damaged one may claim to be read-only."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # the primary one
    if code == sqlite3.SQLITE_READONLY:
        return os.access(folder / NAME, os.W_OK)
    return code not in NOT_DAMAGE


def _entry(row: IndexRow, blocks: Sequence[IndexRow]) -> tuple[str, StoredSession]:
    """Raises one of `NOT_AS_WRITTEN`."""
    key, used, used_at, lineage, sha256 = row
    whole = [
        (name.decode(), tokens, size, head.decode(), length)
        for _, name, tokens, size, head, length in sorted(blocks, key=lambda block: block[0])
    ]
    key, lineage = key.decode(), lineage.decode()
    places_hold = sorted(block[0] for block in blocks) == list(range(len(blocks)))
    uses_hold = isinstance(used, int) and 0 <= used < MOST_USES and isinstance(used_at, float) and isfinite(used_at)
    if not (places_hold and uses_hold and sha256.decode() == _digest(key, lineage, whole)):
        raise ValueError(f"{key} is not what was written")
    return key, StoredSession([_block(*one) for one in whole], used, used_at, lineage)


def _digest(key: str, lineage: str, rows: Iterable[PlainBlock]) -> str:
    """Of all that is said of a session but when it was used."""
    sha256 = hashlib.sha256(repr((key, lineage)).encode())
    for name, tokens, *others in rows:
        sha256.update(repr((name, len(tokens), *others)).encode())
        sha256.update(tokens)
    return sha256.hexdigest()


def _block(name: str, tokens: bytes, size: int, sha256: str, length: int) -> Block:
    return Block(name, tuple(array("q", tokens)), size, None, File(sha256, length))


def _plain(block: Block) -> PlainBlock:
    assert block.file is not None
    return block.name, array("q", block.tokens).tobytes(), block.size, block.file.sha256, block.file.bytes
