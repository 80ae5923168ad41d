"""Which blocks make up which session on disk: SQLite with a write-ahead log, so that a change is whole or not made.

A process may be killed at any moment. After a power cut the last changes may be missing; what they named or removed is
found when the folder is opened.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.history.block import Block, File
from harness.history.fingerprint import EXACT

FORMAT = 3
NAME = "index.sqlite"
_TABLES = """
create table if not exists sessions (
    key text primary key, used integer not null, used_at real not null, lineage text not null
);
create table if not exists blocks (
    key text not null references sessions, place integer not null, name text not null, tokens blob not null,
    size integer not null, sha256 text not null, bytes integer not null, primary key (key, place)
);
"""


class OtherFormat(sqlite3.DatabaseError):
    """Another version of the store wrote it."""


@dataclass(slots=True)
class Entry:
    """A session on disk. `used`: a count that grows with every use; `used_at`: the wall clock's seconds then.
    `lineage`: EXACT, or which cut its rows lie behind."""

    blocks: list[Block]  # without rows, with files
    used: int
    used_at: float
    lineage: str = EXACT


class Index:
    """Raises sqlite3.Error where the file is damaged, or the disk full. Opened by one thread, then used by another."""

    def __init__(self, folder: Path) -> None:
        self._connection = sqlite3.connect(folder / NAME, check_same_thread=False)
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        connection = self._connection
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        (format_,) = connection.execute("pragma user_version").fetchone()
        (found,) = connection.execute("pragma quick_check").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(f"{NAME}: {found}")
        if format_ not in (0, FORMAT):
            raise OtherFormat(f"{NAME} has format {format_}, this version reads and writes {FORMAT}")
        connection.executescript(_TABLES)
        connection.execute(f"pragma user_version = {FORMAT}")

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """The least recently used first."""
        for key, used, used_at, lineage in self._connection.execute("select * from sessions order by used").fetchall():
            rows = self._connection.execute(
                "select name, tokens, size, sha256, bytes from blocks where key = ? order by place", (key,)
            ).fetchall()
            yield key, Entry([_block(*row) for row in rows], used, used_at, lineage)

    def replace(self, key: str, entry: Entry, unchanged: int) -> None:
        """The first `unchanged` blocks are those that it has already."""
        places = range(unchanged, len(entry.blocks))
        with self._connection as connection:
            connection.execute(
                "insert into sessions values (:key, :used, :at, :lineage) "
                "on conflict do update set used = :used, used_at = :at, lineage = :lineage",
                {"key": key, "used": entry.used, "at": entry.used_at, "lineage": entry.lineage},
            )
            connection.execute("delete from blocks where key = ? and place >= ?", (key, unchanged))
            connection.executemany(
                "insert into blocks values (?, ?, ?, ?, ?, ?, ?)",
                [(key, place, *_plain(entry.blocks[place])) for place in places],
            )

    def touch(self, key: str, used: int, used_at: float) -> None:
        with self._connection as connection:
            connection.execute("update sessions set used = ?, used_at = ? where key = ?", (used, used_at, key))

    def drop(self, key: str) -> None:
        with self._connection as connection:
            connection.execute("delete from blocks where key = ?", (key,))
            connection.execute("delete from sessions where key = ?", (key,))

    def close(self) -> None:
        self._connection.close()


def remove(folder: Path) -> None:
    """A damaged one, with its log."""
    for path in folder.glob(f"{NAME}*"):
        path.unlink()


def _block(name: str, tokens: bytes, size: int, sha256: str, length: int) -> Block:
    return Block(name, tuple(array("q", tokens)), size, None, File(sha256, length))


def _plain(block: Block) -> Sequence[str | bytes | int]:
    assert block.file is not None
    return block.name, array("q", block.tokens).tobytes(), block.size, block.file.sha256, block.file.bytes
