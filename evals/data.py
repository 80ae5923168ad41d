"""Finds the data of evaluations: first in a folder of files, then as plain files of a data set on
the hub.

There are no loading scripts. A file is read whole or not at all: every line must parse, and a zip
member must match its checksum.
The fields that a reader uses must have the types that it names (`misfit`), because a number where
text is expected would become a prompt."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

from evals import hub
from evals.base import MissingData, TaskEnv, TaskError

Row = dict[str, Any]
Shape = Any  # says what a JSON value should be, as `misfit` explains
ANY: Shape = {}  # an object with any fields
NAMED_FILES = 3  # how many missing files an error names
CORRECT = "correct the file, or drop the row"
# what `datasets` says of files without rows: of JSON without bytes, of any other, of parquet
NO_ROWS = ("StopIteration", "corresponds to no data", "BatchSize must be greater than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Describe one data file and where to find it: by glob patterns below the data root (`local`),
    or else as a file of a data set on the Hugging Face hub."""

    name: str  # what messages and records call it: "longbench/qasper"
    local: tuple[str, ...]  # glob patterns below the data root; the first match is taken
    hub_repo: str | None = None  # None: it is not on the hub
    hub_file: str = ""
    hub_revision: str = "main"
    member: str | None = None  # the file wanted from a zip

    @property
    def folder(self) -> str:
        """Return the folder below the data root into which the hub's file can be downloaded so that
        a pattern of `local` finds it; "" for the data root itself."""
        for pattern in self.local:
            folder, *parts = f"/{pattern}".rsplit("/", self.hub_file.count("/") + 1)
            if fnmatch(self.hub_file, "/".join(parts)):
                return folder[1:]
        return ""


class Content(NamedTuple):
    """Hold the bytes of one file, or of one inside a zip, with where they came from and their
    SHA-256."""

    data: bytes
    origin: str  # "local:longbench/qasper.jsonl" or "hub:REPO@COMMIT:FILE"
    sha256: str

    @property
    def provenance(self) -> dict[str, Any]:
        return {"origin": self.origin, "sha256": self.sha256}


class Rows(NamedTuple):
    """Hold all rows of one data file, and where they came from."""

    rows: list[Row]
    origin: str
    sha256: str

    @property
    def provenance(self) -> dict[str, Any]:
        return {"origin": self.origin, "sha256": self.sha256, "rows": len(self.rows)}


def require(sources: Iterable[Source], root: Path | None) -> None:
    """Raise one `TaskError` that names every source found neither below `root` nor on the hub. Once
    the hub has failed, only its local cache is searched for the rest."""
    absent = [source for source in sources if _find(source, root) is None]
    for place, source in enumerate(absent):
        try:
            _from_hub(source)
        except hub.HubError as error:
            missing = [source]
            for other in absent[place + 1 :]:
                repo = other.hub_repo
                if not (repo and hub.cached(repo, other.hub_file, other.hub_revision)):
                    missing.append(other)
            raise _missing(missing, root, str(error)) from error


def _missing(sources: Sequence[Source], root: Path | None, reason: str) -> TaskError:
    """Return the error for data files found neither locally nor on the hub: which they are, why
    (`reason`), and what command or folder brings them. Only the first files are named where there
    are many."""
    if root and all(_find(source, root.resolve().parent) for source in sources):
        where = f"is not below the data root {root} but beside it"
        return TaskError(f"{sources[0].name} {where}: name {root.resolve().parent} instead.")
    named = [source.name for source in sources[:NAMED_FILES]]
    more = [f"{len(sources) - NAMED_FILES} more"] * (len(sources) > NAMED_FILES)
    of_hub: dict[tuple[str, str, str], list[str]] = {}
    for source in sources:
        if source.hub_repo:
            of_hub.setdefault((source.hub_repo, source.hub_revision, source.folder), []).append(
                source.hub_file
            )
    commands = [
        hub.command(repo, list(dict.fromkeys(files)), revision, folder)
        for (repo, revision, folder), files in of_hub.items()
    ]
    remedies = [f"run `{' && '.join(commands)}` where the hub can be reached"] if commands else []
    if own := [source for source in sources if not source.hub_repo]:
        files = (
            "the file at"
            if len(own) == 1
            else "their files (docs/tasks.md says where they come from) at"
        )
        remedies.append(f"put {files} DATA/{own[0].local[0]}{' and so on' if len(own) > 1 else ''}")
    where = f"below the data root {root}" if root else "on this machine"
    return MissingData(
        f"{', '.join([*named, *more])} cannot be found {where}, and {reason}: {', and '.join(remedies)}"
    )


def open_rows(source: Source, env: TaskEnv, shape: Shape = ANY) -> Rows:
    """Read the rows of a .jsonl, .json (one list) or .parquet file. Raises `TaskError` for a row
    that does not fit `shape` (`misfit` explains shapes)."""
    return rows_of(open_content(source, env), source.name, shape)


def rows_of(
    content: Content, name: str, shape: Shape = ANY, remedy: str = "fetch it again"
) -> Rows:
    """Parse the rows of a file that was read, and check each against `shape` (`misfit` explains
    shapes). `name`: what errors call the file; `remedy`: what they advise if it is damaged."""
    with _damage(f"{name}: {content.origin}", remedy):
        rows = _parse(content)
    check(rows, [], f"{name}: {content.origin}")
    if not rows:
        raise TaskError(f"{name}: {content.origin} holds no rows: {remedy}")
    for number, row in enumerate(rows, 1):
        check(row, shape, f"{name}: row {number} of {content.origin}")
    return Rows(rows, content.origin, content.sha256)


def value_of(data: bytes | str, shape: Shape, place: str) -> Any:
    """Parse the one JSON value in `data`, a file or a line of one, and check it against `shape`
    (`misfit` explains shapes). `place`: what errors call it."""
    with _damage(place):
        value = json.loads(data)
    check(value, shape, place)
    return value


def text_of(data: bytes, place: str) -> str:
    """Decode the UTF-8 bytes of a file. `place`: what errors call it."""
    with _damage(place):
        return data.decode()


def check(value: Any, shape: Shape, place: str) -> None:
    """Raise `TaskError` if a value read from a file does not fit `shape` (`misfit` explains
    shapes). `place` names the file and the spot in it."""
    if wrong := misfit(value, shape):
        raise TaskError(f"{place} {wrong}: correct the file, or fetch it again")


def no_answer(place: str, fields: Iterable[str] = ()) -> TaskError:
    """Return the error for a row that holds no right answer. `place` names the row and its file, and
    `fields` where the answer should stand."""
    where = " in " * bool(fields) + ", ".join(map(repr, fields))
    return TaskError(
        f"{place} has no right answer{where}, so every output would score 0: {CORRECT}"
    )


def too_few(place: str, what: str, count: int, samples: int) -> TaskError:
    """Return the error for a file, named by `place`, that holds only `count` rows where
    task.samples asks for `samples`. `what`: the word for its rows, such as "records"."""
    remedy = f"set task.samples={count}" if count else "fetch or write it again"
    return TaskError(
        f"{place} holds {count} {what} and task.samples={samples} asks for more: {remedy}"
    )


def open_content(source: Source, env: TaskEnv) -> Content:
    """Read the file of `source` from the first of these that has it: the data root, the hub's local
    cache, the hub."""
    try:
        path, origin = _find(source, env.data_root) or _from_hub(source)
    except hub.HubError as error:
        raise _missing([source], env.data_root, str(error)) from error
    if path.suffix == ".zip":
        data = _read_member(source, path)
        origin = f"{origin}/{source.member}"
    else:
        data = path.read_bytes()
    return Content(data, origin, hashlib.sha256(data).hexdigest())


@contextmanager
def _damage(place: str, remedy: str = "fetch it again") -> Iterator[None]:
    """Turn an error of parsing inside the block into a `TaskError` that names the damaged file,
    `place`, and the `remedy`."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{place} is not UTF-8 ({error}): save it as UTF-8, or fetch it again"
        ) from error
    except (ValueError, RecursionError, BadZipFile, zlib.error, EOFError) as error:
        raise TaskError(f"{place} is cut short or damaged ({error}): {remedy}") from error


def _parse(content: Content) -> Any:
    suffix = Path(content.origin).suffix
    if suffix == ".parquet":
        import pyarrow.parquet

        # ArrowInvalid is a ValueError
        return list(pyarrow.parquet.read_table(io.BytesIO(content.data)).to_pylist())
    if suffix == ".json":
        return json.loads(content.data)
    if suffix == ".csv":
        return _parse_csv(content.data.decode("utf-8-sig"))  # Excel begins with a mark
    rows, faults = [], list[str]()
    # at newlines only, since other line ends may stand inside a string
    for number, line in enumerate(content.data.split(b"\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except UnicodeDecodeError:
            raise
        except (ValueError, RecursionError):
            faults.append(f"line {number}")
    if faults:
        more = f" and {len(faults) - NAMED_FILES} more" * (len(faults) > NAMED_FILES)
        raise ValueError(f"{', '.join(faults[:NAMED_FILES])}{more}: no JSON")
    return rows


def _parse_csv(text: str) -> list[Row]:
    """Return the rows of a CSV file, whose first line names the columns; all values are texts. Raises
    `ValueError` for one that has other cells than its head."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows = list[Row]()
    usual = csv.field_size_limit(sys.maxsize)  # 128 KiB, less than a long context has
    try:
        rows.extend(reader)
    except csv.Error as error:
        raise ValueError(f"row {len(rows) + 1}: {error}") from error
    finally:
        csv.field_size_limit(usual)
    names = reader.fieldnames or []
    if len({*names}) < len(names):
        raise ValueError("two columns of the first line have the same name")
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():
            raise ValueError(f"row {number} has not as many cells as the first line")
    return rows


def _find(source: Source, root: Path | None) -> tuple[Path, str] | None:
    if root is None:
        return None
    if not root.is_dir():
        raise TaskError(
            f"the data root {root} is not a folder: name an existing one, or none to use the hub alone"
        )
    for path in (path for pattern in source.local for path in sorted(root.glob(pattern))):
        if path.is_file():
            return path, f"local:{path.relative_to(root).as_posix()}"
    return None


def _from_hub(source: Source) -> tuple[Path, str]:
    """Return the file in the hub's cache, fetched if necessary, and its origin. Raises `HubError`
    if it cannot be fetched."""
    if source.hub_repo is None:
        raise hub.HubError("the hub has no such file")
    path, commit = hub.fetch(source.hub_repo, source.hub_file, source.hub_revision)
    return path, f"hub:{source.hub_repo}@{commit}:{source.hub_file}"


def _read_member(source: Source, path: Path) -> bytes:
    if source.member is None:
        raise TaskError(f"{source.name}: {path} is a zip file: unpack it")
    with _damage(f"{source.name}: {path}"), ZipFile(path) as archive:
        if source.member in archive.namelist():
            return archive.read(source.member)
    raise TaskError(f"{source.name}: {path} holds no file {source.member}: fetch it again")


@contextmanager
def data_errors_in_a_sentence() -> Iterator[None]:
    """Turn the error that `datasets` raises for a file it cannot read, or that is empty, into a
    `TaskError` that names file and row, and that of a template for which all rows lack a field."""
    try:
        yield
    except Exception as error:
        if type(error).__module__ == "jinja2.exceptions":
            raise TaskError(
                f"A template does not fit the data ({error}): correct the yaml file or its data"
            ) from error
        files = _files_that_were_read(error)
        foreseen = type(error).__module__ == "datasets.exceptions"
        if not foreseen and (not files or isinstance(error, (OSError, ImportError))):
            raise
        cause: BaseException = error
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        reason = " ".join(str(cause).split()).rstrip(".") or type(cause).__name__
        # which counts from 0
        reason = re.sub(r"\bin row (\d+)", lambda row: f"in row {int(row[1]) + 1}", reason)
        blank = list(filter(_is_blank, files))
        file = "One of " * (len(blank or files) > 1) + ", ".join(blank or files) or "A data set"
        if blank or any(words in reason for words in NO_ROWS):
            raise TaskError(f"{file} is empty: write rows into it, or name another file") from error
        raise TaskError(f"{file} cannot be read ({reason}): correct the file") from error


def _is_blank(file: str) -> bool:
    if not Path(file).is_file():
        return False
    with open(file, "rb") as stream:
        return stream.read(64).strip() in (b"", b"[]")


def _files_that_were_read(error: BaseException | None) -> list[str]:
    """Return the file at which a reader of `datasets` has stopped, which each of these readers
    calls `file`. If none is found, return all local files that it was asked for."""
    asked = list[str]()
    while error is not None:
        for frame, _ in walk_tb(error.__traceback__):
            if "packaged_modules" in frame.f_code.co_filename and "file" in frame.f_locals:
                return [str(frame.f_locals["file"])]
            if frame.f_code.co_name == "load_dataset":
                asked = _names_of(frame.f_locals.get("data_files"))
        error = error.__cause__
    return asked


def _names_of(data_files: Any) -> list[str]:
    """Return the files in the `data_files` of `datasets`: a name, a list of names, or either for each
    split."""
    parts = data_files.values() if isinstance(data_files, Mapping) else [data_files or ()]
    return [str(one) for part in parts for one in ([part] if isinstance(part, str) else part)]


# half of a surrogate pair, which JSON can spell and no tokenizer takes
_HALF = re.compile("[\ud800-\udfff]")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and (value.isascii() or not _HALF.search(value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


KINDS: Mapping[str, Callable[[Any], bool]] = {
    "text": _is_text,
    "text that is not blank": lambda value: _is_text(value) and bool(value.strip()),
    "a list of texts": lambda value: misfit(value, ["text", ...]) is None,
    "a list of texts, not all blank": lambda value: (
        misfit(value, ["text", ...]) is None and any(map(str.strip, value))
    ),
    "a number": _is_number,
    "a number above 0": lambda value: _is_number(value) and value > 0,
    "a list of numbers": lambda value: misfit(value, ["a number", ...]) is None,
    "a whole number": lambda value: type(value) is int,
    "a whole number above 0": lambda value: type(value) is int and value > 0,
    "true": lambda value: value is True,
    "false": lambda value: value is False,
    "an object": lambda value: isinstance(value, dict),
}
_ABSENT = object()


def misfit(value: Any, shape: Shape, field: str = "") -> str | None:
    """Return what is wrong with a JSON value, in words that follow the name of its place, or return
    None if it fits `shape`.

    A shape is one of KINDS, or several ("text or a whole number"), or looks like the value.
    `{name: shape}` is an object; a name that ends in "?" may be missing or null, and `str` stands for every
    name. `[shape]` is a list, `[shape, ...]` a list that is not empty, `[]` a list of anything, and
    `(shape, shape)` a list of exactly that length. Fields that a shape does not name may hold
    anything.

    >>> misfit({"turns": ["Hi", 5]}, {"turns": ["text", ...], "id?": "text or a whole number"})
    "has 5 as 'turns[1]', which should be text"
    >>> misfit({}, {"turns": ["text", ...]})
    "lacks 'turns'"
    """
    if value is _ABSENT:
        return f"lacks {field!r}"
    kind, fits = _kind(value, shape)
    if not fits:
        held = json.dumps(value, default=str)[:40]
        return (
            f"has {held} as {field!r}, which should be {kind}"
            if field
            else f"is {held}, which should be {kind}"
        )
    parts = () if isinstance(shape, str) else _parts(value, shape, field)
    return next(filter(None, (misfit(*part) for part in parts)), None)


def _kind(value: Any, shape: Shape) -> tuple[str, bool]:
    """Return what the value itself should be, in words and without its parts, and whether the value
    is that."""
    if isinstance(shape, str):
        return shape, any(KINDS[kind](value) for kind in shape.split(" or "))
    if isinstance(shape, dict):
        return "an object", isinstance(value, dict)
    if isinstance(shape, tuple):
        return f"a list of {len(shape)}", isinstance(value, list) and len(value) == len(shape)
    least = len(shape) > 1
    return "a list that is not empty" if least else "a list", isinstance(value, list) and len(
        value
    ) >= least


def _parts(value: Any, shape: Shape, field: str) -> Iterator[tuple[Any, Shape, str]]:
    """Yield each field or element of a value, with the shape that it should have and its name in
    errors, such as "turns[1]"."""
    if isinstance(shape, dict):
        prefix = f"{field}." if field else ""
        for name, inner in shape.items():
            if name is str:
                yield from ((part, inner, f"{prefix}{key}") for key, part in value.items())
            elif not name.endswith("?"):
                yield value.get(name, _ABSENT), inner, f"{prefix}{name}"
            elif value.get(name[:-1]) is not None:
                yield value[name[:-1]], inner, f"{prefix}{name[:-1]}"
    elif shape:
        shapes = shape if isinstance(shape, tuple) else [shape[0]] * len(value)
        yield from (
            (*pair, f"{field}[{i}]") for i, pair in enumerate(zip(value, shapes, strict=True))
        )
