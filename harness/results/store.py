"""The folder of one run: what ran, one line per example, and how to go on after a crash.

`config.yaml` (resolved), `run.json` (status, times, provenance), `examples.jsonl` (the results themselves),
`rescored.jsonl` (later scores of the same outputs), `summary.json` (derived, made again at will) and, where a session
failed, `error.txt` (its traceback).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from harness.config.renamed import with_new_names
from harness.config.settings import Results
from harness.results import files
from harness.results.files import seal
from harness.results.lock import FolderInUse, FolderLock, is_locked
from harness.results.provenance import load_average, now, when
from harness.results.records import Record, StoreError
from harness.terminal.stopping import whole
from kernels.temporary import remove_abandoned

__all__ = ["FolderInUse", "Run", "StoreError", "StoredRun", "find", "load", "read_records"]

ENDS = ("complete", "failed", "interrupted")
EXAMPLES, ERROR = "examples.jsonl", "error.txt"
RESCORED = "rescored.jsonl"  # id, score, details, turns: what later scorers made of the outputs in examples.jsonl


class Run:
    """A run folder open for writing, by this process alone. `info` is what stands in run.json.

    A session begins with the first record that it adds, and run.json with provenance and backends is written before
    that record: whatever the moment of a kill, a folder says where its records come from.
    """

    def __init__(self, folder: Path, lock: FolderLock, digest: str) -> None:
        path = folder / "run.json"
        remove_abandoned(folder)
        self.folder, self._lock = folder, lock
        self._before = files.read_json(path) if path.exists() else {}
        if self._before.get("identity_sha256", digest) != digest:
            raise StoreError(f"{folder} holds another run whose hash starts the same: move that folder away")
        files.drop_half_line(folder / EXAMPLES)
        self.info = {"sealed": not self._before} | self._before | {"identity_sha256": digest}
        self._ids = {record.id for record in read_records(folder, self.info)}
        self._begun = False
        self.info = _continued(self.info, len(self._ids)) | {"status": "running", "started": now()}
        self._file = open(folder / EXAMPLES, "ab", buffering=0)  # noqa: SIM115 (open for the life of the run)

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
    ) -> Run:
        """The same identity finds the same folder and goes on there; another identity gets another folder.

        Where another process writes it: `wait` until that is done, or raise `FolderInUse`.
        """
        folder = cls.place(root, identity, task, method)
        with files.writing(root):
            folder.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(folder, wait=wait)
            try:
                run = cls(folder, lock, _digest(identity))
                if not (folder / "config.yaml").exists():
                    files.write_yaml(folder / "config.yaml", config)
                run.note(task=task, method=method, identity=dict(identity))
                if not run._before:
                    run._begin()
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
        line = self._line(record)
        if not self._begun:
            self._begin()
        with files.writing(self.folder), whole():
            end = os.fstat(self._file.fileno()).st_size
            try:
                while line:
                    line = line[self._file.write(line) :]
                os.fsync(self._file.fileno())
            except OSError:  # a full disk: what comes next must not grow onto half a line
                self._file.truncate(end)
                raise
            self._ids.add(record.id)

    def _line(self, record: Record) -> bytes:
        plain = json.loads(record.to_json())  # as it will be read: the checksum is over that
        if self.info["sealed"]:
            plain = seal(plain, self.info["identity_sha256"])
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    def records(self) -> list[Record]:
        return read_records(self.folder, self.info)

    def note(self, **facts: Any) -> None:
        """Adds facts to run.json: provenance, task_info, num_expected, simulated, host_is_cpu, backends."""
        if any(key not in self.info or self.info[key] != value for key, value in facts.items()):
            self.info |= facts
            if self._begun:
                self._write()

    def _begin(self) -> None:
        self._begun = True
        self._write()

    def _write(self) -> None:
        with files.writing(self.folder):
            files.write_json(self.folder / "run.json", self.info)

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
            self._file.close()
            self._lock.release()

    def _last_written(self) -> str:
        return when((self.folder / EXAMPLES).stat().st_mtime)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: object) -> None:
        """Who leaves without `close` did not finish. submitit and Ray end a process by SystemExit at their signals."""
        if self._file.closed:
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

    @property
    def scorer(self) -> str:
        """Version of the task that made the scores that are shown."""
        again = self.info.get("rescored", {}).get("present")
        return str((again or {"task_version": self.info.get("task_info", {}).get("version")})["task_version"])

    @property
    def is_empty(self) -> bool:
        """Whether it ended before its first example."""
        return not self.records and self.status in ("failed", "interrupted")


def find(paths: Iterable[Path]) -> list[Path]:
    """All run folders at or below `paths`, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise StoreError(f"no such folder: {path}{_instead(path)}")
        below = sorted(file.parent for file in path.rglob("run.json"))
        if not below:
            raise StoreError(f"no runs in {path}: the folder of a run holds run.json")
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _instead(path: Path) -> str:
    """Where the run may be that was named without its folder."""
    root = Path(Results().root)
    if (usual := root / path).is_dir():
        return f"; did you mean {usual}?"
    if len(path.parts) == 1:
        return f"; name a run with its folder, as in {usual}"
    return f"; give the folder that results.root named, such as {root}, or a run's in it"


def akin(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Other runs of the same task and method beside `folder`, with their run.json."""
    for path in sorted(folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*/run.json")):
        if path.parent != folder:
            with suppress(StoreError):
                yield path.parent, files.read_json(path)


def load(folder: Path) -> StoredRun:
    """Read-only: the half-written last line of a run that goes on is left out and left alone."""
    if not folder.is_dir():
        raise StoreError(f"no such folder: {folder}{_instead(folder)}")
    if not (folder / "run.json").is_file():
        raise StoreError(f"{folder} is not the folder of a run: it holds no run.json")
    info, config = files.read_json(folder / "run.json"), with_new_names(files.read_yaml(folder / "config.yaml"))
    status = str(info.get("status"))
    if status != "complete" and is_locked(folder):  # a session that goes on writes run.json with its first record
        status = "running"
    elif status == "running":
        status = "interrupted"
    return StoredRun(folder, config, info, rescored(read_records(folder, info), folder, info), status)


def read_records(folder: Path, info: Mapping[str, Any]) -> list[Record]:
    """In the order they were written; a line that is damaged, doubled, changed or of another run is an error that names
    it. `info`: run.json, which says whose lines these have to be."""
    found: dict[str, Record] = {}
    for where, plain in _lines(folder / EXAMPLES, info):
        record = Record.from_plain(plain, where)
        if record.id in found:
            raise StoreError(f"{where}: example {record.id!r} a second time; delete one of the two lines")
        found[record.id] = record
    return list(found.values())


def write_rescored(folder: Path, lines: Iterable[Mapping[str, Any]], info: Mapping[str, Any]) -> None:
    files.write_lines(folder / RESCORED, [seal(line, info["identity_sha256"]) for line in lines])


def rescored(records: Sequence[Record], folder: Path, info: Mapping[str, Any]) -> list[Record]:
    """With the scores of the last `python -m harness.rescore`, where there was one."""
    scores = {line["id"]: line for _, line in _lines(folder / RESCORED, info)}
    return [record.rescored(scores[record.id]) if record.id in scores else record for record in records]


def _lines(path: Path, info: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return files.sealed_lines(path, str(info.get("identity_sha256")), required=info.get("sealed", False))


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


def _digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(files.canonical(identity).encode()).hexdigest()


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+]+", "_", name)
