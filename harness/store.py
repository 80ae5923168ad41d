"""The folder of one run: what ran, one line per example, and how to go on after a crash.

`config.yaml` (resolved), `run.json` (status, times, provenance), `examples.jsonl` (the results themselves),
`rescored.jsonl` (later scores of the same outputs) and `summary.json` (derived, made again at will).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from harness import files
from harness.lock import FolderInUse, FolderLock, is_locked
from harness.provenance import now
from harness.records import Record, StoreError

__all__ = ["FolderInUse", "Run", "StoreError", "StoredRun", "find", "load", "read_records"]

ENDS = ("complete", "failed", "interrupted")
RESCORED = "rescored.jsonl"  # id, score, details: what later scorers made of the outputs in examples.jsonl


class Run:
    """A run folder open for writing, by this process alone. `info` is what stands in run.json."""

    def __init__(self, folder: Path, lock: FolderLock, digest: str) -> None:
        path = folder / "run.json"
        self.folder, self._lock = folder, lock
        self._before = files.read_json(path) if path.exists() else {}
        if self._before.get("identity_sha256", digest) != digest:
            raise StoreError(f"{folder} holds another run whose hash begins alike: move that folder away")
        files.drop_half_line(folder / "examples.jsonl")
        self._ids = {record.id for record in read_records(folder)}
        self._added = 0
        self.info = _continued(self._before) | {"identity_sha256": digest, "status": "running", "started": now()}
        self._file = open(folder / "examples.jsonl", "ab", buffering=0)  # noqa: SIM115 (open for the life of the run)

    @classmethod
    def open(cls, root: Path, config: Mapping[str, Any], identity: Mapping[str, Any], task: str, method: str) -> Run:
        """The same identity finds the same folder and goes on there; another identity gets another folder."""
        folder = cls.place(root, identity, task, method)
        with files.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(folder)
            try:
                run = cls(folder, lock, _digest(identity))
                if not (folder / "config.yaml").exists():
                    files.write_yaml(folder / "config.yaml", config)
                run.note(task=task, method=method, identity=identity)
            except BaseException:
                lock.release()
                raise
        return run

    @staticmethod
    def place(root: Path, identity: Mapping[str, Any], task: str, method: str) -> Path:
        """Where a run lives, whether it is there yet or not."""
        return root / f"{_plain(task)}-{_plain(method)}-{_digest(identity)[:8]}"

    def contains(self, example_id: str) -> bool:
        return example_id in self._ids

    def append(self, record: Record) -> None:
        """On disk when this returns: a crash later costs nothing of it."""
        if record.id in self._ids:
            raise StoreError(f"example {record.id!r} is already in {self.folder}: the ids of a task must differ")
        line = record.to_json().encode() + b"\n"
        with files.writing(self.folder):
            end = os.fstat(self._file.fileno()).st_size
            try:
                while line:
                    line = line[self._file.write(line) :]
                os.fsync(self._file.fileno())
            except OSError:  # a full disk: what comes next must not grow onto half a line
                self._file.truncate(end)
                raise
        self._ids.add(record.id)
        self._added += 1

    def records(self) -> list[Record]:
        return read_records(self.folder)

    def note(self, **facts: Any) -> None:
        """Adds facts to run.json: provenance, task_info, num_expected, simulated, host_is_cpu."""
        self.info |= facts
        with files.writing(self.folder):
            files.write_json(self.folder / "run.json", self.info)

    def close(self, status: str, error: str | None = None) -> None:
        """A session that found nothing left to do leaves no trace: times and machine stay those of the real one."""
        assert status in ENDS
        if status == self._before.get("status") == "complete" and not self._added:
            self.info = self._before
        else:
            self.info |= {"status": status, "ended": now(), "error": error}
        try:
            self.note()
        finally:
            self._file.close()
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: object) -> None:
        """Who leaves without `close` did not finish."""
        if not self._file.closed:
            broken = raised is not None and not isinstance(raised, KeyboardInterrupt)
            self.close("failed" if broken else "interrupted", f"{type(raised).__name__}: {raised}" if broken else None)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run folder as reports read it."""

    folder: Path
    config: dict[str, Any]
    info: dict[str, Any]
    records: list[Record]
    status: str  # as run.json says, but `running` only while the writer lives


def find(paths: Iterable[Path]) -> list[Path]:
    """All run folders at or below `paths`, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise StoreError(f"no such folder: {path}")
        below = sorted(file.parent for file in path.rglob("run.json"))
        if not below:
            raise StoreError(f"no runs in {path}: the folder of a run holds run.json")
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def load(folder: Path) -> StoredRun:
    """Read-only: the half-written last line of a run that goes on is left out and left alone."""
    if not folder.is_dir():
        raise StoreError(f"no such folder: {folder}")
    if not (folder / "run.json").is_file():
        raise StoreError(f"{folder} is not the folder of a run: it holds no run.json")
    info, config = files.read_json(folder / "run.json"), files.read_yaml(folder / "config.yaml")
    status = str(info.get("status"))
    if status == "running" and not is_locked(folder):
        status = "interrupted"
    return StoredRun(folder, config, info, rescored(read_records(folder), folder), status)


def read_records(folder: Path) -> list[Record]:
    """In the order they were written; a damaged or doubled line is an error that names it."""
    path = folder / "examples.jsonl"
    try:
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    except OSError as error:
        raise StoreError(f"cannot read {path}: {files.reason(error)}") from error
    found: dict[str, Record] = {}
    for number, line in enumerate(lines, 1):
        record = Record.from_json(line, f"{path}, line {number}")
        if record.id in found:
            raise StoreError(f"{path}, line {number}: example {record.id!r} a second time; delete one of the two lines")
        found[record.id] = record
    return list(found.values())


def rescored(records: Sequence[Record], folder: Path) -> list[Record]:
    """With the scores of the last `python -m harness.rescore`, where there was one."""
    path = folder / RESCORED
    if not path.exists():
        return list(records)
    scores = {line["id"]: line for line in files.read_lines(path)}
    return [
        replace(record, score=scores[record.id]["score"], details=scores[record.id]["details"])
        if record.id in scores
        else record
        for record in records
    ]


def _continued(before: Mapping[str, Any]) -> dict[str, Any]:
    """run.json for the next session: what held for the last one alone moves into `earlier`."""
    if not before:
        return {}
    own = ("status", "started", "ended", "error", "provenance")
    session = {key: before.get(key) for key in own}
    if session["status"] == "running":
        session["status"] = "interrupted"
    return {key: before[key] for key in before if key not in own} | {"earlier": [*before.get("earlier", []), session]}


def _digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(files.canonical(identity).encode()).hexdigest()


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+]+", "_", name)
