"""`shared_prefill=true`: all jobs of a sweep take their prompts from one prefill.

Methods whose prompt outputs are Full's differ only in what they keep and read; so Full attends once per prompt and
every method absorbs the same keys and values. Scores and fidelity are those of separate runs; the cost of the prefill
is not paid by the method that is scored, so the runs are stamped `simulated` and their speed cells stay empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from evals.base import Task
from harness.cache import KVCache
from harness.config import Settings, SettingsError
from harness.hf import routed
from harness.models.base import LoadedModel, ModelSource
from harness.preparation import Item, limit_threads
from harness.records import Record
from harness.run import Evaluation, Job, Presets, full_presets
from harness.runner import Runner, load, progress
from harness.store import Run
from kernels import ops
from methods.base import AttnInput, KVLayer, Method
from methods.full import Full
from methods.layers import DenseLayer

OWN = {"budget", "budget_rule", "align", "comm", "windows", "stale_by", "placement"}  # jobs may differ in these


class Wanted(NamedTuple):
    """One job of the sweep."""

    method: Method
    task: Task
    model: ModelSource
    settings: Settings
    presets: Presets | None = None


class _Fan(DenseLayer):
    """Full attention whose inputs others absorb as well."""

    followers: Sequence[KVLayer] = ()

    def absorb(self, x: AttnInput) -> None:
        super().absorb(x)
        for follower in self.followers:
            follower.absorb(x)


@dataclass
class _Member:
    """A job with its open run."""

    job: Job
    run: Run
    runner: Runner


def evaluate_together(wanted: Sequence[Wanted]) -> list[Evaluation]:
    """The jobs' evaluations; where tasks or models differ, one kind after the other."""
    groups: dict[str, list[Job]] = {}
    for method, task, model, settings, presets in wanted:
        refuse(method, settings)
        key = str((task, model, {name: value for name, value in asdict(settings).items() if name not in OWN}))
        jobs = groups.setdefault(key, [])
        if settings.baseline == "run" and not jobs:
            jobs.append(Job.plan(Full(), task, model, settings, presets=full_presets(presets)))
        job = Job.plan(method, task, model, settings, jobs[0].items if jobs else None, presets)
        if job.folder not in [known.folder for known in jobs]:
            jobs.append(job)
    return [evaluation for jobs in groups.values() for evaluation in _evaluate(jobs)]


def refuse(method: Method, settings: Settings) -> None:
    """What cannot share a prefill, by name."""
    if not method.dense_prefill:
        name = type(method).__name__
        raise SettingsError(f"{name} does not prefill densely and cannot share a prefill: use shared_prefill=false.")
    if settings.batch != 1:
        raise SettingsError(f"shared_prefill=true runs one example at a time: use batch=1 (it is {settings.batch}).")


def _evaluate(jobs: Sequence[Job]) -> list[Evaluation]:
    with ExitStack() as closing:
        runs = []
        for job in jobs:
            run = job.open()
            closing.push(lambda kind, error, trace, run=run: run.close(*_end(kind, error)))
            runs.append(run)
        _generate(list(zip(jobs, runs, strict=True)))
    return _beside_full(jobs)


def _beside_full(jobs: Sequence[Job]) -> list[Evaluation]:
    alone = [job.evaluation() for job in jobs]
    full = next((one for job, one in zip(jobs, alone, strict=True) if isinstance(job.method, Full)), None)
    others = [None if one is full else full for one in alone]
    return [job.evaluation(other) for job, other in zip(jobs, others, strict=True)]


def _end(kind: type[BaseException] | None, error: BaseException | None) -> tuple[str, str | None]:
    if kind is None:
        return "complete", None
    return ("interrupted", None) if kind is KeyboardInterrupt else ("failed", f"{kind.__name__}: {error}")


def _generate(pairs: Sequence[tuple[Job, Run]]) -> None:
    open_pairs = [(job, run) for job, run in pairs if job.pending(run)]
    if not open_pairs:
        return
    first = open_pairs[0][0]
    limit_threads(first.settings)
    loaded = load(first.model, first.settings.dtype, first.settings.device)
    ops.forget_used()
    members = [_Member(job, run, Runner(job, job.attachment(loaded, run), loaded)) for job, run in open_pairs]
    for member in members:
        member.job.note(member.run)
    pending = [item for item in first.items if any(not m.run.contains(item.example.id) for m in members)]
    label = f"{first.label.split()[0]}, {len(members)} jobs"
    with routed(loaded.model):
        for _ in progress(_records(members, pending, loaded), label, pending, first.settings.progress):
            pass
    for member in members:
        member.run.note(backends=ops.used_backends(), **member.runner.notes)


def _records(members: Sequence[_Member], pending: Sequence[Item], loaded: LoadedModel) -> Iterator[Record]:
    """Runs every pending item for every member that lacks it; yields one record per item, for the bar."""
    for item in pending:
        asking = [member for member in members if not member.run.contains(item.example.id)]
        began = perf_counter()
        context = item.prompt.split if asking[0].job.settings.protocol == "context" else len(item.prompt.ids)
        ids = torch.tensor([item.prompt.ids], device=loaded.model.device)
        caches, logits = _prefill(asking, ids, context, item.new_tokens)
        for place, member in enumerate(asking):
            made = member.runner.engine.complete(
                caches.pop(0), logits, ids[:, context:], began=began, **member.runner.ending([item], item.new_tokens)
            )
            record = member.runner.record(item, made, 0)
            member.run.append(record)
            if not place:
                shown = record
        yield shown


def _prefill(asking: Sequence[_Member], ids: Tensor, context: int, new_tokens: int) -> tuple[list[KVCache], Tensor]:
    """One cache per member, all filled by one prefill of the first `context` tokens, and the last logits [1 V]."""
    engine = asking[0].runner.engine
    request = engine.attachment.request(capacity=ids.shape[1] + new_tokens)
    plain = replace(request, budget=None, placement="device")
    lead = [_Fan(spec, plain, Full()) for spec in engine.attachment.specs]
    shared: list[DenseLayer] = list(lead)
    caches = [member.runner.engine.cache(ids, new_tokens, shared) for member in asking]
    for place, layer in enumerate(lead):
        layer.followers = [cache.layers[place] for cache in caches]
    front = KVCache(lead, request.capacity)
    logits = engine.prefill(front, ids[:, :context])
    for cache in caches:
        cache.num_tokens = front.num_tokens
    for layer in lead:
        layer.followers = ()
    return caches, logits
