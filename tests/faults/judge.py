"""What is wrong with a working folder behind a fault, beside one of the same command that nothing happened to."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from harness.history import index
from harness.models.converted import NOTE
from harness.results.files import read_json
from harness.results.folder.names import DAMAGED, SUMMARY
from harness.results.records import StoreError
from harness.results.run_folder import StoredRun, load
from harness.results.summary_file import summary_damage
from tests.faults.harm import SIGNALS
from tests.faults.targets import KERNELS, Said

TRACEBACK = re.compile(r"Traceback \(most recent call last\)|The traceback is in|Exception ignored|^Exception in", re.M)
STAMPED = "stored histories were lost"  # below a table
TIME = re.compile(rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?[+:\d]*")
Answers = dict[str, tuple[Any, ...]]


def of_output(*said: Said) -> Iterator[str]:
    """What no command may say."""
    for name, (_, text) in zip(("the command", "the next start"), said, strict=False):
        if found := TRACEBACK.search(text):
            yield f"{name} says {text[found.start() :][:300]!r}"


def of_end(kind: str, code: int | None) -> Iterator[str]:
    """`code`: of the command that something happened to."""
    allowed = {"signal": [128 + number for number in SIGNALS], "kill": [-9]}.get(kind, [0, 1, 2])
    if code not in allowed:
        yield f"the command ended with {code}" if code is not None else "the command did not end"


def of_reading(sound: Path, work: Path) -> Iterator[str]:
    """Of what a reader takes from the folder as it is: each run is refused, or as it was."""
    known = runs(sound)
    for folder in _folders(work):
        try:
            stored = load(folder)
        except StoreError:
            continue
        expected = known.get(folder.name)
        if expected is None:
            yield f"{folder.name} is a run of another identity"
            continue
        if stored.config != expected.config:
            yield f"{folder.name} has other settings"
        yield from _answers(expected, stored)


def of_ending(sound: Path, work: Path, again: Said) -> Iterator[str]:
    """What the next start should have brought in order."""
    if again.code != 0:
        yield f"the next start ended with {again.code}: {again.text[-600:]}"
        return
    for name in {folder.name for folder in _folders(work)} - runs(sound).keys():
        yield f"{name} is no run of this command"
    for name, expected in runs(sound).items():
        try:
            stored = load(folder := work / "runs" / name)
        except StoreError as error:
            yield str(error)
            continue
        if stored.status != "complete" or len(stored.records) != len(expected.records):
            yield f"{folder.name} is {stored.status} with {len(stored.records)} examples"
        yield from _summary(folder, stored)
        if any(record.lost_turns for record in stored.records) and STAMPED not in again.text:
            yield f"{folder.name} has lost turns, and its row no stamp"


def of_files(sound: Path, work: Path, harmed: bool) -> Iterator[str]:
    """Leftovers, and copies that are not what was written. `harmed`: whether a damaged file may have been set aside."""
    expected, there = _files(sound), _files(work)
    for name in sorted(there.keys() - expected.keys()):
        if not (harmed and name.endswith(DAMAGED)):
            yield f"{name} is left"
    for name in sorted(expected.keys() - there.keys()):
        yield f"{name} is missing"
    for name in filter(_is_copy, sorted(expected.keys() & there.keys())):
        if _content(sound / name) != _content(work / name):
            yield f"{name} is not what it was"
    yield from _orphans(work)


def _is_copy(name: str) -> bool:
    """Whether a file is the same whenever it is made, but for dates in its text."""
    dated = name.endswith((".pdf", ".lock", NOTE))
    return (name.startswith(("cache/", "out/")) or "/plots/" in name) and not dated


def runs(work: Path) -> dict[str, StoredRun]:
    """By the names of their folders, which their identities are in."""
    return {folder.name: load(folder) for folder in _folders(work)}


def _folders(work: Path) -> list[Path]:
    return sorted(path for path in (work / "runs").glob("*") if path.is_dir() and path.name != "plots")


def _answers(expected: StoredRun, stored: StoredRun) -> Iterator[str]:
    """Other answers, and other scores, that no stamp warns of."""
    known = {record.id: (*record.answer, record.score) for record in expected.records}
    for record in stored.records:
        if (*record.answer, record.score) != known.get(record.id) and not record.lost_turns:
            yield f"{stored.folder.name}: {record.id} has another answer or score, and no stamp"


def _summary(folder: Path, stored: StoredRun) -> Iterator[str]:
    if damage := summary_damage(folder):
        yield damage
    elif read_json(folder / SUMMARY)["records"] != stored.digest:
        yield f"{folder.name}: {SUMMARY} is of other records"


def _files(work: Path) -> dict[str, Path]:
    """All but kernels, and of stores the blocks, whose names are drawn, and the index with its log: a store that met a
    full disk, or lost its index, is in order when it is opened again, which a run that is complete does not do."""
    kept = re.compile(rf"cache/{KERNELS}|store/.*(\.safetensors|{index.NAME}(-wal)?)$")
    found = {path.relative_to(work).as_posix(): path for path in work.rglob("*") if path.is_file()}
    return {name: path for name, path in found.items() if not kept.match(name)}


def _orphans(work: Path) -> Iterator[str]:
    """Blocks that no index names. A damaged index, and one that names a block that is gone, may lie there until the
    store is opened again, which a run that is complete does not do."""
    for database in work.glob(f"store/**/{index.NAME}"):
        with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{database}?immutable=1", uri=True)) as connection:
            named = {name for (name,) in connection.execute("select name from blocks")}
            there = {path.stem for path in (database.parent / "blocks").rglob("*.safetensors")}
            if more := there - named:
                yield f"{len(more)} blocks are left beside {database.relative_to(work)}"


def _content(path: Path) -> bytes:
    return TIME.sub(b"", path.read_bytes())
