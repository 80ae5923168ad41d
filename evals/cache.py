"""Generated data on disk, under a hash of everything that shapes it.

A file is JSON lines: a head with the key and the number of rows, then the rows. It is written beside its place and
renamed, so a reader sees a whole file or none; two processes that make the same rows replace each other's equal file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

Row = dict[str, Any]


def key_hash(key: Mapping[str, Any]) -> str:
    """64 hex digits that name a key, whatever the order of its fields."""
    return hashlib.sha256(_dumps(key).encode()).hexdigest()


def load_or_make(folder: Path | None, name: str, key: Mapping[str, Any], make: Callable[[], list[Row]]) -> list[Row]:
    """Rows of `key` from `folder`, made and kept where they are missing or damaged; `folder=None` keeps nothing."""
    if folder is None:
        return make()
    path = folder / f"{name}-{key_hash(key)[:16]}.jsonl"
    rows = _read(path, key)
    if rows is None:
        rows = make()
        _write(path, key, rows)
    return rows


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _read(path: Path, key: Mapping[str, Any]) -> list[Row] | None:
    """None where the file is absent, holds another key, or is not whole."""
    try:
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline())
            rows = [json.loads(line) for line in file]
        if head["key"] == json.loads(_dumps(key)) and head["rows"] == len(rows):
            return rows
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        pass  # cut short, or no text at all: the same as another key
    log.warning("%s is damaged or holds other data: made again", path)
    return None


def _write(path: Path, key: Mapping[str, Any], rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            for line in ({"key": key, "rows": len(rows)}, *rows):
                file.write(_dumps(line) + "\n")
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
