"""Makes temporary files and folders that do not outlive their process, however it ends.

Their owner holds a lock on each (`flock`), which the system drops with the process. The next
process to make one beside it removes those that nobody holds, and nothing else: names end in a
checksum of the rest, and a folder holds a file that says whose it is. Where a file system knows no
locks, as some that several machines share, what is left stays."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from weakref import finalize

OWNER = ".owner"  # lies in a folder, is held by its process, and is removed last
MARK = b"A temporary folder of kv-harness: it goes with the process that holds this file.\n"
NAME = re.compile(r"(?P<start>.*[.-])(?P<drawn>[0-9a-f]{8})(?P<sum>[0-9a-f]{8})")
_seen: set[Path] = set()  # folders that this process has searched


class TemporaryFolder:
    """Make a folder in `parent`, by default in the system's place, that goes with this object, with
    the block that it opens, or with the process. Its name begins with `start`, which ends in a
    hyphen."""

    def __init__(self, start: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _look_once(parent)
        self.path, descriptor = _made(parent, start)
        self.remove = finalize(self, _close, self.path, descriptor, os.getpid())

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that is at `path` when the block ends, so that readers see the old
    one or the new one."""
    _look_once(path.parent)
    beside, file = _opened(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)  # still held, so that nobody takes it for abandoned
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def remove_abandoned(parent: Path) -> None:
    """Remove from a folder what processes that are gone have left there. What cannot be read or
    removed stays."""
    _seen.add(parent)
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            with suppress(OSError):
                if _is_ours(entry):
                    remove = _remove_folder if entry.is_dir() else _remove_file
                    remove(Path(entry.path))


def _look_once(parent: Path) -> None:
    if parent not in _seen:
        remove_abandoned(parent)


def _made(parent: Path, start: str) -> tuple[Path, int]:
    """Make a new folder with its owner's file, which is held."""
    while True:
        path = parent / _named(start)
        path.mkdir(mode=0o700)
        descriptor = None
        try:
            with suppress(FileNotFoundError):  # it was not held yet, and another process removed it
                descriptor = os.open(path / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                os.write(descriptor, MARK)
                if _hold(descriptor) is not False and _is_at(path / OWNER, descriptor):
                    return path, descriptor
                os.close(descriptor)
        except BaseException:
            _close(path, descriptor, os.getpid())
            raise


def _opened(path: Path) -> tuple[Path, BinaryIO]:
    """Open a new file beside `path`, which is held."""
    while True:
        beside = path.with_name(_named(f".{path.name}."))
        file = open(beside, "xb")  # noqa: SIM115 (the caller closes it)
        if _hold(file.fileno()) is not False and _is_at(beside, file.fileno()):
            return beside, file
        file.close()  # it was not held yet, and another process removed it


def _named(start: str) -> str:
    drawn = secrets.token_hex(4)
    return f"{start}{drawn}{_sum(start, drawn)}"


def _sum(start: str, drawn: str) -> str:
    return hashlib.sha256(f"kv-harness {start}{drawn}".encode()).hexdigest()[:8]


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is ours by its name and its user, and neither a link nor a device."""
    match = NAME.fullmatch(entry.name)
    return (
        match is not None
        and match["sum"] == _sum(match["start"], match["drawn"])
        and (entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False))
        and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    )


def _remove_folder(path: Path) -> None:
    try:
        descriptor = os.open(path / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # a process was killed before it made that file, or after it removed it
        path.rmdir()  # fails if something is in it
        return
    _if_abandoned(path / OWNER, descriptor, lambda: _is_marked(descriptor) and _empty(path))


def _remove_file(path: Path) -> None:
    _if_abandoned(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW), path.unlink)


def _if_abandoned(path: Path, descriptor: int, remove: Callable[[], object]) -> None:
    try:
        if _hold(descriptor) and _is_at(path, descriptor):
            remove()
    finally:
        os.close(descriptor)


def _hold(descriptor: int) -> bool | None:
    """Return whether the file is ours now; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the name still leads to the open file, which another process may have removed
    in between."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    return False


def _is_marked(descriptor: int) -> bool:
    """Return whether the file holds our mark, or a part of it, which a process that was killed in
    between has written."""
    return MARK.startswith(os.pread(descriptor, len(MARK) + 1, 0))


def _close(path: Path, descriptor: int | None, process: int) -> None:
    """Remove the folder of an owner that ends; a fork of the owner may not."""
    if process == os.getpid():
        with suppress(OSError):
            _empty(path)
        if descriptor is not None:
            os.close(descriptor)


def _empty(path: Path) -> bool:
    """Remove a folder, its owner's file last, so that the next process removes what one that is
    killed here leaves."""
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name != OWNER:
            os.unlink(entry.path)
    (path / OWNER).unlink(missing_ok=True)
    path.rmdir()
    return True
