"""The ledger of a sweep: what no run folder can say. It lies in `<results.root>/sweeps/<N>-jobs-<hash>/`.

sweep.json           the jobs as Hydra composed them, and which of them run as one group
group-<N>/.lock      held by the worker that runs the group; the kernel drops it when that process dies
group-<N>/log.jsonl  started, planned, ended, killed; written by the holder of the lock alone, on disk at once
sessions/<name>/     one per typed command: how it was started, and what its launcher writes (session.py)

Which examples are done is in the run folders, and only there. The same jobs find the same ledger.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.results import files
from harness.results.lock import FolderLock, is_locked
from harness.results.provenance import now
from harness.results.records import StoreError
from harness.results.run_folder import EXAMPLES
from harness.sweeps.jobs import JobConfig, digest, groups

FOLDER, SWEEP, LOG = "sweeps", "sweep.json", "log.jsonl"
FINAL = ("done", "failed")  # an interrupted job is still to be run
Event = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """The jobs and where their ledger lies. `partial`: parameters, by group, that only some of the chosen have."""

    folder: Path
    jobs: list[JobConfig]
    groups: list[list[int]]
    partial: dict[str, frozenset[str]]

    @classmethod
    def create(cls, root: Path, jobs: Sequence[JobConfig], partial: Mapping[str, frozenset[str]]) -> Sweep:
        """The ledger of these jobs, which is there already if they were asked for before; what has no effect on a run,
        like the folder of the data, is this command's."""
        folder = root / FOLDER / f"{len(jobs)}-jobs-{digest(jobs)}"
        plain = {
            "jobs": [asdict(job) for job in jobs],
            "groups": groups(jobs),
            "partial": {group: sorted(names) for group, names in partial.items()},
        }
        with files.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            files.write_json(folder / SWEEP, plain)
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path) -> Sweep:
        plain = files.read_json(folder / SWEEP)
        partial = {group: frozenset(names) for group, names in plain["partial"].items()}
        return cls(folder, [JobConfig(**job) for job in plain["jobs"]], plain["groups"], partial)

    @property
    def root(self) -> Path:
        """The results root that the ledger lies in."""
        return self.folder.parent.parent

    def place(self, group: int) -> Path:
        return self.folder / f"group-{group + 1:03}"

    def log(self, group: int) -> Log:
        return Log(self, group, read_events(self.place(group) / LOG))

    def is_running(self, group: int) -> bool:
        return is_locked(self.place(group))

    def relative(self, folder: Path) -> str:
        return os.path.relpath(folder, self.root)


@dataclass(frozen=True)
class Log:
    """What happened to a group so far."""

    sweep: Sweep
    group: int
    events: list[Event]

    @property
    def jobs(self) -> list[int]:
        return self.sweep.groups[self.group]

    def last(self, kind: str, job: int, after: int = 0) -> Event | None:
        """The last event of its kind about a job, or None."""
        found = [event for event in self.events[after:] if event["event"] == kind and event["job"] == job]
        return found[-1] if found else None

    def ended(self, job: int, after: int = 0) -> Event | None:
        """How a job ended for good."""
        event = self.last("ended", job, after)
        return event if event and event["status"] in FINAL else None

    def open_jobs(self, after: int = 0) -> list[int]:
        return [job for job in self.jobs if self.ended(job, after) is None]

    @property
    def attempt(self) -> list[Event]:
        """The last attempt, from its start on; empty where there was none, or where it is known to be killed."""
        starts = [place for place, event in enumerate(self.events) if event["event"] == "started"]
        found = self.events[starts[-1] :] if starts else []
        return [] if any(event["event"] == "killed" for event in found) else found

    @property
    def is_torn(self) -> bool:
        """Whether the last attempt ended without a word: its process was killed, unless it still runs."""
        ended = {event["job"] for event in self.attempt if event["event"] == "ended"}
        return bool(self.attempt) and not ended.issuperset(self.attempt[0]["jobs"])

    def kills(self, after: int = 0) -> int:
        """Attempts that were killed before they had made one more example."""
        known = sum(1 for event in self.events[after:] if event["event"] == "killed" and not event["made"])
        began = len(self.events) - len(self.attempt)
        return known + (self.is_torn and began >= after and not self.made())

    def made(self) -> int:
        """Examples that the last attempt added, so far."""
        planned = [event for event in self.attempt if event["event"] == "planned"]
        return sum(examples_in(self.sweep.root, event) - int(event["had"]) for event in planned)


class Claim:
    """A group in the hands of this process, by its lock. Leaving it lets go."""

    def __init__(self, sweep: Sweep, group: int, *, wait: bool = False) -> None:
        """Raises `FolderInUse` where another process has it and is not waited for."""
        self.sweep, self.group = sweep, group
        folder = sweep.place(group)
        folder.mkdir(exist_ok=True)
        self._lock = FolderLock(folder, wait=wait)
        self._path = folder / LOG
        files.drop_half_line(self._path)
        if (log := self.log).is_torn:
            self.note("killed", made=log.made(), **_process(log.attempt[0]))

    @property
    def log(self) -> Log:
        return self.sweep.log(self.group)

    def note(self, kind: str, **facts: Any) -> None:
        """On disk when this returns."""
        files.append_line(self._path, json.dumps({"event": kind, "at": now(), **facts}))

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def sweeps_in(root: Path) -> list[Sweep]:
    """All sweeps at or below a folder."""
    found = [file.parent for file in sorted(root.rglob(SWEEP)) if file.parent.parent.name == FOLDER]
    return [Sweep.load(folder) for folder in found]


def read_events(path: Path) -> list[Event]:
    try:
        return [json.loads(line) for line in files.whole_lines(path)]
    except ValueError as error:
        raise StoreError(f"{path} is damaged: move its folder away, and run the same command again") from error


def examples_in(root: Path, planned: Mapping[str, Any]) -> int:
    """Examples that lie in a job's folders now, Full's beside it included."""
    return sum(count_examples(root / planned[key]) for key in ("folder", "full") if planned[key])


def count_examples(folder: Path) -> int:
    return len(files.whole_lines(folder / EXAMPLES))


def _process(event: Event) -> Event:
    return {key: event[key] for key in ("host", "pid")}
