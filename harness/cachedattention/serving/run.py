"""A planned run of the loop, from the model to the files of its folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from harness.cachedattention.serving import trace
from harness.cachedattention.serving.answer import Answer
from harness.cachedattention.serving.clock import CLOCKS
from harness.cachedattention.serving.figures import figures
from harness.cachedattention.serving.loop import Loop
from harness.cachedattention.serving.plan import ServingPlan
from harness.cachedattention.turns.stored import StoredHistories
from harness.config.settings import Settings
from harness.engine.hf import routed
from harness.jobs.planning.capacity import of_conversations
from harness.jobs.runner import Runner
from harness.results.files import read_json, write_json, write_lines
from harness.results.provenance import provenance
from harness.terminal.progress import progress
from kernels.temporary import TemporaryFolder

SCHEMA = 1
RUN, TURNS, TRACE = "serving.json", "turns.jsonl", "trace.jsonl"
ServedRow = dict[str, Any]


def found(plan: ServingPlan, out: Path) -> ServedRow | None:
    """What serving.json holds of the run, where an earlier command has made it."""
    file = out / plan.folder / RUN
    return read_json(file) if file.is_file() else None


def served(plan: ServingPlan, out: Path) -> ServedRow:
    """What serving.json holds of the run, from now on."""
    folder = out / plan.folder
    folder.mkdir(parents=True, exist_ok=True)
    row = _serve(plan, folder)
    write_json(folder / RUN, row)  # last: what holds it is finished
    return row


def _serve(plan: ServingPlan, folder: Path) -> ServedRow:
    job, traffic = plan.job, plan.point.traffic
    job.refuse_memory()
    loaded = job.load()
    with routed(loaded.model), _fresh(job.settings) as settings:
        attachment = job.attachment(loaded, {})
        with closing(Runner(job.task, settings, folder, attachment, loaded, traffic.read_buffer)) as runner:
            runner.kept.expect(of_conversations(job.model.describe(), settings, job.items))
            runner.warm_up(job.items)
            clock, engine, kept = CLOCKS[traffic.clock](), runner.engine, runner.kept
            loop = Loop(engine, kept, clock, ending=runner.ending, slots=traffic.slots, interleave=traffic.interleave)
            answers = list(_told(loop.serve(plan.sessions), plan))
            totals = figures(answers, clock.now(), clock.idle_s)
            stored = kept.store.statistics.plain() if isinstance(kept, StoredHistories) else None
    lines = list(_lines(plan, answers, runner))
    write_lines(folder / TURNS, lines)
    trace.write(folder / TRACE, plan.sessions, job.config["task"], plan.rate)
    return {
        "schema": SCHEMA,
        "settings": job.config | asdict(traffic) | {"rate": plan.rate},
        "identity": plan.identity,
        "figures": totals | {"score": fmean(line["score"] for line in lines)},
        "reserved": job.settings.store.capacities if stored else {},
        "store": stored,
        "provenance": provenance(job.settings.device),
    }


@contextmanager
def _fresh(settings: Settings) -> Iterator[Settings]:
    """With an empty folder inside `store.folder`, where one is named: it goes with the run."""
    if settings.store.folder is None:
        yield settings
        return
    parent = Path(settings.store.folder)
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder("kv-serve-", parent) as folder:
        yield replace(settings, store=replace(settings.store, folder=str(folder)))


def _told(answers: Iterator[Answer], plan: ServingPlan) -> Iterator[Answer]:
    """How far they are, on stderr."""
    turns = [1 for one in plan.sessions for _ in one.item.turns]
    shown = plan.job.settings.progress
    return progress(answers, plan.label, turns, shown, size=lambda _: 1, what="turns", unit="turn")


def _lines(plan: ServingPlan, answers: Sequence[Answer], runner: Runner) -> Iterator[ServedRow]:
    """Of turns.jsonl: what was recorded of a turn, with its text and score."""
    items = {one.name: one.item.turns for one in plan.sessions}
    for answer in answers:
        item = items[answer.session][answer.turn - 1]
        output = runner.output(item, answer.tokens)
        score = plan.job.task.score(item.example, output).value
        times = {name: getattr(answer, name) for name in ("ttft_s", "prefill_s", "prompt_tokens")}
        yield asdict(answer) | times | {"output": output, "score": score}
