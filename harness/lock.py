"""One writer per run folder: a lock that the kernel drops when its process dies, however it dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from harness.records import StoreError

NAME = ".lock"
TRIES, PAUSE_S = 5, 0.05  # a report that looks whether the run is alive holds the lock for an instant


class FolderInUse(StoreError):
    """Another process writes this run folder."""


class FolderLock:
    """`flock` on a file beside the results; the file stays, only the lock comes and goes."""

    def __init__(self, folder: Path) -> None:
        self.fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        for attempt in range(TRIES):
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == TRIES - 1:
                    holder = os.pread(self.fd, 1000, 0)
                    os.close(self.fd)
                    raise FolderInUse(_in_use(folder, holder)) from None
                time.sleep(PAUSE_S)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def release(self) -> None:
        os.close(self.fd)


def is_locked(folder: Path) -> bool:
    """Whether a process is writing the folder now."""
    with suppress(FileNotFoundError, PermissionError), open(folder / NAME, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _in_use(folder: Path, holder: bytes) -> str:
    who = "another process"
    with suppress(ValueError, KeyError, TypeError):
        plain = json.loads(holder)
        who = f"process {plain['pid']} on {plain['host']}"
    return f"{folder} is being written by {who}: wait until it ends, or stop it, and start again to resume"
