"""Makes temporary files and folders that do not outlive their process, however it ends.

Their owner holds a lock on each (`flock`), which the system drops with the process. The next
process to make one in the same folder removes those that nobody holds. Where a file system has no
locks, as some that several machines share, what is left stays."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from weakref import finalize

ENDING = ".kv-harness-tmp"  # of every name that is made here, and of no other
_seen: set[Path] = set()  # folders that this process has searched


class TemporaryFolder:
    """Make a folder in `parent`, by default in the system's temporary folder. It is removed with
    this object, at the end of a `with` block, or with the process. Its name begins with `start`."""

    def __init__(self, start: str, parent: Path | None = None) -> None:
        self.path, descriptor = _held(
            parent or Path(tempfile.gettempdir()), start, lambda path: path.mkdir(0o700)
        )
        self.remove = finalize(self, _close, self.path, descriptor, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file for writing that replaces the file at `path` when the block ends
    without an error, so that readers see the old content or the new one, never a part."""
    beside, descriptor = _held(
        path.parent, f".{path.name}.", lambda path: path.touch(exist_ok=False)
    )
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)  # still held, so that nobody takes it for abandoned
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def remove_abandoned(parent: Path) -> None:
    """Remove from the folder `parent` the temporary files and folders made here by processes that
    are gone. What cannot be read or removed stays."""
    _seen.add(parent)
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            with suppress(OSError):
                if (
                    entry.name.endswith(ENDING)
                    and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                ):
                    _remove_unless_held(Path(entry.path))


def _held(parent: Path, start: str, make: Callable[[Path], None]) -> tuple[Path, int]:
    """Make a temporary file or folder with a new name in `parent`, by `make`, and lock it. Return
    its path and the open file descriptor that holds the lock."""
    if parent not in _seen:
        remove_abandoned(parent)
    while True:
        path = parent / f"{start}{secrets.token_hex(6)}{ENDING}"
        make(path)
        with suppress(FileNotFoundError):  # it was not held yet, and another process removed it
            descriptor = os.open(path, os.O_RDONLY)
            if _lock(descriptor) is not False and _is_at(path, descriptor):
                return path, descriptor
            os.close(descriptor)


def _remove_unless_held(path: Path) -> None:
    # a pipe would wait for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _lock(descriptor) and _is_at(path, descriptor):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Try to lock an open file without waiting. Return whether this process holds the lock now;
    None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether `path` still names the open file `descriptor`, which another process may have
    removed in between."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    return False


def _close(path: Path, descriptor: int, process: int) -> None:
    """Remove the folder and release its lock. A process forked from `process`, the one that made
    it, does nothing."""
    if process == os.getpid():
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)
