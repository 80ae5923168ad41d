"""A worker takes the groups of a sweep one after the other and writes down what becomes of their jobs."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from harness.config.errors import is_memory
from harness.jobs.planning.planner import Planner
from harness.sweeps.group import JobGroup
from harness.sweeps.ledger import Claim, Sweep, examples_in
from harness.sweeps.session import PATIENCE, SweepSession
from harness.terminal.progress import numbered

if TYPE_CHECKING:
    from harness.jobs.job import Job


def work(session: SweepSession, *, patience: int = PATIENCE, wait: bool = True, aloud: bool = True) -> None:
    """Until nothing is left, in this process. `wait` for what another command has in hand, and take what it leaves."""
    planner = Planner()
    while claim := session.take(patience) or (session.wait(patience) if wait else None):
        with claim:
            _Attempt(claim, session).run(planner, aloud)


def work_here(sweep: Sweep, command: str) -> SweepSession:
    """All of it in this process, one group after the other."""
    with SweepSession.begin(sweep, command, launcher="basic", workers=1) as session:
        work(session)
    return session


class _Attempt:
    """A claimed group while it runs. The ledger hears of each step before the next one begins."""

    def __init__(self, claim: Claim, session: SweepSession) -> None:
        self.claim, self.sweep = claim, claim.sweep
        self.jobs = claim.log.open_jobs(session.before(claim.group))
        self.planned: dict[int, tuple[Path, Path | None]] = {}  # place -> folder, Full's
        self._began = monotonic()

    def run(self, planner: Planner, aloud: bool) -> None:
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES") or None
        self.claim.note("started", jobs=self.jobs, host=socket.gethostname(), pid=os.getpid(), gpu=gpu)
        group = JobGroup([self.sweep.jobs[job] for job in self.jobs], self.sweep.partial, planner, aloud)
        try:
            with numbered(self.jobs[0] + 1, len(self.sweep.jobs) if len(self.jobs) == 1 else 1, aloud):
                group.run(self._plan)
        except BaseException as error:
            for job in self.jobs:
                self._end(job, status="interrupted", reason=_reason(error))
            raise
        for place, job in enumerate(self.jobs):
            self._end(job, **self._became(place, group))

    def _plan(self, place: int, job: Job, full: Job | None) -> None:
        self.planned[place] = (job.folder, full.folder if full else None)
        folders = {
            "folder": self.sweep.relative(job.folder),
            "full": self.sweep.relative(full.folder) if full else None,
        }
        had = examples_in(self.sweep.root, folders)
        self.claim.note("planned", job=self.jobs[place], **folders, examples=len(job.items), had=had)

    def _became(self, place: int, group: JobGroup) -> dict[str, Any]:
        """Done, or failed and why. A job without the Full that it asked for is not done."""
        folder, full = self.planned.get(place, (None, None))
        found = [made for made in group.made if made.folder == folder]
        own = [t for t in group.troubles if t.place == place or any(f and t.concerns(f) for f in (folder, full))]
        why = own or ([] if found else [trouble for trouble in group.troubles if trouble.is_everyones])
        if found and not why:
            beside = found[0].full_folder
            return {
                "status": "done",
                "folder": self.sweep.relative(found[0].folder),
                "full": self.sweep.relative(beside) if beside else None,
            }
        reason = " ".join(dict.fromkeys(trouble.sentence for trouble in why)) or "It has not finished."
        return {"status": "failed", "reason": reason, "memory": any(is_memory(trouble.error) for trouble in why)}

    def _end(self, job: int, **facts: Any) -> None:
        self.claim.note("ended", job=job, seconds=round(monotonic() - self._began, 1), **facts)


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "interrupted"
    return f"{type(error).__name__}: {error}"
