"""Reads and writes the small files of a run folder so that a crash leaves none of them in pieces."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from harness.results.records import RecordError, StoreError
from harness.terminal.stopping import whole
from kernels.temporary import replacing

# how text begins that spreadsheets run, or what `_escaped` made of it
FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
DELETE_LINE = "delete that line and run the same command again, which makes what is missing"


def canonical(plain: Mapping[str, Any], sort: bool = True) -> str:
    """Return JSON text. If sorted, it is the same for equal values, so that it can be hashed."""
    return json.dumps(plain, sort_keys=sort, ensure_ascii=False, allow_nan=False)


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as it comes back from a file: tuples have become lists."""
    values: dict[str, Any] = json.loads(canonical(config, sort=False))
    return values


def digest(plain: Mapping[str, Any]) -> str:
    """Return a SHA-256 hash that is the same for equal values."""
    return hashlib.sha256(canonical(plain).encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    return _read(path, json.loads)


def read_yaml(path: Path) -> dict[str, Any]:
    return _read(path, yaml.safe_load)


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    write_atomically(
        path,
        "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines),
    )


def write_json(path: Path, plain: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV; a row may lack columns. Text that a spreadsheet would run as a formula gets
    a ' in front, which `unescaped` removes. pandas is imported here because benchmarks must run
    without it."""
    import pandas

    names = dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row)
    table = (
        pandas.DataFrame(rows, columns=list(names), dtype=object)
        .map(_escaped)
        .rename(columns=_escaped)
    )
    text = table.to_csv(index=False)
    if "\r" in text:  # which ends a line for readers, and is no reason for a quote to the writer
        text = table.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC)
    write_atomically(path, text)


def read_csv(path: Path, known_by: Set[str] = frozenset()) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (place, cells by column) for each row of a CSV file that `write_csv` wrote; none if it
    lacks one of the columns `known_by`. `place` is file and row as a spreadsheet counts them, for
    errors. Raise `StoreError` if it is no such file, or a row has more or fewer cells than the
    first."""
    try:
        head, *rows = list(csv.reader(StringIO(_bytes(path).decode(), newline=""))) or [[]]
    except (csv.Error, OSError, ValueError) as error:
        raise StoreError(
            f"cannot read {path}: {reason(error)}; make it again, or move it away"
        ) from error
    columns = list(map(unescaped, head))
    for number, row in enumerate(rows if known_by <= {*columns} else (), 2):
        if row and len(row) != len(columns):
            size = f"{len(row)} cells for {len(columns)} columns"
            raise StoreError(
                f"{path}, row {number}: {size}; make the file again, or delete the row"
            )
        if row:
            yield f"{path}, row {number}", dict(zip(columns, map(unescaped, row), strict=True))


def unescaped(cell: Any) -> Any:
    """Return a cell of a CSV file of ours as it was before `write_csv` escaped it; numbers and all
    other text stay as they are."""
    return cell[1:] if isinstance(cell, str) and cell[:1] == "'" and FORMULA.match(cell) else cell


def _escaped(cell: Any) -> Any:
    runs = isinstance(cell, str) and FORMULA.match(cell) and not NUMBER.fullmatch(cell)
    return f"'{cell}" if runs else cell


def write_yaml(path: Path, config: Mapping[str, Any]) -> None:
    """Write a configuration as YAML; tuples become lists, and keys keep their order."""
    write_atomically(path, yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by `text` in one step: readers see the old file or the new one, never a
    part."""
    with whole(), replacing(path) as file:
        file.write(text.encode())


def whole_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file that grows line by line; an empty list if it does not
    exist. Half a last line, which a killed process leaves or a running one is writing, is left
    out."""
    try:
        return _bytes(path).split(b"\n")[:-1] if os.path.lexists(path) else []
    except OSError as error:
        raise StoreError(f"cannot read {path}: {reason(error)}") from error


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) for each line of a JSONL file; `place` is file and line number, for
    errors. Raise `RecordError` for a line that is no JSON object."""
    for number, line in enumerate(whole_lines(path), 1):
        where = f"{path}, line {number}"
        try:
            plain = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"{where}: not a JSON line ({reason(error)}); {DELETE_LINE}"
            ) from error
        if not isinstance(plain, dict):
            raise RecordError(f"{where}: holds {type(plain).__name__}, not a record; {DELETE_LINE}")
        yield where, plain


def append_line(path: Path, text: str) -> None:
    """Append a line to a file; it is safely on disk when this returns. If it cannot be written, as
    on a full disk, no part of it stays. The caller must hold the folder's lock."""
    line = text.encode() + b"\n"
    with writing(path.parent), whole(), open(path, "ab", buffering=0) as file:
        end = file.tell()
        try:
            while line:
                line = line[file.write(line) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def drop_half_line(path: Path) -> None:
    """Cut off a last line that does not end in a newline, as a crash during a write leaves it."""
    if path.exists():
        with open(path, "r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def unwritable(folder: Path) -> str | None:
    """Return the reason why nothing can be written in a folder, judged by permissions without
    writing; None if writing should work."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not there.is_dir():
        return f"{there} is a file"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an `OSError` inside into a `StoreError` that says which folder cannot be written, and
    why."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {folder}: {reason(error)}; choose another with results.root=FOLDER"
        ) from error


def reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: this is not YAML ({error.problem})"
    lines = str(error).splitlines() or [type(error).__name__]
    return (error.strerror if isinstance(error, OSError) else None) or lines[0]


def _bytes(path: Path) -> bytes:
    """Return the content of a file. Raise `OSError` if it is none: a pipe would wait for a writer, and
    /dev/zero never ends."""
    if os.path.lexists(path) and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file, or a link to none")
    return path.read_bytes()


def _read(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        plain = parse(_bytes(path).decode())
    except (OSError, ValueError, TypeError, LookupError, RecursionError, yaml.YAMLError) as error:
        # bytes of any kind
        raise StoreError(f"cannot read {path}: {reason(error)}") from error
    if not isinstance(plain, dict):
        raise StoreError(
            f"cannot read {path}: it holds {type(plain).__name__} where keys and values belong"
        )
    return plain
