"""What to run next: commands that measure what an explanation had to leave open."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from evals.stats import ALPHA
from harness.diagnosis.subject import Subject
from harness.results import triage
from harness.results.run_folder import StoredRun

EXAMPLES = ("samples", "rounds")  # a task's parameter for how many examples it makes
FACTOR = 4


def next_steps(subject: Subject, command: str) -> Iterator[tuple[str, str]]:
    """(what for, command). `command`: what repeats the run. One that is not complete has nothing to measure yet."""
    row = subject.summary
    base = with_root(command, subject.run)
    if subject.run.status != "complete":
        yield "to finish it", base
        return
    found = row.get("triage") or {"examined": 0}
    if found["examined"] < len(triage.wrong(subject.run.records)):
        yield "to learn the causes of the wrong answers (nothing else is run again)", f"{base} triage=on"
    if not row["fidelity"] and not subject.is_full:
        yield "to learn what its steps miss of the exact attention", f"{base} fidelity=8"
    if not subject.traced:
        yield "to learn where a step spends its time", f"{base} trace=on"
    if row["tpot_s"]["p50"] is None and row["simulated"]:
        yield "to measure its times", base.replace("shared_prefill=true", "shared_prefill=false")
    more = _more(subject)
    if row["full"] and row["full"]["diff"] and row["full"]["p"] >= ALPHA and more:
        yield "to tell the difference from chance", f"{base} {more}"


def with_root(command: str, run: StoredRun) -> str:
    """Where the run lies, too, so that it goes on there."""
    return f"{command} {shlex.quote(f'results.root={run.folder.parent}')}"


def _more(subject: Subject) -> str | None:
    """The task's key for more examples."""
    task = subject.run.config.get("task") or {}
    key = next((key for key in EXAMPLES if isinstance(task.get(key), int)), None)
    return f"task.{key}={FACTOR * task[key]}" if key else None
