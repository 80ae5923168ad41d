"""Where evaluation data comes from: a folder of files first, then plain files of a data set on the hub.

No loading scripts. A file is read whole or not at all: every line has to parse, a zip member has to match its
checksum, a hub file the hash under which the hub keeps it (`evals/hub.py`).
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals import hub
from evals.base import NO_DATA_ROOT, TaskEnv, TaskError

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file and the places where it may lie."""

    name: str  # as messages and records call it: "longbench/qasper"
    local: tuple[str, ...]  # glob patterns below the data root; the first that matches is taken
    hub_repo: str | None = None  # None: not on the hub
    hub_file: str = ""
    hub_revision: str = "main"
    member: str | None = None  # the wanted file where the found one is a zip


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes of one file, where they came from, and their SHA-256 (of the member, where the file is a zip)."""

    data: bytes
    origin: str  # "local:longbench/qasper.jsonl" or "hub:REPO@COMMIT:FILE"
    sha256: str

    @property
    def provenance(self) -> dict[str, Any]:
        return {"origin": self.origin, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of one file."""

    rows: list[Row]
    origin: str
    sha256: str

    @property
    def provenance(self) -> dict[str, Any]:
        return {"origin": self.origin, "sha256": self.sha256, "rows": len(self.rows)}


def require(sources: Iterable[Source], root: Path | None) -> None:
    """Raise one `TaskError` that names all of `sources` that no place has; the hub is asked until it fails once."""
    absent = [source for source in sources if _find(source, root) is None]
    for place, source in enumerate(absent):
        try:
            _from_hub(source, root)
        except TaskError as error:
            others = [other for other in absent[place + 1 :] if not _is_cached(other)]
            raise TaskError(f"{error}{_too(others, _command(source))}") from error


def _too(others: Sequence[Source], known: str) -> str:
    """The end of an error about one source, for the others that are missing."""
    if not others:
        return ""
    names = ", ".join(other.name for other in others)
    commands = [c for c in dict.fromkeys(map(_command, others)) if c not in (known, "")]
    remedy = f"; for them `{' && '.join(commands)}`" if commands else ""
    return f". Missing, too: {names}{remedy}"


def _command(source: Source) -> str:
    return hub.command(source.hub_repo, source.hub_file, source.hub_revision) if source.hub_repo else ""


def _is_cached(source: Source) -> bool:
    return bool(source.hub_repo) and hub.cached(str(source.hub_repo), source.hub_file, source.hub_revision) is not None


Kinds = Mapping[str, str]  # field that every row must hold -> one of KINDS
ANY: Kinds = {}


def open_rows(source: Source, env: TaskEnv, kinds: Kinds = ANY) -> Rows:
    """Rows of a .jsonl, .json (one list) or .parquet file; one that lacks a field of `kinds` is refused by number."""
    return rows_of(open_content(source, env), source.name, kinds)


def rows_of(content: Content, name: str, kinds: Kinds = ANY) -> Rows:
    try:
        rows = _parse(content)
    except ValueError as error:
        raise TaskError(f"{name}: {content.origin} is cut short or damaged ({error}): fetch it again") from error
    if not rows:
        raise TaskError(f"{name}: {content.origin} holds no rows: fetch it again")
    for number, row in enumerate(rows, 1):
        if wrong := _wrong(row, kinds):
            raise TaskError(f"{name}: row {number} of {content.origin} {wrong}: correct the file, or fetch it again")
    return Rows(rows, content.origin, content.sha256)


def too_few(place: str, what: str, count: int, samples: int) -> TaskError:
    """The error for a file that holds fewer rows than asked for."""
    remedy = f"set task.samples={count}" if count else "fetch or write it again"
    return TaskError(f"{place} holds {count} {what} and task.samples={samples} asks for more: {remedy}")


def open_content(source: Source, env: TaskEnv) -> Content:
    """Bytes of the first place that has the file: the data root, the hub's cache, the hub."""
    path, origin = _locate(source, env.data_root)
    if path.suffix == ".zip":
        data = _read_member(source, path)
        origin = f"{origin}/{source.member}"
    else:
        data = path.read_bytes()
    return Content(data, origin, hashlib.sha256(data).hexdigest())


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


KINDS: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "a list of texts": _is_texts,
    "a whole number": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "an object": lambda value: isinstance(value, dict),
}


def _wrong(row: Row, kinds: Kinds) -> str | None:
    for field, kind in kinds.items():
        if row.get(field) is None:
            return f"lacks {field!r}"
        if not KINDS[kind](row[field]):
            return f"has {str(row[field])[:40]!r} as {field!r}, which should be {kind}"
    return None


def _parse(content: Content) -> list[Row]:
    suffix = Path(content.origin).suffix
    if suffix == ".parquet":
        import pyarrow.parquet

        return list(pyarrow.parquet.read_table(io.BytesIO(content.data)).to_pylist())  # ArrowInvalid is a ValueError
    if suffix == ".json":
        rows = json.loads(content.data)
    else:  # cut at \n only: other line ends may stand inside a string
        rows = [_line(number, line) for number, line in enumerate(content.data.split(b"\n"), 1) if line.strip()]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("not a list of objects")
    return rows


def _line(number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON") from error


def _locate(source: Source, root: Path | None) -> tuple[Path, str]:
    return _find(source, root) or _from_hub(source, root)


def _find(source: Source, root: Path | None) -> tuple[Path, str] | None:
    if root is None:
        return None
    if not root.is_dir():
        raise TaskError(f"the data root {root} is not a folder: name an existing one, or none to use the hub alone")
    found = (path for pattern in source.local for path in sorted(root.glob(pattern)) if path.is_file())
    path = next(found, None)
    return None if path is None else (path, f"local:{path.relative_to(root).as_posix()}")


def _from_hub(source: Source, root: Path | None) -> tuple[Path, str]:
    sought = f"below the data root {root or NO_DATA_ROOT} (as {' or '.join(source.local)})"
    if source.hub_repo is None:
        raise TaskError(f"{source.name} is not on the hub and was not found {sought}: put the file there")
    place = (source.hub_repo, source.hub_file, source.hub_revision)
    try:
        path, commit = hub.fetch(*place)
    except hub.HubError as error:
        raise TaskError(
            f"{source.name} was not found {sought} nor in the hub's cache, and {error}: "
            f"put the file there, or run `{_command(source)}` where the hub can be reached"
        ) from error
    return path, f"hub:{source.hub_repo}@{commit}:{source.hub_file}"


def _read_member(source: Source, path: Path) -> bytes:
    if source.member is None:
        raise TaskError(f"{source.name}: {path} is a zip file: unpack it")
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(source.member)
    except KeyError as error:
        raise TaskError(f"{source.name}: {path} holds no file {source.member}: fetch it again") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise TaskError(f"{source.name}: {path} is cut short or damaged ({error}): fetch it again") from error
