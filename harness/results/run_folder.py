"""The folder of one run: what ran, one line per example, and how to go on after a crash.

`config.yaml` (resolved), `run.json` (status, times, provenance), `examples.jsonl` (the results themselves),
`rescored.jsonl` (later scores of the same outputs), `summary.json` (derived, a copy for other programs) and, where a
session failed, `error.txt` (its traceback). What binds them to each other: results/folder/bound.py.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from harness.results import files
from harness.results.files import CHECKSUM, RunLine, seal
from harness.results.folder import bound
from harness.results.folder.bound import FILES, SETTINGS, Digest
from harness.results.folder.find import find, instead
from harness.results.folder.names import CONFIG, ERROR, EXAMPLES, RESCORED
from harness.results.folder.repair import repaired
from harness.results.lock import FolderInUse, FolderLock, is_locked
from harness.results.provenance import load_average, now, when
from harness.results.records import Record, StoreError
from harness.terminal.stopping import whole
from kernels.temporary import remove_abandoned

__all__ = ["FolderInUse", "Run", "StoreError", "StoredRun", "find", "load", "load_all", "read_records"]

ENDS = ("complete", "failed", "interrupted")


class Run:
    """A run folder open for writing, by this process alone. `info` is what stands in run.json.

    A session begins with the first record that it adds, and run.json with provenance and backends is written before
    that record: whatever the moment of a kill, a folder says where its records come from. A damaged folder is made
    whole first: what can be made anew is, and records that are sound stay.
    """

    def __init__(self, folder: Path, lock: FolderLock, digest: str, config: Mapping[str, Any]) -> None:
        remove_abandoned(folder)
        self.folder, self._lock = folder, lock
        self._before = repaired(folder, digest, config)
        self.info = self._before or {"identity_sha256": digest, SETTINGS: files.plain(config), FILES: {}}
        _write_config(folder / CONFIG, self.info[SETTINGS])
        lines = bound.read_lines(folder, EXAMPLES, self.info)
        self._ids, self._digest = {record.id for record in _records(lines)}, Digest(lines)
        self._begun = self._closed = False
        self.info = _continued(self.info, len(self._ids)) | {"status": "running", "started": now()}
        (folder / EXAMPLES).touch()

    @classmethod
    def open(
        cls,
        root: Path,
        config: Mapping[str, Any],
        identity: Mapping[str, Any],
        task: str,
        method: str,
        *,
        wait: bool = False,
    ) -> Self:
        """The same identity finds the same folder and goes on there; another identity gets another folder.

        Where another process writes it: `wait` until that is done, or raise `FolderInUse`.
        """
        folder = cls.place(root, identity, task, method)
        with files.writing(root):
            folder.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(folder, wait=wait)
            try:
                run = cls(folder, lock, files.digest(identity), config)
                is_new = not run._before
                run.complement(task=task, method=method, identity=dict(identity))
                if is_new:
                    run._begin()
            except BaseException:
                lock.release()
                raise
        return run

    @staticmethod
    def place(root: Path, identity: Mapping[str, Any], task: str, method: str) -> Path:
        """Where a run lives, whether it is there yet or not."""
        return root / f"{_plain(task)}-{_plain(method)}-{files.digest(identity)[:8]}"

    def contains(self, example_id: str) -> bool:
        return example_id in self._ids

    def append(self, record: Record) -> None:
        """On disk when this returns: a crash later costs nothing of it."""
        if record.id in self._ids:
            raise StoreError(f"example {record.id!r} is already in {self.folder}: the ids of a task must differ")
        plain = json.loads(record.to_json())  # as it will be read: the checksum is over that
        sealed = seal(plain, self.info["identity_sha256"])
        if not self._begun:
            self._begin()
        with whole():
            files.append_line(self.folder / EXAMPLES, sealed)
            self._ids.add(record.id)
            self._digest.add(sealed[CHECKSUM])

    def records(self) -> list[Record]:
        return read_records(self.folder, self.info)

    def note(self, **facts: Any) -> None:
        """Adds facts to run.json: provenance, task_info, num_expected, simulated, host_is_cpu, backends."""
        if any(key not in self.info or self.info[key] != value for key, value in facts.items()):
            self.info |= facts
            if self._begun:
                self._write()

    def complement(self, **facts: Any) -> None:
        """Adds facts that hold whoever makes the records, where run.json lacks them: a session without work adds these
        alone."""
        for known in (self._before, self.info):
            known.update({key: value for key, value in facts.items() if key not in known})

    def _begin(self) -> None:
        self._begun = True
        self._write()

    def _write(self) -> None:
        self.info[FILES] = {**self.info[FILES], EXAMPLES: self._digest.plain()}
        bound.write_info(self.folder, self.info)

    def close(self, status: str, error: str | None = None) -> None:
        """A session that added nothing leaves times and machine as they were."""
        assert status in ENDS
        if self._begun:
            self.info |= {"status": status, "ended": now(), "load_average_ended": load_average(), "error": error}
        elif status != "complete" or self._before["status"] != "complete":
            ended = self._before.get("ended") or self._last_written()
            load = self._before.get("load_average_ended")
            self.info = self._before | {"status": status, "ended": ended, "load_average_ended": load, "error": error}
        else:
            self.info = self._before
        try:
            if self.info != self._before:
                self._write()
            if status == "complete":
                (self.folder / ERROR).unlink(missing_ok=True)
        finally:
            self._closed = True
            self._lock.release()

    def _last_written(self) -> str:
        return when((self.folder / EXAMPLES).stat().st_mtime)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: object) -> None:
        """Who leaves without `close` did not finish. submitit and Ray end a process by SystemExit at their signals."""
        if self._closed:
            return
        if raised is None or isinstance(raised, (KeyboardInterrupt, SystemExit)):
            self.close("interrupted")
        else:
            self.fail(raised)

    def fail(self, error: BaseException) -> None:
        """Closes the run as failed, its traceback in error.txt; the note of `error` says where."""
        path = self.folder / ERROR
        with suppress(OSError):  # a disk that is full may be the error
            files.write_atomically(path, "".join(traceback.format_exception(error)))
            error.add_note(f"The traceback is in {path}.")
        self.close("failed", f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run folder as reports read it."""

    folder: Path
    config: dict[str, Any]
    info: dict[str, Any]
    records: list[Record]
    status: str  # as run.json says, but `running` only while the writer lives
    digest: str | None = None  # of the lines of examples.jsonl
    summary: dict[str, Any] = field(default_factory=dict)  # of a run that a command has just made or found complete
    full_folder: Path | None = None  # of the Full that such a summary holds it against

    @property
    def scorer(self) -> str:
        """Version of the task that made the scores that are shown."""
        again = self.info.get("rescored", {}).get("present")
        return str((again or {"task_version": self.info.get("task_info", {}).get("version")})["task_version"])

    def provenance(self, section: str) -> dict[str, Any]:
        """What is known of the last session's `machine`, `git`, `versions` or `process`: older runs say less."""
        return (self.info.get("provenance") or {}).get(section) or {}

    @property
    def is_empty(self) -> bool:
        """Whether it ended before its first example."""
        return not self.records and self.status in ("failed", "interrupted")


def load(folder: Path, *, first_scores: bool = False) -> StoredRun:
    """Read-only: the half-written last line of a run that goes on is left out and left alone. Raises `StoreError` where
    a file is not as it was written. `first_scores`: those of the run itself, whatever was scored again since."""
    if not folder.is_dir():
        raise StoreError(f"no such folder: {folder}{instead(folder)}")
    info = bound.read_info(folder)
    lines = bound.read_lines(folder, EXAMPLES, info)
    records = _records(lines)
    status = str(info.get("status"))
    if status != "complete" and is_locked(folder):  # a session that goes on writes run.json with its first record
        status = "running"
    elif status == "running":
        status = "interrupted"
    shown = records if first_scores else rescored(records, folder, info)
    return StoredRun(folder, info[SETTINGS], info, shown, status, Digest(lines).plain()["sha256"])


def load_all(folders: Iterable[Path]) -> tuple[list[StoredRun], list[str]]:
    """The runs that can be read, and a sentence on each of the others."""
    runs, damage = [], []
    for folder in folders:
        try:
            runs.append(load(folder))
        except StoreError as error:
            damage.append(str(error))
    return runs, damage


def read_records(folder: Path, info: Mapping[str, Any]) -> list[Record]:
    """In the order they were written, with the run's own scores; a line that is damaged, doubled, changed or of another
    run is an error that names it. `info`: run.json, which says whose lines these have to be."""
    return _records(bound.read_lines(folder, EXAMPLES, info))


def _records(lines: Iterable[RunLine]) -> list[Record]:
    return [Record.from_plain(line.plain, line.where) for line in lines]


def write_rescored(folder: Path, lines: Iterable[Mapping[str, Any]], info: Mapping[str, Any]) -> None:
    files.write_lines(folder / RESCORED, [seal(line, info["identity_sha256"]) for line in lines])


def rescored(records: Sequence[Record], folder: Path, info: Mapping[str, Any]) -> list[Record]:
    """With the scores of the last `python -m harness.rescore`, where there was one."""
    scores = {line.plain["id"]: line.plain for line in bound.read_rescored(folder, info)}
    return [record.rescored(scores[record.id]) if record.id in scores else record for record in records]


def _write_config(path: Path, config: Mapping[str, Any]) -> None:
    """A copy of what run.json holds, for people: nobody reads it back."""
    with suppress(StoreError):
        if files.read_yaml(path) == config:
            return
    files.write_yaml(path, config)


def _continued(before: Mapping[str, Any], records: int) -> dict[str, Any]:
    """run.json for a session that finds `records` there: what held for the last one alone moves into `earlier`, unless
    that one added nothing."""
    own = ("status", "started", "ended", "load_average_ended", "error", "provenance", "began_with")
    kept = {key: before[key] for key in before if key not in own} | {"began_with": records}
    if "status" not in before or before.get("began_with", -1) == records:
        return kept
    session = {key: before.get(key) for key in own if key != "began_with"}
    if session["status"] == "running":
        session["status"] = "interrupted"
    return kept | {"earlier": [*before.get("earlier", []), session]}


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+]+", "_", name)
