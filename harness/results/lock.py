"""One writer per run folder: a lock that the kernel drops when its process dies, however it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.results.records import StoreError
from harness.terminal.notices import say_once

NAME = ".lock"
TRIES, PAUSE_S = 5, 0.05  # a writer may be about to end
LOOKS_S = 60.0  # in which a report, stopped by a busy machine while it looks whether the run is alive, goes on
_held: set[Path] = set()  # by this process, which would wait for itself for ever


class FolderInUse(StoreError):
    """Another process writes this run folder."""


class FolderLock:
    """`flock` on a file beside the results; the file stays, only the lock comes and goes."""

    def __init__(self, folder: Path, *, wait: bool = False, of: str | None = None) -> None:
        """`wait` for another process to let go; else, and where this one holds it itself, raise `FolderInUse`. `of`:
        what is written there, where the folder's name does not say it."""
        self.folder, self.of = folder.resolve(), of or folder.name
        self.fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        if not self._taken():
            if not wait or self.folder in _held:
                os.close(self.fd)
                raise FolderInUse(
                    f"{folder} is being written by {owner(folder)}: wait until it ends, or stop it, and start again to "
                    "resume"
                )
            self._wait()
        _held.add(self.folder)
        with suppress(OSError):  # a full disk: the lock holds without a name
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def _taken(self) -> bool:
        """Whether it is ours now. Who writes has the lock alone; who only looks whether somebody does shares it, and
        is waited for."""
        alone, until = 0, time.monotonic() + LOOKS_S
        while not _flock(self.fd, fcntl.LOCK_EX):
            alone += not _flock(self.fd, fcntl.LOCK_SH)
            if alone == TRIES or time.monotonic() > until:
                return False
            fcntl.flock(self.fd, fcntl.LOCK_UN)  # else two that try would keep each other out
            time.sleep(PAUSE_S)
        return True

    def _wait(self) -> None:
        """The kernel wakes one of those that wait as soon as the holder has ended, however it ended."""
        say_once(f"waiting for {owner(self.folder)}, which is writing {self.of}; what it finishes is not run again")
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX)
        except BaseException:  # Ctrl-C
            os.close(self.fd)
            raise

    def release(self) -> None:
        _held.discard(self.folder)
        os.close(self.fd)


def is_locked(folder: Path) -> bool:
    """Whether a process is writing the folder now."""
    with suppress(FileNotFoundError, PermissionError), open(folder / NAME, "rb") as file:
        return not _flock(file.fileno(), fcntl.LOCK_SH)
    return False


def _flock(fd: int, kind: int) -> bool:
    """Whether the lock is there to be had now."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(folder: Path) -> dict[str, Any]:
    """`host` and `pid` of who wrote its name into the lock file last; empty where nobody has."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        plain = json.loads((folder / NAME).read_text())
        return {key: plain[key] for key in ("host", "pid")}
    return {}


def owner(folder: Path) -> str:
    """Who holds the lock, in words."""
    known = holder(folder)
    return f"process {known['pid']} on {known['host']}" if known else "another process"
