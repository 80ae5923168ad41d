"""How far the jobs of a results root are, from run folders, their locks and the ledgers; and when a sweep ends."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from harness.results.lock import holder, is_locked
from harness.results.provenance import now, when
from harness.results.records import StoreError
from harness.results.run_folder import EXAMPLES, INFO, read_info, runs_below
from harness.sweeps.jobs import distinct
from harness.sweeps.ledger import Event, Log, Sweep, count_examples

AT_REST = {"complete": "done", "failed": "failed"}  # by the status in run.json, where nobody writes; else interrupted
STATES = ("done", "running", "failed", "interrupted", "to do")
NO_WORD = "its process ended without a word: killed, or the machine went down"


@dataclass(frozen=True, slots=True)
class JobState:
    """One job, or one run that belongs to no sweep. `total` and `seconds` are None where nothing says them; of a run
    there are those of all its sessions, and none that only found it done."""

    label: str
    status: str
    done: int = 0
    total: int | None = None
    seconds: float | None = None
    reason: str | None = None
    folder: Path | None = None
    full: Path | None = None  # Full's folder beside it
    host: str | None = None
    pid: int | None = None
    at: str | None = None  # of the last that is known of it
    rate: float | None = None  # seconds per example of its run
    about: str = ""  # task and model: jobs about the same have as many examples

    @property
    def left(self) -> int | None:
        return None if self.total is None else max(0, self.total - self.done)


def states_of(sweep: Sweep) -> list[JobState]:
    """In the order of the jobs."""
    labels = distinct(sweep.jobs)
    found: dict[int, JobState] = {}
    for group in range(len(sweep.groups)):
        running = sweep.is_running(group)
        log = sweep.log(group)
        for number in log.jobs:
            job = sweep.jobs[number]
            about = json.dumps([job.config["task"], job.config["model"]], sort_keys=True)
            label = " ".join(labels[number] or job.words) or "the job"
            found[number] = replace(_state(log, number, running), label=label, about=about)
    return _with_totals([found[number] for number in sorted(found)])


def each_once(states: Sequence[JobState]) -> list[JobState]:
    """Jobs may share a run, as those do that differ in the budget of Full alone."""
    return list({state.folder or number: state for number, state in enumerate(states)}.values())


def _state(log: Log, job: int, running: bool) -> JobState:
    """The run folder has the last word on what is done; the ledger on the rest."""
    told, planned = _told(log, job, running), log.last("planned", job)
    if planned is None:
        return told
    folder, full = (log.sweep.root / planned[key] if planned[key] else None for key in ("folder", "full"))
    there = folder is not None and (folder / INFO).is_file()
    run = run_state(folder) if folder and there else JobState("", "to do")
    known = replace(run, total=planned["examples"], folder=folder, full=full)
    if run.status == "done" and told.status == "failed" and full and run_state(full).status != "done":
        return replace(known, status="failed", seconds=told.seconds, reason=told.reason)
    if run.status in ("done", "running"):
        return known
    if told.status == "done":  # its folder was moved away since
        return replace(known, status="to do", reason=None)
    return replace(told, done=run.done, total=known.total, rate=run.rate, folder=folder, full=full)


def _told(log: Log, job: int, running: bool) -> JobState:
    """What the ledger says of a job."""
    starts = [at for at, event in enumerate(log.events) if event["event"] == "started" and job in event["jobs"]]
    if not starts:
        return JobState("", "to do")
    attempt, end = log.events[starts[-1]], log.last("ended", job, starts[-1])
    where: Event = {"host": attempt["host"], "pid": attempt["pid"]}
    if end:
        return JobState("", end["status"], seconds=end["seconds"], reason=end.get("reason"), at=end["at"], **where)
    if running:
        return JobState("", "running", seconds=_between(attempt["at"], now()), at=attempt["at"], **where)
    return JobState("", "interrupted", reason=NO_WORD, at=attempt["at"], **where)


def run_state(folder: Path) -> JobState:
    """A run folder at a glance: its lines are counted, not read. One that is damaged is to be run again."""
    info, wrong = dict[str, Any](), None
    try:
        info = read_info(folder)
    except StoreError as error:
        wrong = str(error)
    done, total, said = count_examples(folder), info.get("num_expected"), info.get("status")
    running = said != "complete" and is_locked(folder)
    ended = now() if running else info.get("ended") or _last_written(folder)
    session = _between(info["started"], ended) if ended and "started" in info else None
    made = done - info.get("began_with", 0)
    at_rest = "interrupted" if wrong else AT_REST.get(str(said), "interrupted")
    return JobState(
        folder.name,
        status="running" if running else at_rest,
        done=done,
        total=total,
        seconds=None if session is None else session + _before(info),
        reason=wrong or (NO_WORD if said == "running" and not running else info.get("error")),
        folder=folder,
        rate=session / made if session and made > 0 else None,
        at=ended,
        **(holder(folder) if running else {}),
    )


def _before(info: Mapping[str, Any]) -> float:
    """Seconds of the sessions before the last one, as far as they were ended by a word."""
    ends = [(one.get("started"), one.get("ended")) for one in info.get("earlier", [])]
    return sum(_between(began, ended) for began, ended in ends if began and ended)


def _last_written(folder: Path) -> str | None:
    """When the last example came, for a run that was killed."""
    with suppress(FileNotFoundError):
        return when((folder / EXAMPLES).stat().st_mtime)
    return None


def other_runs(root: Path, known: Iterable[JobState]) -> list[JobState]:
    """Runs that no sweep asked for."""
    mine = {folder.resolve() for state in known for folder in (state.folder, state.full) if folder}
    return [run_state(folder) for folder in runs_below(root) if folder.resolve() not in mine]


def _with_totals(states: Sequence[JobState]) -> list[JobState]:
    """A job that has not been planned has as many examples as another one about the same."""
    known = {state.about: state.total for state in states if state.total is not None}
    return [replace(state, total=known.get(state.about)) if state.total is None else state for state in states]


def _between(began: str, ended: str) -> float:
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()


class EndEstimate(NamedTuple):
    """`seconds` that are left, None where nothing says it; `basis`: what they are guessed from."""

    seconds: float | None
    basis: str

    def sentence(self, is_running: bool) -> str:
        if self.seconds is None:
            return f"end unknown: {self.basis}"
        if not is_running:
            return f"about {duration(self.seconds)} left ({self.basis})"
        end = datetime.now(UTC) + timedelta(seconds=self.seconds)
        return f"ends in about {duration(self.seconds)}, at {end:%H:%M} UTC ({self.basis})"


def estimate(states: Sequence[JobState]) -> EndEstimate:
    """Examples that are left, at the seconds per example of runs of the same task and model, or else of all."""
    waiting = [state for state in each_once(states) if state.status in ("running", "to do", "interrupted")]
    rates = {state.folder: state.rate for state in states if state.rate}
    if not rates:
        return EndEstimate(None, "no example has been timed yet")
    if any(state.left is None for state in waiting):
        return EndEstimate(None, "no job on the same task has been planned yet")
    together = max(1, sum(state.status == "running" for state in waiting))
    work = sum((state.left or 0) * _rate(state, states) for state in waiting)
    each = work / max(1, sum(state.left or 0 for state in waiting))
    runs = f"{len(rates)} run{'s' * (len(rates) > 1)}"
    return EndEstimate(work / together, f"{each:.2g} s per example, from {runs}; {together} at a time")


def _rate(state: JobState, states: Sequence[JobState]) -> float:
    if state.rate:
        return state.rate
    akin = {other.folder: other.rate for other in states if other.rate and other.about == state.about}
    return fmean(akin.values() or {other.folder: other.rate for other in states if other.rate}.values())


def duration(seconds: float) -> str:
    """45 s, 12 min, 3.5 h, 2.1 days."""
    for size, unit in ((86400, "days"), (3600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
