"""What a process does to its files, step by step, so that something can happen at one of the steps.

A step is a write, a sync, a rename or the like, or a statement of SQLite. It is about the paths that it names.
"""

from __future__ import annotations

import builtins
import io
import os
import re
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Torn = Callable[[], object]  # does the half of a step that a kill would leave of it
PATHS = {"replace": 2, "rename": 2, "mkdir": 1, "unlink": 1, "rmdir": 1, "fsync": 1, "ftruncate": 1, "truncate": 1}


class Steps:
    """Does `act` before the `at`-th step on paths in which `pattern` is found; 0: never. `taken`: all such steps."""

    def __init__(self, pattern: str, at: int, act: Callable[[Torn], object]) -> None:
        self.pattern, self.at, self.act = re.compile(pattern), at, act
        self.taken: list[str] = []
        self._lock = threading.Lock()

    def step(self, *paths: Any, torn: Torn = lambda: None) -> None:
        named = " ".join(map(_name, paths))
        if not self.pattern.search(named):
            return
        with self._lock:
            self.taken.append(named)
            due = len(self.taken) == self.at
        if due:
            self.act(torn)

    def install(self) -> None:
        """For the rest of this process."""
        for name, paths in PATHS.items():
            setattr(os, name, self._counted(getattr(os, name), paths))
        open_file, open_descriptor, connect = builtins.open, os.open, sqlite3.connect

        def opened(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            if "r" in mode and "+" not in mode:
                return open_file(file, mode, *arguments, **named)
            self.step(file)
            return self._watched(open_file(file, mode, *arguments, **named), _name(file))

        def descriptor(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.step(path)
            return open_descriptor(path, flags, *arguments, **named)

        def connected(database: Any, *arguments: Any, **named: Any) -> sqlite3.Connection:
            self.step(database)
            return connect(database, *arguments, **named, factory=self._connection(_name(database)))

        os.open, sqlite3.connect = descriptor, connected  # type: ignore[assignment]
        builtins.open = io.open = opened

    def _counted(self, function: Callable[..., Any], paths: int) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.step(*arguments[:paths])
            return function(*arguments, **named)

        return counted

    def _watched(self, file: Any, path: str) -> Any:
        write, truncate = file.write, file.truncate

        def torn(data: Any) -> None:
            write(data[: len(data) // 2])
            file.flush()

        def written(data: Any) -> Any:
            self.step(path, torn=lambda: torn(data))
            return write(data)

        def truncated(*arguments: Any) -> Any:
            self.step(path)
            return truncate(*arguments)

        with suppress(AttributeError):  # one that cannot be watched
            file.write, file.truncate = written, truncated
        return file

    def _connection(self, path: str) -> type[sqlite3.Connection]:
        step = self.step

        class Watched(sqlite3.Connection):
            def execute(self, *arguments: Any) -> Any:
                step(path)
                return super().execute(*arguments)

            def executemany(self, *arguments: Any) -> Any:
                step(path)
                return super().executemany(*arguments)

            def executescript(self, *arguments: Any) -> Any:
                step(path)
                return super().executescript(*arguments)

            def __exit__(self, *arguments: Any) -> Any:
                step(path)  # the end of a transaction
                return super().__exit__(*arguments)

        return Watched


def _name(path: Any) -> str:
    if isinstance(path, int):
        with suppress(OSError):
            return os.readlink(f"/proc/self/fd/{path}")
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
