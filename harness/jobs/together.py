"""`shared_prefill=true`: all jobs of a sweep take their prompts from one prefill.

Methods whose prompt outputs are Full's differ only in what they keep and read; so Full attends once per prompt and
every method absorbs the same keys and values. Scores and fidelity are those of separate runs; the cost of the prefill
is not paid by the method that is scored, so the runs are stamped `simulated` and their speed cells stay empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from evals.base import Task
from harness.config.settings import Settings, SettingsError
from harness.engine.cache import KVCache
from harness.engine.hf import routed
from harness.jobs.preparation import Item, limit_threads
from harness.jobs.progress import progress
from harness.jobs.run import Evaluation, Job, Presets, full_presets
from harness.jobs.runner import Runner, load
from harness.models.base import LoadedModel, ModelSource
from harness.results.records import Record
from harness.results.store import Run
from kernels import ops
from methods.base import AttnInput, CacheState, KVLayer, Method
from methods.full import Full
from methods.layers import DenseLayer

OWN = {"budget", "budget_rule", "align", "comm", "windows", "reuse_steps", "placement"}  # jobs may differ in these


class Wanted(NamedTuple):
    """One job of the sweep."""

    method: Method
    task: Task
    model: ModelSource
    settings: Settings
    presets: Presets | None = None


OnError = Callable[[Exception], None]


class _Member:
    """A job of the group with its open run. What goes wrong in an `attempt` fails this job alone."""

    runner: Runner  # once the model is there

    def __init__(self, job: Job, run: Run, on_error: OnError) -> None:
        self.job, self.run, self._on_error = job, run, on_error
        self.failed = False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failed = True
            self.run.fail(error)
            self._on_error(error)

    def lacks(self, item: Item) -> bool:
        return not self.failed and not self.run.contains(item.example.id)

    def prepare(self, loaded: LoadedModel) -> None:
        self.job.note(self.run)
        self.runner = Runner(self.job, self.job.attachment(loaded, self.run), loaded)


class _Fan(DenseLayer):
    """Full attention whose inputs others absorb as well."""

    followers: Sequence[tuple[_Member, KVLayer]] = ()

    def absorb(self, x: AttnInput) -> None:
        super().absorb(x)
        for member, follower in self.followers:
            if not member.failed:
                with member.attempt():
                    follower.absorb(x)


def _raise(error: Exception) -> None:
    raise error


def evaluate_together(wanted: Sequence[Wanted], on_error: OnError = _raise) -> list[Evaluation]:
    """The jobs' evaluations; where tasks or models differ, one kind after the other.

    A job that fails is handed to `on_error`, has no evaluation, and leaves the others alone.
    """
    groups: dict[str, list[Job]] = {}
    for one in wanted:
        try:
            _join(groups, one)
        except Exception as error:
            on_error(error)
    made = []
    for jobs in groups.values():
        try:
            made += _evaluate(jobs, on_error)
        except Exception as error:
            on_error(error)
    return made


def _join(groups: dict[str, list[Job]], wanted: Wanted) -> None:
    """Puts a job, and Full beside it, to those that can share its prefill."""
    method, task, model, settings, presets = wanted
    refuse(method, settings)
    key = str((task, model, {name: value for name, value in asdict(settings).items() if name not in OWN}))
    known = groups.get(key, [])
    job = Job.plan(method, task, model, settings, known[0].items if known else None, presets)
    jobs = groups.setdefault(key, [])
    if settings.baseline == "run" and not jobs:
        jobs.append(Job.plan(Full(), task, model, settings, job.items, full_presets(presets)))
    if job.folder not in [known.folder for known in jobs]:
        jobs.append(job)


def refuse(method: Method, settings: Settings) -> None:
    """What cannot share a prefill, by name."""
    if not method.dense_prefill:
        name = type(method).__name__
        raise SettingsError(f"{name} does not prefill densely and cannot share a prefill: use shared_prefill=false.")
    if settings.batch != 1:
        raise SettingsError(f"shared_prefill=true runs one example at a time: use batch=1 (it is {settings.batch}).")


def _evaluate(jobs: Sequence[Job], on_error: OnError) -> list[Evaluation]:
    ordered = sorted(
        jobs, key=lambda job: job.folder
    )  # two processes that wait for each other's folders do not lock up
    for job in jobs:
        job.refuse_memory()
    with ExitStack() as closing:
        members = [_Member(job, closing.enter_context(job.open()), on_error) for job in ordered]
        for member in members:
            member.job.announce(member.job.pending(member.run))
        _generate(members)
        for member in members:
            if not member.failed:
                member.run.close("complete")
    failed = {member.job.folder for member in members if member.failed}
    return _beside_full([job for job in jobs if job.folder not in failed])


def _beside_full(jobs: Sequence[Job]) -> list[Evaluation]:
    alone = [job.evaluation() for job in jobs]
    full = next((one for job, one in zip(jobs, alone, strict=True) if isinstance(job.method, Full)), None)
    others = [None if one is full else full for one in alone]
    return [job.evaluation(other) for job, other in zip(jobs, others, strict=True)]


def _generate(members: Sequence[_Member]) -> None:
    """What the members lack, of each prompt one prefill."""
    members = [member for member in members if member.job.pending(member.run)]
    if not members:
        return
    first = members[0].job
    limit_threads(first.settings)
    loaded = load(first.model, first.settings.dtype, first.settings.device)
    for member in members:
        with member.attempt():
            member.prepare(loaded)
    pending = [item for item in first.items if any(member.lacks(item) for member in members)]
    label = f"{first.label.split()[0]}, {len(members)} jobs"
    with routed(loaded.model):
        for _ in progress(_records(members, pending, loaded), label, pending, first.settings.progress):
            pass


def _records(members: Sequence[_Member], pending: Sequence[Item], loaded: LoadedModel) -> Iterator[Record]:
    """Runs every pending item for every member that lacks it; yields one record per item, for the bar."""
    for item in pending:
        asking = [member for member in members if member.lacks(item)]
        made = list(_answers(asking, item, loaded)) if asking else []
        yield from made[:1]


def _answers(asking: Sequence[_Member], item: Item, loaded: LoadedModel) -> Iterator[Record]:
    began = perf_counter()
    context = item.prompt.split if asking[0].job.settings.protocol == "context" else len(item.prompt.ids)
    ids = torch.tensor([item.prompt.ids], device=loaded.model.device)
    ops.forget_used()
    caches, logits = _prefill(asking, ids, context, item.new_tokens)
    for member, _ in caches:
        member.runner.used(ops.used_backends())
    while caches:  # each is freed behind its answer
        member, cache = caches.pop(0)
        with member.attempt():
            ops.forget_used()
            ending = member.runner.ending([item], item.new_tokens)
            made = member.runner.engine.complete(cache, logits, ids[:, context:], began=began, **ending)
            member.runner.used(ops.used_backends())
            record = member.runner.record(item, made, 0)
            member.run.note(**member.runner.notes)
            member.run.append(record)
            yield record


def _prefill(
    asking: Sequence[_Member], ids: Tensor, context: int, new_tokens: int
) -> tuple[list[tuple[_Member, KVCache]], Tensor]:
    """One cache per member, all filled by one prefill of the first `context` tokens, and the last logits [1 V]."""
    engine = asking[0].runner.engine
    request = engine.attachment.request(capacity=ids.shape[1] + new_tokens)
    state = CacheState(replace(request, budget=None, placement="device"))
    lead = [_Fan(spec, state, Full()) for spec in engine.attachment.specs]
    shared: list[DenseLayer] = list(lead)
    caches = []
    for member in asking:
        with member.attempt():
            caches.append((member, member.runner.engine.cache(ids, new_tokens, shared)))
    for place, layer in enumerate(lead):
        layer.followers = [(member, cache.layers[place]) for member, cache in caches]
    front = KVCache(lead, state)
    logits = engine.prefill(front, ids[:, :context])
    for _, cache in caches:
        cache.num_tokens = front.num_tokens
    for layer in lead:
        layer.followers = ()
    return [(member, cache) for member, cache in caches if not member.failed], logits
