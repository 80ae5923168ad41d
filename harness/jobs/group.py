"""Jobs that run together, from their open folders to their records.

All share one prefill, or there is a single one with a prefill of its own. Folders, locks, errors and what is measured
are the same for both. An error of one job leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from time import perf_counter

import torch

from harness.engine.hf import routed
from harness.jobs.job import Job
from harness.jobs.planning.items import Item, by_context, room
from harness.jobs.runner import Runner, load
from harness.jobs.shared_prefill import Prefilled, SharedPrefill
from harness.jobs.usage import Usage
from harness.models.base import LoadedModel
from harness.results.records import Record
from harness.results.store import Run
from harness.terminal.progress import progress
from methods.base import AttnInput, KVLayer

Items = Sequence[Item]
OnError = Callable[[Exception], None]


@contextmanager
def reporting(report: OnError) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        report(error)


def run_group(jobs: Sequence[Job], on_error: OnError) -> list[Job]:
    """Generates what is not there yet; the jobs that are complete then. Ctrl-C and errors leave folders that the same
    command continues."""
    if unfinished := [job for job in jobs if not job.is_done()]:
        unfinished[0].refuse_memory(unfinished[1:])
    with ExitStack() as stack:
        members = list(_opened(jobs, stack, on_error))
        lacking = [member for member in members if member.pending]
        for member in members:
            if not member.pending:
                member.complete()  # before anything can fail
        with _attempt(*lacking):
            _generate(lacking)
        for member in lacking:
            if not member.failed:
                member.complete()
    complete = {member.job.folder for member in members if member.is_complete}
    return [job for job in jobs if job.folder in complete]


def _opened(jobs: Sequence[Job], stack: ExitStack, on_error: OnError) -> Iterator[_Member]:
    """In the order of their folders, so that two processes that wait for each other's do not lock up."""
    for job in sorted(jobs, key=lambda job: job.folder):
        with reporting(on_error):
            yield _Member(job, stack.enter_context(job.open()), on_error)


class _Member:
    """A job of the group with its open run."""

    runner: Runner  # once the model is there
    failed = is_complete = False

    def __init__(self, job: Job, run: Run, on_error: OnError) -> None:
        self.job, self.run, self.on_error = job, run, on_error
        self._closing = ExitStack()
        run.complement(**job.facts())
        job.announce(self.pending)

    @property
    def pending(self) -> list[Item]:
        return self.job.pending(self.run)

    def lacks(self, item: Item) -> bool:
        return not self.failed and not self.run.contains(item.example.id)

    def complete(self) -> None:
        self.run.close("complete")
        self.is_complete = True

    def start(self, loaded: LoadedModel) -> None:
        job = self.job
        job.note(self.run)
        with Usage(loaded.model.device) as usage:
            attachment = job.attachment(loaded, self.run.info)
        if measured := job.method.measured(attachment.prepared):
            self.run.note(measured=dict(measured))
        self.run.note(prepare_s=None if attachment.prepared is None else attachment.prepare_s)
        runner = Runner(job.task, job.settings, job.folder, attachment, loaded)
        self.runner = self._closing.enter_context(closing(runner))
        self.runner.used(usage.backends)

    def stop(self) -> None:
        """Behind its last answer, or its failure."""
        with _attempt(self):
            self._closing.close()

    def absorb(self, layer: KVLayer, x: AttnInput) -> None:
        if not self.failed:
            with _attempt(self):
                layer.absorb(x)

    def answers(self, items: Iterable[Item], prefilled: dict[str, Prefilled] | None = None) -> Iterator[Record]:
        """As they end, each once it is on disk."""
        for answer in self.runner.answers(items, prefilled):
            record = self.runner.record(answer)
            self.run.note(**self.runner.notes)  # first, so that no kill leaves a record without them
            self.run.append(record)
            yield record


@contextmanager
def _attempt(*members: _Member) -> Iterator[None]:
    """What goes wrong inside fails these jobs, and no other."""
    try:
        yield
    except Exception as error:
        for member in members:
            if not member.failed:
                member.failed = True
                member.run.fail(error)
        members[0].on_error(error)


def _generate(members: Sequence[_Member]) -> None:
    """What the members lack."""
    if not members:
        return
    first = members[0].job
    if first.settings.threads is not None:
        torch.set_num_threads(first.settings.threads)
    loaded = load(first.model, first.settings.dtype, first.settings.device)
    for member in members:
        with _attempt(member):
            member.start(loaded)
    pending = [item for item in first.items if any(member.lacks(item) for member in members)]
    tokens = [sum(len(turn.prompt.ids) for turn in item.turns) for item in pending]
    label = first.label if len(members) == 1 else f"{first.label.split()[0]}, {len(members)} jobs"
    with routed(loaded.model):
        try:
            made = _records(members, pending)
            for _ in progress(made, label, tokens, first.settings.progress, size=lambda record: record.prompt_tokens):
                pass
        finally:
            for member in members:
                member.stop()


def _records(members: Sequence[_Member], pending: Items) -> Iterator[Record]:
    """Yields one record per item of `pending`, whoever made it, for the bar."""
    settings = members[0].job.settings
    if settings.shared_prefill:
        groups = list(by_context(pending)) if settings.questions == "shared" else [[item] for item in pending]
        for start in range(0, len(groups), settings.batch):
            yield from _answers(members, groups[start : start + settings.batch]).values()
        return
    [member] = members
    if not member.failed:
        with _attempt(member):
            member.runner.warm_up(pending)
            yield from member.answers(pending)


def _answers(members: Sequence[_Member], batch: Sequence[Items]) -> dict[str, Record]:
    """By the id of the item. batch: examples by context, each with one prefill for all members that lack some."""
    waiting = _prefilled(members, batch)
    made: dict[str, Record] = {}
    while waiting:  # caches are freed behind their answers
        member, prefilled = waiting.pop(0)
        with _attempt(member):
            items = [item for group in batch for item in group if member.lacks(item)]
            made |= {record.id: record for record in member.answers(items, prefilled)}
    return made


def _prefilled(members: Sequence[_Member], batch: Sequence[Items]) -> list[tuple[_Member, dict[str, Prefilled]]]:
    """By the first example on a context that each member lacks, but for members that have failed meanwhile."""
    found: dict[_Member, dict[str, Prefilled]] = {member: {} for member in members}
    for group in batch:
        asking = [member for member in members if any(map(member.lacks, group))]
        with _attempt(*asking):
            for member, prefilled in _prefill(asking, group):
                found[member][next(filter(member.lacks, group), group[0]).example.id] = prefilled
    return [(member, prefilled) for member, prefilled in found.items() if prefilled and not member.failed]


def _prefill(asking: Sequence[_Member], items: Items) -> Iterator[tuple[_Member, Prefilled]]:
    """One for all of them."""
    if not asking:
        return
    first = asking[0].runner
    caches = []
    with Usage(first.device) as usage:
        began = perf_counter()
        ids, context = first.prompt(items[0])
        shared = SharedPrefill(first.engine, ids, room(items) - ids.shape[1])
        for member in asking:
            with _attempt(member):
                caches.append((member, shared.cache(member.runner.engine, member.absorb)))
        logits = shared.run(context)
    for member, cache in caches:
        yield member, Prefilled(cache, logits, began, usage)
