"""One typed command at its sweep: which groups are still to be run, and who may take the next one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from time import monotonic_ns
from typing import Any, Self

from harness.results import files
from harness.results.lock import FolderInUse, FolderLock, is_locked
from harness.results.provenance import now
from harness.sweeps.ledger import Claim, Event, Sweep
from kernels.temporary import remove_abandoned

PATIENCE = 2  # kills without a new example after which a group waits until it can run alone


class SweepSession:
    """What ended before it began is looked at again, since code may have changed. Finished runs are then reused."""

    _lock: FolderLock | None = None

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        self.sweep, self.folder = sweep, folder
        self._over: set[int] = set()  # groups that have ended: they need not be read again

    @classmethod
    def begin(cls, sweep: Sweep, command: str, **how: Any) -> SweepSession:
        """`how`: launcher, workers, devices, threads. Held by this process, until it ends."""
        when = now().partition("+")[0].replace(":", "-")
        here = {"host": socket.gethostname(), "pid": os.getpid()}
        for earlier in sweep.folder.glob("sessions/*"):
            remove_abandoned(earlier)
        folder = sweep.folder / "sessions" / f"{when}-{here['host']}-{here['pid']}-{monotonic_ns()}"
        with files.writing(folder):
            folder.mkdir(parents=True)
            before = [len(sweep.log(group).events) for group in range(len(sweep.groups))]
            files.write_json(
                folder / "session.json", {"command": command, "at": now(), **here, **how, "before": before}
            )
        session = cls(sweep, folder)
        session._lock = FolderLock(folder)
        return session

    @cached_property
    def facts(self) -> dict[str, Any]:
        return files.read_json(self.folder / "session.json")

    def before(self, group: int) -> int:
        """Events that were in the group's log when the command began."""
        return int(self.facts["before"][group])

    def take(self, patience: int = PATIENCE) -> Claim | None:
        """The next group that nobody runs and that was killed less than `patience` times; None where there is none, or
        the command was stopped."""
        for group in [] if self.is_stopped else self._groups:
            if self._is_open(group, patience) and not self.sweep.is_running(group):
                with suppress(FolderInUse):
                    if claim := self._claim(group, patience):
                        return claim
        return None

    def wait(self, patience: int = PATIENCE) -> Claim | None:
        """Waits for the groups that another command runs, and takes what it left."""
        for group in self.open_groups(patience):
            if claim := self._claim(group, patience, wait=True):
                return claim
        return None

    def _claim(self, group: int, patience: int, wait: bool = False) -> Claim | None:
        claim = Claim(self.sweep, group, wait=wait)
        if self._is_open(group, patience):
            return claim
        claim.release()  # someone else was faster
        return None

    def open_groups(self, patience: float = float("inf")) -> list[int]:
        """Groups with a job that has not ended since this command began."""
        return [group for group in self._groups if self._is_open(group, patience)]

    def _is_open(self, group: int, patience: float) -> bool:
        if group in self._over:
            return False
        log, before = self.sweep.log(group), self.before(group)
        if not log.open_jobs(before):
            self._over.add(group)
            return False
        return log.kills(before) < patience

    @property
    def _groups(self) -> range:
        return range(len(self.sweep.groups))

    def events(self) -> int:
        """In all logs: what grows while anything happens."""
        return sum(len(self.sweep.log(group).events) for group in self._groups)

    def ends(self) -> list[tuple[int, Event]]:
        """How each job ended since this command began, in the order of the jobs."""
        logs = [(self.sweep.log(group), self.before(group)) for group in self._groups]
        found = [(job, event) for log, before in logs for job in log.jobs if (event := log.ended(job, before))]
        return sorted(found, key=lambda pair: pair[0])

    def stop(self) -> None:
        """Asks all workers of this command to stop where they are."""
        (self.folder / "stop").touch()

    @property
    def is_stopped(self) -> bool:
        return (self.folder / "stop").exists()

    @property
    def is_held(self) -> bool:
        """Whether the command still runs."""
        return is_locked(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock:
            self._lock.release()
            self._lock = None


def sessions_of(sweep: Sweep) -> Iterator[SweepSession]:
    """Oldest first."""
    for file in sorted(sweep.folder.glob("sessions/*/session.json")):
        yield SweepSession(sweep, file.parent)


def last_command(sweep: Sweep) -> str | None:
    """What was typed last for this sweep."""
    typed = [str(session.facts["command"]) for session in sessions_of(sweep)]
    return typed[-1] if typed else None
