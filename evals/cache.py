"""Keeps generated data on disk, under a hash of everything that shapes them.

A file is JSON lines: a head with the key and the SHA-256 of what follows, then the rows. It is
written under another name and renamed, so a reader sees a whole file or none. Processes that make
the same rows write the same bytes, so one can continue a file that another left when it was killed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

Row = dict[str, Any]


def key_hash(key: Mapping[str, Any]) -> str:
    """Return 64 hex digits that name a key, whatever the order of its fields."""
    return hashlib.sha256(_dumps(key).encode()).hexdigest()


def load_or_make(folder: Path | None, name: str, key: Mapping[str, Any], make: Callable[[], list[Row]]) -> list[Row]:
    """Return the rows of `key` from `folder`. If they are missing or damaged, make them and keep
    them; with `folder=None` nothing is kept."""
    if folder is None:
        return make()
    path = folder / f"{name}-{key_hash(key)[:16]}.jsonl"
    rows = _read(path, key)
    if rows is None:
        rows = make()
        try:
            _write(path, key, rows)
        except OSError as error:  # a full disk costs time, but does not end the run
            log.warning("%s cannot be written (%s): it is made again next time", path, error.strerror)
    return rows


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _read(path: Path, key: Mapping[str, Any]) -> list[Row] | None:
    """Return the rows of a file, or None where it is absent, holds another key, or is damaged."""
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        known = json.loads(head)
        if known["key"] == json.loads(_dumps(key)) and known["sha256"] == hashlib.sha256(body).hexdigest():
            return [json.loads(line) for line in body.split(b"\n")[:-1]]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass  # a file cut short, or no text at all, counts as one with another key
    log.warning("%s is damaged or holds other data: made again", path)
    return None


def _write(path: Path, key: Mapping[str, Any], rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(_dumps(row) + "\n" for row in rows).encode()
    head = _dumps({"key": key, "sha256": hashlib.sha256(body).hexdigest()}).encode()
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            file.write(head + b"\n" + body)
            file.truncate()  # only now, since another process may be about to rename this file
        with suppress(FileNotFoundError):  # another process renamed it first
            os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
