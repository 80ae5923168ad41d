"""`dry_run=true`: prompts, lengths, bytes, time and folder of a run, without loading weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evals.base import Task
from harness.config.settings import Settings
from harness.jobs.job import Job
from harness.jobs.planning.capacity import free_bytes, refusal, side_by_side, size
from harness.jobs.planning.planner import Planner
from harness.jobs.questions import by_context
from harness.models.base import ModelSource
from harness.results.alarms.run import alike
from harness.results.store import find, load
from harness.terminal.visible import visible
from methods.base import Method

SHOWN = 2  # prompts printed
TIMED = ("dtype", "device", "threads")  # what the time of the same work depends on
HEAD, TAIL = 300, 300  # characters of each


def show(method: Method, task: Task, model: ModelSource, wanted: Settings, planner: Planner) -> None:
    """Print the plan; raises the same errors as the run itself would before its weights."""
    _, job = planner.plan(method, task, model, wanted)
    full = job.full(wanted)
    planner.let_go()
    settings = job.settings
    for item in job.items[:SHOWN]:
        text = item.prompt.text
        cut = text if len(text) <= HEAD + TAIL else f"{text[:HEAD]} [...] {text[-TAIL:]}"
        head = f"--- {item.example.id}: {len(item.prompt.ids)} tokens, expects {item.example.references}"
        print(visible(f"{head}\n{cut}\n"))
    lengths = [sum(len(turn.prompt.ids) for turn in item.turns) for item in job.items]
    contexts = list(by_context(job.items))
    info = model.describe()
    notes = alike([finding.message for item in job.items for finding in item.findings])
    rows = [
        ("examples", f"{len(lengths)}, of {min(lengths)} to {max(lengths)} prompt tokens, {sum(lengths)} in all"),
        *([("contexts", f"{len(contexts)}, each prefilled once")] if settings.questions == "shared" else ()),
        ("weights", f"{size(info.weight_bytes(settings.dtype))} in {settings.dtype} ({info.name})"),
        ("KV cache", f"{size(side_by_side(info, settings, job.items))} for Full at its longest"),
        ("memory", _memory(job)),
        ("time", _time(job, full, planner)),
        ("folder", str(job.folder)),
        *([("Full", _beside(full))] if full else ()),
        *(("lint", f"{count} of {len(lengths)} examples: {note}") for note, count in notes),
    ]
    print("\n".join(f"{name:<9} {text}" for name, text in rows))


def _memory(job: Job) -> str:
    """What the run itself would be refused with, or that it fits."""
    need, free = job.need(), free_bytes(job.settings.device)
    fits = f"needs {need}; {size(free) if free is not None else 'unknown'} free on {job.settings.device}"
    return refusal(need, job.settings, free) or fits


def _beside(full: Job) -> str:
    """Full's folder, and whether this command runs it."""
    if full.is_done():
        return f"{full.folder}, finished already"
    return f"{full.folder}, " + ("runs too" if full.settings.baseline == "run" else "not run with baseline=reuse")


def _time(job: Job, full: Job | None, planner: Planner) -> str:
    """Of the job and of the Full that runs with it, each counted once in a command."""
    runs = [job, *([full] if full and full.settings.baseline == "run" else [])]
    waiting = [run for run in runs if not run.is_done()]
    if not waiting:
        return "none: finished already"
    ours = [run for run in waiting if run.folder not in planner.counted]
    planner.counted |= {run.folder for run in ours}
    if not ours:
        return "none: counted with a job before"
    more = ", Full's run included" if any(run is full for run in ours) else ""
    return _expected(job, sum(map(_prefilled, ours[:1] if job.settings.shared_prefill else ours)), more)


def _prefilled(job: Job) -> int:
    """Prompt tokens that it feeds."""
    if job.settings.questions == "shared":
        return sum(len(group[0].prompt.ids) for group in by_context(job.items))
    return sum(len(turn.prompt.ids) for item in job.items for turn in item.turns)


def _expected(job: Job, tokens: int, more: str) -> str:
    """From the most recent run of the same model with the same conditions. `more`: what else `tokens` are of."""
    root = Path(job.settings.results.root)
    earlier = [load(folder) for folder in find([root])] if any(root.glob("*/run.json")) else []
    recent = sorted(earlier, key=lambda run: run.info.get("started", ""), reverse=True)
    known = [run for run in recent if run.records and run.config.get("model") == job.config["model"]]
    if not known:
        return "unknown: no run of this model yet"
    run = min(known, key=lambda run: len(_others(run.config, job.config)))
    if others := _others(run.config, job.config):
        return f"unknown: no run of this model with {' and '.join(others)} yet"
    records = run.records
    rate = sum(r.prompt_tokens for r in records if r.prefilled_by is None) / sum(r.machine_s for r in records)
    return f"about {tokens / rate / 60:.1f} minutes at the {rate:.0f} prompt tokens/s of {run.folder.name}{more}"


def _others(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Conditions in which times of another run say nothing of ours, as they are typed."""
    return [f"{key}={'null' if ours[key] is None else ours[key]}" for key in TIMED if theirs.get(key) != ours[key]]
