"""Reading and writing the small files of a run folder so that a crash leaves none of them in pieces."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from harness.results.records import StoreError


def canonical(plain: Mapping[str, Any], sort: bool = True) -> str:
    """JSON text; sorted, it is the same for equal values and can be hashed."""
    try:
        return json.dumps(plain, sort_keys=sort, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise StoreError(f"a config must hold plain values only: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    return _read(path, json.loads, json.JSONDecodeError)


def read_yaml(path: Path) -> dict[str, Any]:
    return _read(path, yaml.safe_load, yaml.YAMLError)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines of a file that is written at once."""
    found: list[dict[str, Any]] = _read(path, _lines, ValueError)["lines"]
    return found


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    write_atomically(path, "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines))


def write_json(path: Path, plain: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_yaml(path: Path, plain: Mapping[str, Any]) -> None:
    """In the order of `plain`; tuples become lists."""
    values = json.loads(canonical(plain, sort=False))
    write_atomically(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def drop_temporary(folder: Path) -> None:
    """Removes what `write_atomically` had begun in a process that was killed; one that lives may be writing still."""
    for path in folder.glob(".*.*"):
        pid = path.suffix[1:]
        if pid.isdigit() and (int(pid) == os.getpid() or not _lives(int(pid))):
            path.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # someone else's
        return True
    return True


def drop_half_line(path: Path) -> None:
    """Cuts off a last line without its newline, which a crash in the middle of a write leaves."""
    if path.exists():
        with open(path, "r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Says in one sentence that, and why, a folder cannot be written."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write {folder}: {reason(error)}; choose another with results.root=FOLDER") from error


def reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]


def _lines(text: str) -> dict[str, Any]:
    return {"lines": [json.loads(line) for line in text.split("\n") if line]}  # not splitlines: text may hold U+2028


def _read(path: Path, parse: Any, refusal: type[Exception]) -> dict[str, Any]:
    try:
        plain = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, refusal) as error:
        raise StoreError(f"cannot read {path}: {reason(error)}") from error
    if not isinstance(plain, dict):
        raise StoreError(f"cannot read {path}: it holds {type(plain).__name__} where keys and values belong")
    return plain
