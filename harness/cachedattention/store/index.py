"""The index of the sessions on disk: SQLite with a write-ahead log, so that a change is whole or not made.

A process may be killed at any moment. After a power cut the last changes may be missing; what they named or removed is
found when the folder is opened. So is what a damage has changed: each session has a digest of its line.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from harness.cachedattention.store.block import Block, WrittenFile
from harness.cachedattention.store.fingerprint import EXACT

FORMAT = 5
NAME = "index.sqlite"
MOST_USES = 2**62  # a count that no store reaches
# the machine's doing, and no damage; READONLY may be either
NOT_DAMAGE = {
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN,
}  # fmt: skip
_TABLE = """
create table if not exists sessions (  -- it may be there: a kill comes before the version
    key text primary key, used integer not null, used_at real not null, content text not null, sha256 text not null
);
"""


class OtherFormat(sqlite3.DatabaseError):
    """Raised where another version of the store wrote the index."""


@dataclass(slots=True)
class StoredSession:
    """A session on disk. `used`: a count that grows with every use; `used_at`: the wall clock's seconds then.
    `lineage`: EXACT, or which cut its rows come after."""

    blocks: list[Block]  # without rows, with files
    used: int
    used_at: float
    lineage: str = EXACT


@contextmanager
def _readable() -> Iterator[None]:
    """Turn SQLite's message about a damaged file, which may quote what is no text, into an error of the database."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError(f"{NAME} has names that are no text") from error


class Index:
    """The file of the index. It raises sqlite3.Error where the file is damaged or the disk full. One thread opens it,
    then another one uses it."""

    def __init__(self, folder: Path) -> None:
        self._connection = sqlite3.connect(folder / NAME, check_same_thread=False)
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
        if self.fresh:
            connection.executescript(f"{_TABLE} pragma user_version = {FORMAT};")

    @_readable()
    def read(self) -> dict[str, StoredSession]:
        """Return the sessions by key, the least recently used first. Raise sqlite3.DatabaseError where the file is
        damaged, or says of a session what was not written."""
        (state,) = self._connection.execute("pragma integrity_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(" ".join(state.split()))
        rows = self._connection.execute("select key, used, used_at, content, sha256 from sessions").fetchall()
        entries: dict[str, StoredSession] = {}
        for key, used, used_at, content, sha256 in rows:
            is_count = isinstance(used, int) and 0 <= used < MOST_USES
            is_time = isinstance(used_at, float) and isfinite(used_at)
            if not (is_count and is_time and sha256 == _digest(key, content)):
                raise sqlite3.DatabaseError("what it says of a session is not what was written")
            plain = json.loads(content)
            blocks = [
                Block(name, tuple(tokens), size, None, WrittenFile(sum_, length))
                for name, tokens, size, sum_, length in plain["blocks"]
            ]
            entries[key] = StoredSession(blocks, used, used_at, plain["lineage"])
        return dict(sorted(entries.items(), key=lambda named: named[1].used))

    @_readable()
    def replace(self, key: str, entry: StoredSession) -> None:
        blocks = [
            [block.name, block.tokens, block.size, block.file.sha256, block.file.bytes]
            for block in entry.blocks
            if block.file is not None
        ]
        content = json.dumps({"lineage": entry.lineage, "blocks": blocks})
        with self._connection as connection:
            row = (key, entry.used, entry.used_at, content, _digest(key, content))
            connection.execute("insert or replace into sessions values (?, ?, ?, ?, ?)", row)

    @_readable()
    def touch(self, key: str, used: int, used_at: float) -> None:
        with self._connection as connection:
            connection.execute("update sessions set used = ?, used_at = ? where key = ?", (used, used_at, key))

    @_readable()
    def drop(self, key: str) -> None:
        with self._connection as connection:
            connection.execute("delete from sessions where key = ?", (key,))

    def close(self) -> None:
        self._connection.close()


def opened(folder: Path) -> tuple[Index, dict[str, StoredSession], str]:
    """Return the index of `folder`, what it holds, and what was wrong with the one that it replaces: an empty one takes
    the place of one that is damaged, or of another version. Raise sqlite3.Error or OSError where there can be none, as
    on a full disk."""
    try:
        index = Index(folder)
        try:
            return index, index.read(), ""
        except BaseException:
            index.close()
            raise
    except OtherFormat as error:
        wrong = f"is of another version ({error})"
    except sqlite3.Error as error:
        if not _is_damage(error, folder):
            raise
        wrong = f"is damaged ({error})"
    remove(folder)
    return Index(folder), {}, wrong


def remove(folder: Path) -> None:
    """Remove a damaged index with its log."""
    for path in folder.glob(f"{NAME}*"):
        path.unlink()


def _is_damage(error: sqlite3.Error, folder: Path) -> bool:
    """Return whether the file is at fault, and not the machine. A damaged one may claim to be read-only."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # the primary one
    if code == sqlite3.SQLITE_READONLY:
        return os.access(folder / NAME, os.W_OK)
    return code not in NOT_DAMAGE


def _digest(key: object, content: object) -> str:
    """Return a hash of all that is said of a session but when it was used; in a damaged index of values of any kind."""
    return hashlib.sha256(repr((key, content)).encode(errors="surrogatepass")).hexdigest()
