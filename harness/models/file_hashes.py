"""Hashes files (SHA-256) and remembers the hash until the file changes.

A large file is read again only if its size, times of change, inode or device differ from those at
the last reading: hashing the weights of a 70B model takes minutes, and every process of a sweep
needs the hash. The time of the last change of the inode (`st_ctime_ns`) is among them, because a
program can reset the other times, but not this one."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from time import time_ns
from typing import Any

from harness.models.embedded import cache_root
from harness.terminal.notices import say_once

SMALL = 2**20  # bytes; smaller files are read every time
LARGE = 2**31  # bytes; reading a larger file is announced
SETTLED_NS = 2 * 10**9  # a file that changed more recently may change again within the same time stamp
_known: dict[Path, dict[str, Any]] = {}


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of all bytes of `file` as they are now. Raises `OSError` where they cannot
    be read."""
    state, began = _state(file), time_ns()
    if state["size"] <= SMALL:
        return _sha256(file)
    place = file.resolve()
    if place not in _known:
        _known[place] = _read_note(place)
    if _known[place].get("state") == state:
        return str(_known[place]["sha256"])
    if state["size"] > LARGE:
        say_once(f"{file} is read whole for its hash, which is remembered until the file changes")
    digest = _sha256(file)
    if _state(file) == state and began - max(state["mtime_ns"], state["ctime_ns"]) > SETTLED_NS:
        _known[place] = {"file": str(place), "state": state, "sha256": digest}
        _write_note(place)
    return digest


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _state(file: Path) -> dict[str, int]:
    status = file.stat()
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
        "device": status.st_dev,
    }


def _note(place: Path) -> Path:
    """Return the file in which the hash of `place` is noted for other processes. Each file has a
    note of its own, so that nothing has to be locked."""
    return cache_root() / "hashes" / f"{hashlib.sha256(str(place).encode()).hexdigest()[:32]}.json"


def _read_note(place: Path) -> dict[str, Any]:
    """Return what is noted of the file; nothing if the note is missing or damaged."""
    with suppress(OSError, ValueError):
        noted = json.loads(_note(place).read_bytes())
        if isinstance(noted, dict) and noted.get("file") == str(place) and isinstance(noted.get("sha256"), str):
            return noted
    return {}


def _write_note(place: Path) -> None:
    """Note the hash. If the cache cannot be written, every process reads the file again."""
    note = _note(place)
    unfinished = note.with_name(f".{note.name}.{os.getpid()}")
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(_known[place]))
        unfinished.replace(note)
