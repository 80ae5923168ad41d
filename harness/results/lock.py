"""One writer per folder: a file lock, which the system releases when the process that holds it
ends."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from harness.results.records import StoreError
from harness.terminal.notices import say_once

NAME = ".lock"
# to take a lock that a reader may be looking at; to see whether a folder is locked
TRY_S, LOOK_S = 1.0, 0.1
_held: set[Path] = set()  # by this process, which would wait for itself for ever


class FolderInUse(StoreError):
    """Another process is writing this folder."""


class FolderLock:
    """A lock on a folder, by a lock file in it. The file stays when the lock is released."""

    def __init__(self, folder: Path, *, wait: bool = False) -> None:
        """Take the lock. If another process holds it, `wait` until that one releases it; without
        `wait`, or if this process holds it already, raise `FolderInUse`."""
        self.folder = folder.resolve()
        self._lock = FileLock(folder / NAME, thread_local=False)
        try:
            self._lock.acquire(timeout=TRY_S)
        except Timeout:
            if not wait or self.folder in _held:
                raise FolderInUse(
                    f"{folder} is being written by {owner(folder)}: wait until it ends, or stop it, and start again to "
                    "resume"
                ) from None
            say_once(
                f"waiting for {owner(folder)}, which is writing {folder.name}; what it finishes is not run again"
            )
            self._lock.acquire(poll_interval=0.2)
        _held.add(self.folder)
        with suppress(OSError):  # a full disk: the lock holds without a name
            (folder / NAME).write_text(
                json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
            )

    def release(self) -> None:
        _held.discard(self.folder)
        self._lock.release()


def is_locked(folder: Path) -> bool:
    """Return True if a process is writing the folder now."""
    if not (folder / NAME).exists():
        return False
    try:
        with FileLock(folder / NAME, timeout=LOOK_S, thread_local=False):
            return False
    except Timeout:
        return True
    except OSError:  # a folder of somebody else, in which nobody but they can take a lock
        return False


def owner(folder: Path) -> str:
    """Return the process that took the lock last, in words."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # it may have left no name
        holder = json.loads((folder / NAME).read_text())
        return f"process {holder['pid']} on {holder['host']}"
    return "another process"
