"""The folder of one run: what ran, one line per example, and how to go on after a crash.

`run.json` (configuration, status, times, provenance) is replaced as a whole, `examples.jsonl` (the results themselves)
only grows, and half a last line of it, which a kill leaves, is dropped. All else is derived: `summary.json` and
`config.yaml` are copies for other programs and people, `rescored.jsonl` holds later scores of the same outputs, and
`error.txt` the traceback of a session that failed.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from harness.config.settings import Results
from harness.results import files
from harness.results.lock import FolderInUse, FolderLock, is_locked
from harness.results.provenance import load_average, now
from harness.results.records import FailedExample, Record, StoreError
from harness.terminal.stopping import whole
from kernels.temporary import remove_abandoned

__all__ = ["FolderInUse", "Run", "StoreError", "StoredRun", "find", "load", "load_all", "read_records"]

INFO, CONFIG, EXAMPLES, RESCORED = "run.json", "config.yaml", "examples.jsonl", "rescored.jsonl"
SUMMARY, ERROR = "summary.json", "error.txt"
SETTINGS = "config"  # key of run.json for the configuration, of which config.yaml is a copy
OF_SESSION = (
    "status",
    "started",
    "ended",
    "load_average_ended",
    "error",
    "provenance",
    "began_with",
)  # keys of run.json


class Run:
    """A run folder open for writing, by this process alone. `info` is what stands in run.json.

    A session begins with the first record that it adds, and run.json with provenance and backends is written before
    that record: whatever the moment of a kill, a folder says where its records come from. A session that adds nothing
    leaves run.json as it is but for the status.
    """

    def __init__(self, folder: Path, lock: FolderLock, digest: str, config: Mapping[str, Any]) -> None:
        remove_abandoned(folder)
        self.folder, self._lock = folder, lock
        files.drop_half_line(folder / EXAMPLES)
        self._before = _left_by_earlier_sessions(folder, digest)
        self.info = self._before or {"identity_sha256": digest, SETTINGS: files.plain(config)}
        if not (folder / CONFIG).is_file():
            files.write_yaml(folder / CONFIG, self.info[SETTINGS])  # for people: nobody reads it back
        self._ids = {record.id for record in read_records(folder)}
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
        """Return the run of an identity: the same one finds the same folder and goes on there.

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
        """Return the folder of a run, which may not exist yet."""
        names = [re.sub(r"[^A-Za-z0-9._+]+", "_", name) for name in (task, method)]
        return root / "-".join([*names, files.digest(identity)[:8]])

    def contains(self, example_id: str) -> bool:
        return example_id in self._ids

    def append(self, record: Record) -> None:
        """Append a record, which is on disk when this returns."""
        if record.id in self._ids:
            raise StoreError(f"example {record.id!r} is already in {self.folder}: the ids of a task must differ")
        self.append_failed(record)
        self._ids.add(record.id)

    def append_failed(self, failed: FailedExample | Record) -> None:
        """Append the line of an example that may be tried again."""
        line = failed.to_json()
        if not self._begun:
            self._begin()
        with whole():
            files.append_line(self.folder / EXAMPLES, line)

    def records(self) -> list[Record]:
        return read_records(self.folder)

    def note(self, **facts: Any) -> None:
        """Add facts to run.json: provenance, task_info, num_expected, simulated, host_is_cpu, backends."""
        if any(key not in self.info or self.info[key] != value for key, value in facts.items()):
            self.info |= facts
            if self._begun:
                write_info(self.folder, self.info)

    def complement(self, **facts: Any) -> None:
        """Add facts that hold whoever makes the records, where run.json lacks them: a session without work adds these
        alone."""
        for known in (self._before, self.info):
            known.update({key: value for key, value in facts.items() if key not in known})

    def _begin(self) -> None:
        self._begun = True
        later_scores = self.info.pop("rescored", None)
        write_info(self.folder, self.info)
        if later_scores:  # of the records that were there alone
            (self.folder / RESCORED).unlink(missing_ok=True)

    def close(self, status: str, error: str | None = None) -> None:
        """End the session as complete, failed or interrupted."""
        if self._begun:
            self.info |= {"status": status, "ended": now(), "load_average_ended": load_average(), "error": error}
        else:
            self.info = self._before | {"status": status, "error": error}
        try:
            if self._begun or status != self._before.get("status"):
                write_info(self.folder, self.info)
            if status == "complete":
                (self.folder / ERROR).unlink(missing_ok=True)
        finally:
            self._closed = True
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: object) -> None:
        """Close a run that did not reach `close` as interrupted or failed. submitit and Ray end a process by
        SystemExit."""
        if self._closed:
            return
        if raised is None or isinstance(raised, (KeyboardInterrupt, SystemExit)):
            self.close("interrupted")
        else:
            self.fail(raised)

    def fail(self, error: BaseException) -> None:
        """Close the run as failed, with the traceback in error.txt; the note of `error` says where."""
        path = self.folder / ERROR
        with suppress(OSError):  # a disk that is full may be the error
            files.write_atomically(path, "".join(traceback.format_exception(error)))
            error.add_note(f"The traceback is in {path}.")
        self.close("failed", f"{type(error).__name__}: {error}")


def _left_by_earlier_sessions(folder: Path, digest: str) -> dict[str, Any]:
    """Return run.json of the run with this identity; empty where no session has begun yet."""
    if not (folder / INFO).exists():
        if files.whole_lines(folder / EXAMPLES):
            raise StoreError(
                f"{folder / INFO} is gone, so nobody knows on which machine and with which versions its examples were "
                f"made: delete {folder} and run the same command again"
            )
        return {}
    info = read_info(folder)
    if info.get("identity_sha256") != digest:
        raise StoreError(f"{folder} holds another run whose hash starts the same: move that folder away")
    return info


def _continued(before: Mapping[str, Any], records: int) -> dict[str, Any]:
    """Return run.json for a session that finds `records` there: what held for the last one alone moves into `earlier`,
    unless that one added nothing."""
    kept = {key: before[key] for key in before if key not in OF_SESSION} | {"began_with": records}
    if "status" not in before or before.get("began_with", -1) == records:
        return kept
    session = {key: before.get(key) for key in OF_SESSION if key != "began_with"}
    if session["status"] == "running":
        session["status"] = "interrupted"
    return kept | {"earlier": [*before.get("earlier", []), session]}


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run folder as reports read it."""

    folder: Path
    config: dict[str, Any]
    info: dict[str, Any]
    records: list[Record]
    status: str  # as run.json says, but `running` only while the writer lives
    summary: dict[str, Any] = field(default_factory=dict)  # of a run that a command has just made or found complete
    full_folder: Path | None = None  # of the Full that such a summary holds it against
    failed: Sequence[FailedExample] = ()

    @property
    def scorer(self) -> str:
        """Return the version of the task that made the scores that are shown."""
        again = self.info.get("rescored", {}).get("present")
        return str((again or {"task_version": self.info.get("task_info", {}).get("version")})["task_version"])

    def provenance(self, section: str) -> dict[str, Any]:
        """Return what is known of the last session's `machine`, `git`, `versions` or `process`; older runs say less."""
        return (self.info.get("provenance") or {}).get(section) or {}

    @property
    def is_empty(self) -> bool:
        """Return whether the run ended before its first example."""
        return not self.records and self.status in ("failed", "interrupted")


def load(folder: Path, *, first_scores: bool = False) -> StoredRun:
    """Read a run folder without changing it; the half-written last line of a run that goes on is left out. Folders of
    older versions are read as well: fields that are unknown today are ignored. Raise `StoreError` for what cannot be
    read. `first_scores`: those of the run itself, not of the last `python -m harness.rescore`."""
    info, (records, failed) = read_info(folder), _read_examples(folder)
    status = str(info.get("status"))
    if status != "complete" and is_locked(folder):  # a session that goes on writes run.json with its first record
        status = "running"
    elif status == "running":
        status = "interrupted"
    if "rescored" in info and not first_scores:
        path = folder / RESCORED
        if not path.is_file():
            raise StoreError(f"{path} is gone: run python -m harness.rescore {folder} again")
        scores = {plain["id"]: plain for _, plain in files.read_lines(path)}
        records = [record.rescored(scores[record.id]) if record.id in scores else record for record in records]
    return StoredRun(folder, info[SETTINGS], info, records, status, failed=failed)


def load_all(folders: Iterable[Path]) -> tuple[list[StoredRun], list[str]]:
    """Return the runs that can be read, and a sentence on each of the others."""
    runs, damage = [], []
    for folder in folders:
        try:
            runs.append(load(folder))
        except StoreError as error:
            damage.append(str(error))
    return runs, damage


def read_info(folder: Path) -> dict[str, Any]:
    """Return what run.json says. Raise `StoreError` where it is absent or holds something else."""
    path = folder / INFO
    if not path.is_file():
        raise StoreError(f"{folder} is not the folder of a run: it holds no {INFO}{_instead(folder)}")
    try:
        info = files.read_json(path)
    except StoreError as error:
        raise StoreError(f"{error}; delete {folder} and run the same command again") from error
    if not isinstance(info.get(SETTINGS), dict):
        raise StoreError(f"{path} holds no configuration; delete {folder} and run the same command again")
    return info


def write_info(folder: Path, info: Mapping[str, Any]) -> None:
    """Replace run.json."""
    with files.writing(folder):
        files.write_json(folder / INFO, info)


def read_records(folder: Path) -> list[Record]:
    """Return the records in the order in which they were written, with the run's own scores. Of two about the same
    example, which two writers leave on a file system without locks, the first counts. Raise `RecordError` for a line
    that holds no record; the message names it."""
    return _read_examples(folder)[0]


def _read_examples(folder: Path) -> tuple[list[Record], list[FailedExample]]:
    """Return the records, and the last word on each example that failed and has none."""
    records, failed = dict[str, Record](), dict[str, FailedExample]()
    for where, plain in files.read_lines(folder / EXAMPLES):
        if "error" in plain:
            example = FailedExample.from_plain(plain, where)
            failed[example.id] = example
        else:
            record = Record.from_plain(plain, where)
            records.setdefault(record.id, record)
    return list(records.values()), [example for name, example in failed.items() if name not in records]


def find(paths: Iterable[Path]) -> list[Path]:
    """Return all run folders at or below `paths`, each once, by name."""
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise StoreError(f"no such folder: {path}{_instead(path)}")
        below = sorted(Path(folder) for folder, _, names in os.walk(path) if INFO in names)
        if not below:
            raise StoreError(f"no runs in {path}: give the folder that results.root named; that of a run holds {INFO}")
        for folder in below:
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def _instead(path: Path) -> str:
    """Say where the run may be that was named without its folder."""
    usual = Path(Results().root) / path
    return f"; did you mean {usual}?" if usual.is_dir() and not path.is_dir() else "; give what results.root named"
