"""The folder of one run, and how an interrupted run is continued from it.

`examples.jsonl` holds the results: one line per example. It only grows; half a last line, which a
kill leaves, is dropped when the folder is opened again. `run.json` (configuration, status, times,
provenance) is always replaced as a whole. Everything else is derived: `summary.json` and
`config.yaml` are copies for other programs and people, `rescored.jsonl` holds later scores of the
same outputs, and `error.txt` the traceback of the last failure.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Self

from harness.config.plugins import build_recorded
from harness.config.settings import Results, in_todays_words
from harness.results import files
from harness.results.compared import averages
from harness.results.lock import FolderLock, is_locked
from harness.results.provenance import load_average, now
from harness.results.records import LeftOut, Record, StoreError
from harness.terminal.stopping import whole
from kernels.temporary import remove_abandoned

INFO, CONFIG, EXAMPLES, RESCORED = "run.json", "config.yaml", "examples.jsonl", "rescored.jsonl"
SUMMARY, ERROR = "summary.json", "error.txt"
SETTINGS = "config"  # key of run.json for the configuration, of which config.yaml is a copy
# parts of an identity; runs that differ in one are not compared
GIVEN = ("model_revision", "prompts", "answers")
# of run.json
SECTIONS = ("averages", "budget_use", "identity", "presets", "provenance", "rescored", "task_info")
OF_SESSION = (
    "status",
    "started",
    "ended",
    "load_average_ended",
    "error",
    "provenance",
    "began_with",
    "averages",
)  # keys of run.json


class Run:
    """A run folder that this process alone has open for writing. `info` is the content of run.json.

    Each opening is a session. A session's provenance is written to run.json before the first record
    that it adds, so that a folder says where its records come from even after a kill. A session
    that adds no record changes only the status in run.json.
    """

    def __init__(
        self, folder: Path, lock: FolderLock, digest: str, config: Mapping[str, Any]
    ) -> None:
        if (folder / EXAMPLES).is_symlink():
            raise StoreError(
                f"{folder / EXAMPLES} is a link, and what it leads to is not written: put a file there"
            )
        remove_abandoned(folder)
        self.folder, self._lock = folder, lock
        files.drop_half_line(folder / EXAMPLES)
        self._before = _left_by_earlier_sessions(folder, digest)
        self.info = self._before or {"identity_sha256": digest, SETTINGS: files.plain(config)}
        if not (folder / CONFIG).is_file():
            # for people: nobody reads it back
            files.write_yaml(folder / CONFIG, self.info[SETTINGS])
        records, failed, _ = _read_examples(folder)
        self._ids = {record.id for record in records}
        self.failed_before = {example.id for example in failed}
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
        """Open the folder of the run with this identity; if it exists, the run is continued there.
        If another process is writing it, `wait` until that one ends, or raise `FolderInUse`."""
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
        """Return the path of a run's folder, which need not exist."""
        names = [re.sub(r"[^A-Za-z0-9._+]+", "_", name) for name in (task, method)]
        return root / "-".join([*names, files.digest(identity)[:8]])

    @property
    def has_records(self) -> bool:
        return bool(self._ids)

    def contains(self, example_id: str) -> bool:
        return example_id in self._ids

    def append(self, record: Record) -> None:
        """Append the record of an answered example; it is on disk when this returns."""
        if record.id in self._ids:
            raise StoreError(
                f"example {record.id!r} is already in {self.folder}: the ids of a task must differ"
            )
        self.append_failed(record)
        self._ids.add(record.id)

    def append_left_out(self, examples: Iterable[LeftOut]) -> None:
        """Append a line for each of the examples that the run leaves out, unless it is there."""
        _, failed, skipped = _read_examples(self.folder)
        for example in examples:
            if example not in (*failed, *skipped):
                self.append_failed(example)

    def append_failed(self, failed: LeftOut | Record) -> None:
        """Append a line without counting its example as done, so that a failed example is tried
        again later."""
        line = failed.to_json()
        if not self._begun:
            self._begin()
        with whole():
            files.append_line(self.folder / EXAMPLES, line)

    def note(self, **facts: Any) -> None:
        """Add facts to run.json, such as provenance, num_expected or backends."""
        if any(key not in self.info or self.info[key] != value for key, value in facts.items()):
            self.info |= facts
            if self._begun:
                write_info(self.folder, self.info)

    def complement(self, **facts: Any) -> None:
        """Add facts to run.json that it lacks and that do not depend on the session, such as the
        task's name. Unlike those of `note`, they are also written if this session adds no
        record."""
        for known in (self._before, self.info):
            known.update({key: value for key, value in facts.items() if key not in known})

    def _begin(self) -> None:
        self._begun = True
        later_scores = self.info.pop("rescored", None)
        write_info(self.folder, self.info)
        if later_scores:  # of the records that were there alone
            (self.folder / RESCORED).unlink(missing_ok=True)

    def close(self, status: str, error: str | None = None) -> None:
        """End the session with the status complete, failed or interrupted, and release the lock."""
        if self._begun:
            self.info |= {
                "status": status,
                "ended": now(),
                "load_average_ended": load_average(),
                "error": error,
            }
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

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, _: object
    ) -> None:
        """Close a run that has not been closed: as interrupted after Ctrl-C or SystemExit (by which
        submitit and Ray end a process), otherwise as failed."""
        if self._closed:
            return
        if raised is None or isinstance(raised, (KeyboardInterrupt, SystemExit)):
            self.close("interrupted")
        else:
            self.fail(raised)

    def fail(self, error: BaseException) -> None:
        """Close the run as failed and write the traceback to error.txt; a note on `error` names
        that file."""
        path = self.folder / ERROR
        with suppress(OSError):  # a disk that is full may be the error
            files.write_atomically(path, "".join(traceback.format_exception(error)))
            error.add_note(f"The traceback is in {path}.")
        self.close("failed", f"{type(error).__name__}: {error}")


def _left_by_earlier_sessions(folder: Path, digest: str) -> dict[str, Any]:
    """Return the run.json that earlier sessions left; empty if there was none. Raise `StoreError`
    if the folder belongs to another run (`digest` is the hash of this one's identity)."""
    if not (folder / INFO).exists():
        if files.whole_lines(folder / EXAMPLES):
            raise StoreError(
                f"{folder / INFO} is gone, so nobody knows on which machine and with which versions its examples were "
                f"made: delete {folder} and run the same command again"
            )
        return {}
    info = read_info(folder)
    if info.get("identity_sha256") != digest:
        raise StoreError(
            f"{folder} holds another run whose hash starts the same: move that folder away"
        )
    return info


def _continued(before: Mapping[str, Any], records: int) -> dict[str, Any]:
    """Return the run.json with which a new session starts, in a folder with so many `records`. What
    described the last session alone moves into the list `earlier`, unless it added no record."""
    kept = {key: before[key] for key in before if key not in OF_SESSION} | {"began_with": records}
    if "status" not in before or before.get("began_with", -1) == records:
        return kept
    session = {key: before.get(key) for key in OF_SESSION if key != "began_with"}
    if session["status"] == "running":
        session["status"] = "interrupted"
    return kept | {"earlier": [*before.get("earlier", []), session]}


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run folder as it was read, for reports."""

    folder: Path
    config: dict[str, Any]
    info: dict[str, Any]
    records: list[Record]
    status: str  # as run.json says, but `running` only while the writer lives
    # of a run that a command has just made or found complete
    summary: dict[str, Any] = field(default_factory=dict)
    full_folder: Path | None = None  # of the Full that such a summary holds it against
    failed: Sequence[LeftOut] = ()
    skipped: Sequence[LeftOut] = ()

    @property
    def scorer(self) -> str:
        """The version of the task whose scores are shown: today's if the run was scored again."""
        again = self.info.get("rescored", {}).get("present")
        return str(
            (again or {"task_version": self.info.get("task_info", {}).get("version")})[
                "task_version"
            ]
        )

    def provenance(self, section: str) -> dict[str, Any]:
        """Return a section of the last session's provenance: machine, git, versions or process.
        Empty if an older run does not have it."""
        return (self.info.get("provenance") or {}).get(section) or {}

    @property
    def is_empty(self) -> bool:
        """True if the run ended before its first example was answered."""
        return not self.records and self.status in ("failed", "interrupted")


def given(run: StoredRun) -> dict[str, Any]:
    """Return what the run was given, by the names in `GIVEN`: hashes of its model, of its prompts
    and of its right answers (of today's, if the run was scored again). None for a hash that an
    older run does not have."""
    identity = run.info.get("identity") or {}
    again = (run.info.get("rescored") or {}).get("present") or {}
    return {name: again.get(name, identity.get(name)) for name in GIVEN}


def load(
    folder: Path, config_dirs: Sequence[Path] = (), *, first_scores: bool = False
) -> StoredRun:
    """Read a run folder without changing it, also one that is being written or that an older
    version wrote: unknown fields are ignored. Raise `StoreError` if it cannot be read.
    `config_dirs`: where plug-ins of the user's own are named; no other code is imported.
    `first_scores`: return the run's own scores, not those of a later `python -m
    harness.rescore`."""
    info, (records, failed, skipped) = read_info(folder), _read_examples(folder)
    status = str(info.get("status"))
    # a session that goes on writes run.json with its first record
    if status != "complete" and is_locked(folder):
        status = "running"
    elif status == "running":
        status = "interrupted"
    scored: dict[str, Any] = info
    if "rescored" in info and not first_scores:
        path = folder / RESCORED
        if not path.is_file():
            raise StoreError(f"{path} is gone: run python -m harness.rescore {folder} again")
        scores = {plain["id"]: plain for _, plain in files.read_lines(path)}
        records = [
            record.rescored(scores[record.id]) if record.id in scores else record
            for record in records
        ]
        scored = info["rescored"]["present"]
    if "averages" not in scored:  # of an older run, or of one that has not ended
        with suppress(ValueError):  # of a plug-in that is not here, or of another version
            scored = {
                "averages": averages(
                    build_recorded(info[SETTINGS].get("task"), "task", config_dirs), records
                )
            }
    info = info | {"averages": scored.get("averages", {})}
    config = in_todays_words(info[SETTINGS])
    return StoredRun(folder, config, info, records, status, failed=failed, skipped=skipped)


def load_all(
    folders: Iterable[Path], config_dirs: Sequence[Path] = ()
) -> tuple[list[StoredRun], list[str]]:
    """Return the runs that can be read, and a sentence on each folder that cannot. `config_dirs`:
    as of `load`."""
    runs, damage = [], []
    for folder in folders:
        try:
            runs.append(load(folder, config_dirs))
        except StoreError as error:
            damage.append(str(error))
    return runs, damage


def read_info(folder: Path) -> dict[str, Any]:
    """Return the content of run.json. Raise `StoreError` if it is missing or damaged."""
    path = folder / INFO
    if not path.is_file():
        raise StoreError(
            f"{folder} is not the folder of a run: it holds no {INFO}{_instead(folder)}"
        )
    try:
        info = files.read_json(path)
    except StoreError as error:
        raise StoreError(f"{error}; delete {folder} and run the same command again") from error
    if not isinstance(info.get(SETTINGS), dict):
        raise StoreError(
            f"{path} holds no configuration; delete {folder} and run the same command again"
        )
    if odd := [key for key in SECTIONS if not isinstance(info.get(key), (dict, NoneType))]:
        raise StoreError(
            f"{path}: {odd[0]} holds no keys and values; delete {folder} and run the same command again"
        )
    return info


def write_info(folder: Path, info: Mapping[str, Any]) -> None:
    """Replace run.json in a run's folder by `info`."""
    with files.writing(folder):
        files.write_json(folder / INFO, info)


def read_records(folder: Path) -> list[Record]:
    """Return a run's records in the order in which they were written, with the run's own scores. If
    two lines are about the same example, as two writers on a file system without locks leave them,
    the first counts. Raise `RecordError` for a line that is no record."""
    return _read_examples(folder)[0]


def _read_examples(folder: Path) -> tuple[list[Record], list[LeftOut], list[LeftOut]]:
    """Return the records, for each example that failed and has no record its last failure, and the
    examples that were skipped."""
    records = dict[str, Record]()
    failed = dict[str, LeftOut]()
    skipped = dict[str, LeftOut]()
    for where, plain in files.read_lines(folder / EXAMPLES):
        if "error" in plain or "skipped" in plain:
            example = LeftOut.from_plain(plain, where)
            (failed if example.kind == "error" else skipped)[example.id] = example
        else:
            record = Record.from_plain(plain, where)
            records.setdefault(record.id, record)
    unanswered = [example for name, example in failed.items() if name not in records]
    return list(records.values()), unanswered, list(skipped.values())


def find(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders among `paths` and below them, each once, sorted within each path."""
    folders: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise StoreError(f"no such folder: {path}{_instead(path)}")
        below = sorted(Path(folder) for folder, _, names in os.walk(path) if INFO in names)
        if not below:
            raise StoreError(
                f"no runs in {path}: give the folder that results.root named; that of a run holds {INFO}"
            )
        for folder in below:
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def _instead(path: Path) -> str:
    """Return the end of an error about a folder that is missing or no run's: the place in the usual
    results folder if the run is there, otherwise what to give."""
    if path.is_dir():
        return "; give one of the folders in it that a run wrote"
    usual = Path(Results().root) / path
    named = "what results.root named, or a run's folder in it"
    return f"; did you mean {usual}?" if usual.is_dir() else f"; give {named}"
