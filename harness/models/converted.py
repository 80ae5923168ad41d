"""A converted model in the cache: complete or not there at all, and held against checksums noted when it was made.

A file whose size, time and inode are as noted is taken for what was written, since hashing 540 MB takes a second; any
other is hashed. A folder that does not hold what was written is converted anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.models.base import ModelError
from harness.terminal.notices import say_once

NOTE = "checksums.json"  # beside the files: {name: {"sha256": ..., "size": ..., "mtime_ns": ..., "inode": ...}}


def ensure(folder: Path, make: Callable[[Path], None], *, thorough: bool = False) -> str | None:
    """Has `make` convert the model unless `folder` holds it whole; `make` is given a path to create. `thorough` hashes
    every file. Returns what was wrong with a folder that was there, and None where nothing was."""
    if not thorough and _is_as_noted(folder):
        return None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f".{folder.name}.lock")):  # of two processes one converts, the other waits
            fault = _fault(folder, thorough) if folder.is_dir() else None
            if fault:
                say_once(f"the model in {folder} is converted anew: {fault}")
            if fault or not folder.is_dir():
                _replace(folder, make)
        return fault
    except (OSError, ImportError) as error:
        if folder.is_dir() and _fault(folder, thorough) is None:  # where nothing can be locked, another was first
            return None
        remedy = "run `make setup`" if isinstance(error, ImportError) else "set KV_HARNESS_CACHE to another folder"
        raise ModelError(
            f"The embedded model cannot be unpacked (540 MB) into {folder.parent}: "
            f"{getattr(error, 'strerror', None) or error}; {remedy}."
        ) from error


def _replace(folder: Path, make: Callable[[Path], None]) -> None:
    unfinished = folder.with_name(f".{folder.name}-unfinished")
    for old in (unfinished, folder):  # a process that was killed leaves the first
        if old.exists():
            shutil.rmtree(old)
    try:
        with _errors_of_the_system():
            make(unfinished)
        _write_note(unfinished, {file.name: _noted(file) for file in _files(unfinished)})
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _errors_of_the_system() -> Iterator[None]:
    """Libraries in Rust say in words alone that a disk is full: Exception("No space left on device (os error 28)")."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and (number := re.search(r"\(os error (\d+)\)", str(error))):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


def _fault(folder: Path, thorough: bool) -> str | None:
    """What differs from what was written, or None; notes the state of files that are sound in another state."""
    notes, files = _notes(folder), {file.name: file for file in _files(folder)}
    if not notes:
        return "it has no checksums that can be read"
    for name in sorted(notes.keys() ^ files.keys()):
        return f"{name} {'is missing' if name in notes else 'does not belong there'}"
    for name, file in files.items():
        state = _state(file)
        if thorough or not state.items() <= notes[name].items():
            sha256 = None
            with suppress(OSError):  # the disk itself may refuse to read it
                sha256 = _sha256(file) if thorough else _known_sha256(file, *state.values())
            if sha256 is None or sha256 != notes[name].get("sha256"):
                return f"{name} is damaged"
            notes[name] = {"sha256": sha256, **state}
    if notes != _notes(folder):
        with suppress(OSError):  # a cache that nobody may write is hashed by every process
            _write_note(folder, notes)
    return None


def _is_as_noted(folder: Path) -> bool:
    notes, states = _notes(folder), {file.name: _state(file) for file in _files(folder)}
    same = (states[name].items() <= notes[name].items() for name in notes.keys() & states.keys())
    return bool(notes) and notes.keys() == states.keys() and all(same)


def _notes(folder: Path) -> dict[str, dict[str, Any]]:
    """Of each file; empty where they cannot be read."""
    try:
        return {name: dict(about) for name, about in json.loads((folder / NOTE).read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_note(folder: Path, notes: dict[str, dict[str, Any]]) -> None:
    beside = folder / f".{NOTE}"
    beside.write_text(json.dumps(notes, indent=1))
    beside.replace(folder / NOTE)


def _files(folder: Path) -> list[Path]:
    """All that a loader might read."""
    return sorted(file for file in folder.glob("[!.]*") if file.name != NOTE)


def _noted(file: Path) -> dict[str, Any]:
    """Of a file that was just written, once it is on the disk: a machine that loses its power may leave zeros in it."""
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())
    return {"sha256": _sha256(file), **_state(file)}


def _state(file: Path) -> dict[str, int]:
    state = file.stat()
    return {"size": state.st_size, "mtime_ns": state.st_mtime_ns, "inode": state.st_ino}


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@lru_cache
def _known_sha256(file: Path, *state: int) -> str:
    """A process hashes each state of a file once."""
    return _sha256(file)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Keeps other processes waiting, as far as the file system can: one that is read-only or far away may not."""
    descriptor = None
    try:
        with suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
