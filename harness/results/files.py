"""Reading and writing the small files of a run folder so that a crash leaves none of them in pieces; lines of a run.

Every stored line names the run that it belongs to and has a checksum over all that it holds: records copied from
another folder and numbers changed by hand are found on reading. Not a signature: it guards against mistakes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from harness.results.records import RecordError, StoreError
from harness.terminal.stopping import whole
from kernels.temporary import replacing

RUN, CHECKSUM = "run", "sha256"  # keys of a line beside its content
ADVICE = "restore the line, or delete it to have the example run again"


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
    with whole(), replacing(path) as file:
        file.write(text.encode())


def whole_lines(path: Path) -> list[bytes]:
    """Of a file that grows line by line, none where there is no file. Half a last line, of a write that a kill tore or
    that goes on, is left out."""
    try:
        return path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    except OSError as error:
        raise StoreError(f"cannot read {path}: {reason(error)}") from error


def append_line(path: Path, plain: Mapping[str, Any]) -> None:
    """On disk when this returns. The caller holds the folder's lock."""
    drop_half_line(path)
    line = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    with writing(path.parent), whole(), open(path, "ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def drop_half_line(path: Path) -> None:
    """Cuts off a last line without its newline, which a crash in the middle of a write leaves."""
    if path.exists():
        with open(path, "r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def unwritable(folder: Path) -> str | None:
    """Say why nothing can be written there, without a try; None where names and modes allow it."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not there.is_dir():
        return f"{there} is a file"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Says in one sentence that, and why, a folder below the results root cannot be written."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot write {folder}: {reason(error)}; choose another with results.root=FOLDER") from error


def reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: this is not YAML ({error.problem})"
    return (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]


def _read(path: Path, parse: Any, refusal: type[Exception]) -> dict[str, Any]:
    try:
        plain = parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, refusal) as error:
        raise StoreError(f"cannot read {path}: {reason(error)}") from error
    if not isinstance(plain, dict):
        raise StoreError(f"cannot read {path}: it holds {type(plain).__name__} where keys and values belong")
    return plain


def sealed_lines(path: Path, run: str, *, required: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each line where it stands, for an error to name, and what was sealed; raises as `parse` and `unseal` do."""
    for number, line in enumerate(whole_lines(path), 1):
        where = f"{path}, line {number}"
        yield where, unseal(parse(line, where), run, where, required=required)


def parse(line: str | bytes, where: str) -> dict[str, Any]:
    """The mapping that one line holds; `where` names file and line in the error."""
    try:
        plain = json.loads(line)
    except ValueError as error:
        raise RecordError(f"{where}: not a JSON line ({error}); delete the line to have it run again") from error
    if not isinstance(plain, dict):
        raise RecordError(f"{where}: holds {type(plain).__name__}, not a record; delete the line")
    return plain


def seal(plain: Mapping[str, Any], run: str) -> dict[str, Any]:
    """`plain` with the identity of its run and the checksum of both."""
    bound = {**plain, RUN: run}
    return bound | {CHECKSUM: _checksum(bound)}


def unseal(line: Mapping[str, Any], run: str, where: str, *, required: bool = True) -> dict[str, Any]:
    """What was sealed. Raises `RecordError`, which begins with `where`, for a line of another run or a changed one;
    for one without a seal where that is `required`: runs from before there were seals have none."""
    plain = dict(line)
    checksum = plain.pop(CHECKSUM, None)
    owner = plain.get(RUN)
    if checksum is None and owner is None and not required:
        return plain
    name = f"{where}: example {plain.get('id')!r}"
    if checksum is None or owner is None:
        raise RecordError(f"{name} lacks its run or its checksum; {ADVICE}")
    if checksum != _checksum(plain):
        raise RecordError(f"{name} was changed after it was written; {ADVICE}")
    if owner != run:
        raise RecordError(f"{name} belongs to another run ({str(owner)[:8]}, this is {run[:8]}); {ADVICE}")
    del plain[RUN]
    return plain


def _checksum(plain: Mapping[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
