"""Keeps a converted model in the cache: complete or not at all, and checked against checksums from
its conversion.

A file whose size, time and inode are as noted is taken as unchanged, since hashing 540 MB takes a
second; any other is hashed. A folder that differs from what was written is converted again."""

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

NOTE = "checksums.json"  # in the same folder: {name: {"sha256": ..., "size": ..., "mtime_ns": ..., "inode": ...}}


def ensure(folder: Path, make: Callable[[Path], None], *, thorough: bool = False) -> str | None:
    """Convert the model by `make`, which gets a path to create, unless `folder` holds it
    completely.

    `thorough` hashes every file. Return what was wrong with an existing folder, or None.
    """
    if not thorough and _is_as_noted(folder):
        return None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f".{folder.name}.lock")):  # one process converts, others wait
            fault = _fault(folder, thorough) if folder.is_dir() else None
            if fault:
                say_once(f"the model in {folder} is converted again: {fault}")
            if fault or not folder.is_dir():
                _replace(folder, make)
        return fault
    except (OSError, ImportError) as error:
        if folder.is_dir() and _fault(folder, thorough) is None:  # nothing can be locked, but another process was first
            return None
        remedy = "run `make setup`" if isinstance(error, ImportError) else "set KV_HARNESS_CACHE to another folder"
        raise ModelError(
            f"The embedded model cannot be unpacked (540 MB) into {folder.parent}: "
            f"{getattr(error, 'strerror', None) or error}; {remedy}."
        ) from error


def _replace(folder: Path, make: Callable[[Path], None]) -> None:
    unfinished = folder.with_name(f".{folder.name}-unfinished")
    for old in (unfinished, folder):  # a killed process leaves the first of them
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
    """Turn errors of libraries in Rust, which report a full disk only in words (Exception("No space
    left on device (os error 28)")), into `OSError`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and (number := re.search(r"\(os error (\d+)\)", str(error))):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


def _fault(folder: Path, thorough: bool) -> str | None:
    """Return what differs from what was written, or None. Note the new state of files that are
    intact but were touched."""
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
        with suppress(OSError):  # every process hashes a cache that is read-only
            _write_note(folder, notes)
    return None


def _is_as_noted(folder: Path) -> bool:
    notes, states = _notes(folder), {file.name: _state(file) for file in _files(folder)}
    same = (states[name].items() <= notes[name].items() for name in notes.keys() & states.keys())
    return bool(notes) and notes.keys() == states.keys() and all(same)


def _notes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what is noted of each file; nothing if the notes cannot be read."""
    try:
        return {name: dict(about) for name, about in json.loads((folder / NOTE).read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_note(folder: Path, notes: dict[str, dict[str, Any]]) -> None:
    beside = folder / f".{NOTE}"
    beside.write_text(json.dumps(notes, indent=1))
    beside.replace(folder / NOTE)


def _files(folder: Path) -> list[Path]:
    """Return all files that a loader might read."""
    return sorted(file for file in folder.glob("[!.]*") if file.name != NOTE)


def _noted(file: Path) -> dict[str, Any]:
    """Return the note of a file that was just written, after syncing it to disk: a power failure
    may leave zeros in it."""
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
    """Return the hash of a file; a process hashes each state of a file once."""
    return _sha256(file)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Keep other processes waiting, as far as the file system can: one that is read-only or far
    away may not."""
    descriptor = None
    try:
        with suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
