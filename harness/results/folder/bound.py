"""What the files of a run's folder are bound to, and whether that is what they hold.

The identity is the root: its hash names the folder and stands in every line of examples.jsonl, rescored.jsonl and
beside a checksum over the line. run.json has a checksum over itself. It holds the configuration, and of
each file of lines the digest of what stood there when run.json was last written; lines that were added since
have their own checksums. Nobody reads summary.json back (results/summary_file.py).

Checksums guard against mistakes and broken disks. They are no signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.results import files
from harness.results.files import CHECKSUM, RunLine
from harness.results.folder.names import CONFIG, EXAMPLES, INFO, RESCORED
from harness.results.records import RecordError, StoreError

Info = Mapping[str, Any]
FILES, SETTINGS = "files", "config"  # keys of run.json: the digests of files of lines, and what config.yaml copies
AGAIN = "run the same command again, which makes it anew, or restore it from a copy"
SCORE_AGAIN = "run python -m harness.rescore on its folder again"


class Digest:
    """Of lines in their order: how many, and a hash over their checksums."""

    def __init__(self, lines: Iterable[RunLine] = ()) -> None:
        self.lines, self._hash = 0, hashlib.sha256()
        for line in lines:
            self.add(line.checksum)

    def add(self, checksum: str) -> None:
        self.lines += 1
        self._hash.update(checksum.encode())

    def plain(self) -> dict[str, Any]:
        return {"lines": self.lines, "sha256": self._hash.hexdigest()}


def read_info(folder: Path) -> dict[str, Any]:
    """run.json without its checksum; raises `StoreError` where it is not as it was written."""
    path = folder / INFO
    if not path.is_file():
        if files.whole_lines(folder / EXAMPLES):
            raise StoreError(f"{path} is gone; {AGAIN}")
        if (folder / CONFIG).is_file():
            raise StoreError(f"{folder} holds neither {INFO} nor an example: run the same command again, or delete it")
        raise StoreError(f"{folder} is not the folder of a run: it holds no {INFO}")
    with _advising(AGAIN):
        info = files.read_json(path)
        if info.pop(CHECKSUM, None) != files.checksum_of(info) or not {FILES, SETTINGS} <= info.keys():
            raise StoreError(f"{path} was changed after it was written")
    return info


def write_info(folder: Path, info: Info) -> None:
    with files.writing(folder):
        files.write_json(folder / INFO, files.with_checksum(info))


def each_line(folder: Path, name: str, info: Info) -> Iterator[tuple[bytes, RunLine | RecordError]]:
    """The lines of a file as they stand there, and what each is; what is wrong with one that is not as it was written,
    is of another run, or about an example that has been. `info`: run.json, which says whose lines these have to be."""
    path, known = folder / name, set[str]()
    for number, text in enumerate(files.whole_lines(path), 1):
        where = f"{path}, line {number}"
        try:
            line: RunLine | RecordError = _line(text, str(info.get("identity_sha256")), where, known)
        except RecordError as error:
            line = error
        yield text, line


def _line(text: bytes, run: str, where: str, known: set[str]) -> RunLine:
    line = files.read_line(text, run, where)
    if (example := str(line.plain.get("id"))) in known:
        raise RecordError(f"{where}: example {example!r} a second time")
    known.add(example)
    return line


def read_lines(folder: Path, name: str, info: Info) -> list[RunLine]:
    """The lines of a file; raises `RecordError` for one that is not as it was written, and where some are gone."""
    path, lines = folder / name, list[RunLine]()
    noted = info[FILES].get(name)
    with _advising(_advice(name)):
        for _, line in each_line(folder, name, info):
            if isinstance(line, RecordError):
                raise line
            lines.append(line)
        if noted and len(lines) < noted["lines"]:
            raise RecordError(f"{path} holds {len(lines)} of the {noted['lines']} lines that it had")
        if noted and Digest(lines[: noted["lines"]]).plain() != noted:
            raise RecordError(f"{path} does not begin with the {noted['lines']} lines that it had")
    return lines


def read_rescored(folder: Path, info: Info) -> list[RunLine]:
    """The lines of rescored.jsonl, for the records that they were made for; none where there was no rescoring."""
    section, path = info.get("rescored"), folder / RESCORED
    lines = read_lines(folder, RESCORED, info)
    if section is None and lines:
        raise StoreError(f"{path} holds scores that {INFO} knows nothing of; {SCORE_AGAIN}, or delete it")
    if section is not None and section["records"] != records_digest(info):
        raise StoreError(f"{path} holds scores of other records than {EXAMPLES} does; {SCORE_AGAIN}")
    return lines


def records_digest(info: Info) -> str:
    """Return the digest of examples.jsonl as it was when run.json was last written."""
    return str(info[FILES][EXAMPLES]["sha256"])


def bind(folder: Path, info: Info, *names: str) -> dict[str, Any]:
    """Return `info` with the digests of these files as they are now, without those that are not there."""
    digests = {name: digest for name, digest in info.get(FILES, {}).items() if name not in names}
    for name in names:
        if (folder / name).exists():
            digests[name] = Digest(read_lines(folder, name, {**info, FILES: {}})).plain()
    return {**info, FILES: digests}


def damage(folder: Path, info: Info) -> str | None:
    """What is wrong with a folder, as far as it shows without reading its lines; None for nothing."""
    for name, noted in info[FILES].items():
        if (count := count_lines(folder / name)) < noted["lines"]:
            return f"{folder / name} holds {count} of the {noted['lines']} lines that it had; {_advice(name)}"
    return None


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _advice(name: str) -> str:
    return SCORE_AGAIN if name == RESCORED else AGAIN


@contextmanager
def _advising(advice: str) -> Iterator[None]:
    """Adds to an error what to do about it."""
    try:
        yield
    except StoreError as error:
        raise type(error)(f"{error}; {advice}") from error
