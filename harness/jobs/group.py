"""Jobs that run together, from their open folders to their records.

All share one prefill, or there is a single one with a prefill of its own. Folders, locks, errors and what is measured
are the same for both. An error of one job leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from harness.config.errors import own_line, sentence
from harness.engine.cache import KVCache
from harness.engine.hf import routed
from harness.jobs.job import Job
from harness.jobs.planning.capacity import of_conversations
from harness.jobs.planning.items import Item, by_context, room
from harness.jobs.questions import Failed
from harness.jobs.runner import Runner
from harness.jobs.shared_prefill import Prefilled, SharedPrefill
from harness.jobs.usage import Usage
from harness.models.base import LoadedModel
from harness.results.provenance import provenance
from harness.results.records import FailedExample, Record
from harness.results.run_folder import Run
from harness.terminal.notices import warn
from harness.terminal.progress import progress
from methods.base import AttnInput, KVLayer

Items = Sequence[Item]
FAILED_BATCHES = 3  # that end a run, one after the other
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
    assert len({job.identity["prompts"] for job in jobs}) == 1
    if unfinished := [job for job in jobs if not job.is_done()]:
        unfinished[0].refuse_memory(unfinished[1:])
    with ExitStack() as stack:
        runs = list(_opened(jobs, stack, on_error))
        lacking = [run for run in runs if run.pending]
        for run in runs:
            if not run.pending:
                run.close("complete")  # before anything can fail
        with _attempt(*lacking):
            _generate(lacking)
        for run in lacking:
            if not run.failed:
                run.end()
    complete = {run.folder for run in runs if run.info["status"] == "complete"}
    return [job for job in jobs if job.folder in complete]


def _opened(jobs: Sequence[Job], stack: ExitStack, on_error: OnError) -> Iterator[_Run]:
    """Waits for other processes that are at the same runs; what they finish need not be run again. In the order of
    their folders, so that two that wait for each other's do not lock up."""
    for job in sorted(jobs, key=lambda job: job.folder):
        with reporting(on_error):
            job.remove_leftovers()
            root = Path(job.settings.results.root)
            run = stack.enter_context(_Run.open(root, job.config, job.identity, *job.names, wait=True))
            run.job, run.on_error = job, on_error
            run.complement(**job.facts())
            job.announce(run.pending)
            yield run


class _Run(Run):
    """The run of one of these jobs: its folder, and what makes its records."""

    job: Job
    on_error: OnError
    runner: Runner  # once the model is there
    in_a_row = 0  # examples that failed since the last that did not

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.tried: set[str] = set()  # ids of this session's examples that failed
        self.last_error: Exception | None = None  # of these; its frames may hold a cache, so only one is kept
        self.prefill_error: Exception | None = None  # why it has no cache of the prompt that is prefilled for several

    @property
    def failed(self) -> bool:
        return bool(self.info["status"] == "failed")

    @property
    def pending(self) -> list[Item]:
        return self.job.pending(self)

    def lacks(self, item: Item) -> bool:
        """Whether it is still to be tried in this session."""
        return not (self.failed or self.contains(item.example.id) or item.example.id in self.tried)

    def start(self, loaded: LoadedModel, stack: ExitStack) -> None:
        """The runner is closed with `stack`, whatever goes wrong behind it."""
        job = self.job
        self.note(provenance=provenance(job.settings.device), **job.facts())
        with Usage(loaded.model.device) as usage:
            attachment = job.attachment(loaded, self.info)
        if measured := job.method.measured(attachment.prepared):
            self.note(measured=dict(measured))
        self.note(prepare_s=None if attachment.prepared is None else attachment.prepare_s)
        self.runner = Runner(job.task, job.settings, job.folder, attachment, loaded)
        stack.callback(self._close_runner)
        self.runner.used(usage.backends)
        self.runner.kept.expect(of_conversations(job.model.describe(), job.settings, self.pending))

    def _close_runner(self) -> None:
        with _attempt(self):
            self.runner.close()

    def absorb(self, layer: KVLayer, x: AttnInput) -> None:
        if self.prefill_error is None:
            try:
                layer.absorb(x)
            except Exception as error:
                self.prefill_error = error

    def answers(
        self, items: Iterable[Item], prefilled: dict[str, Prefilled] | None = None
    ) -> Iterator[Record | FailedExample]:
        """As they end, each once it is on disk."""
        for answer in self.runner.answers(items, prefilled):
            if isinstance(answer, Failed):
                yield self.give_up(answer)
                continue
            record = self.runner.record(answer)
            self.note(**self.runner.notes)  # first, so that no kill leaves a record without them
            self.append(record)
            self.in_a_row = 0
            yield record

    def give_up(self, failed: Failed) -> FailedExample:
        """Write down that an example failed. Raise its error where as many batches in a row have failed as end a
        run."""
        example, error = failed.item.example, failed.error
        why = f"{type(error).__name__}: {sentence(error)}{f' ({line})' if (line := own_line(error)) else ''}"
        tokens = sum(len(turn.prompt.ids) for turn in failed.item.turns)
        record = FailedExample(example.id, example.group, failed.item.sha256, tokens, why)
        self.note(**self.runner.notes)
        self.append_failed(record)
        self.tried.add(example.id)
        self.last_error = error
        self.in_a_row += 1
        warn(f"{self.job.label}: example {example.id} failed ({why}).")
        if self.in_a_row >= FAILED_BATCHES * self.job.settings.batch:
            warn(f"{self.job.label}: {self.in_a_row} examples in a row failed, which ends the run.")
            raise error
        return record

    def end(self) -> None:
        """All examples have been tried."""
        if self.last_error is not None and not self.records():
            warn(f"{self.job.label}: every example failed.")
            self.fail(self.last_error)
            self.on_error(self.last_error)
        else:
            self.close("complete")


@contextmanager
def _attempt(*runs: _Run) -> Iterator[None]:
    """What goes wrong inside fails these jobs, and no other."""
    try:
        yield
    except Exception as error:
        for run in runs:
            if not run.failed:
                run.fail(error)
        runs[0].on_error(error)


def _generate(runs: Sequence[_Run]) -> None:
    """What the runs lack."""
    if not runs:
        return
    first = runs[0].job
    loaded = first.load()
    with ExitStack() as runners:
        for run in runs:
            with _attempt(run):
                run.start(loaded, runners)
        pending = [item for item in first.items if any(run.lacks(item) for run in runs)]
        tokens = [sum(len(turn.prompt.ids) for turn in item.turns) for item in pending]
        label = first.label if len(runs) == 1 else f"{first.label.split()[0]}, {len(runs)} jobs"
        with routed(loaded.model):
            made = _records(runs, pending)
            for _ in progress(made, label, tokens, size=lambda record: record.prompt_tokens):
                pass


def _records(runs: Sequence[_Run], pending: Items) -> Iterator[Record | FailedExample]:
    """Yields one record per item of `pending`, whoever made it, for the bar."""
    settings = runs[0].job.settings
    if settings.shared_prefill:
        started = [run.runner for run in runs if not run.failed]
        if not started:
            return
        stage = started[0].engine.attachment.stage
        groups = list(by_context(pending, stage)) if settings.questions == "shared" else [[item] for item in pending]
        for start in range(0, len(groups), settings.batch):
            yield from _answers(runs, groups[start : start + settings.batch]).values()
        return
    [run] = runs
    if not run.failed:
        with _attempt(run):
            run.runner.warm_up(pending)
            yield from run.answers(pending)


def _answers(runs: Sequence[_Run], batch: Sequence[Items]) -> dict[str, Record | FailedExample]:
    """By the id of the item. batch: examples by context, each with one prefill for all runs that lack some."""
    waiting = _prefilled(runs, batch)
    made: dict[str, Record | FailedExample] = {}
    while waiting:  # caches are freed behind their answers
        run, prefilled = waiting.pop(0)
        with _attempt(run):
            items = [item for group in batch for item in group if run.lacks(item)]
            made |= {record.id: record for record in run.answers(items, prefilled)}
    return made


def _prefilled(runs: Sequence[_Run], batch: Sequence[Items]) -> list[tuple[_Run, dict[str, Prefilled]]]:
    """By the first example on a context that each run lacks, but for runs that have failed meanwhile."""
    found: dict[_Run, dict[str, Prefilled]] = {run: {} for run in runs}
    for group in batch:
        asking = [run for run in runs if any(map(run.lacks, group))]
        with _attempt(*asking):
            for run, prefilled in _prefill(asking, group):
                found[run][next(filter(run.lacks, group), group[0]).example.id] = prefilled
    return [(run, prefilled) for run, prefilled in found.items() if prefilled and not run.failed]


def _prefill(asking: Sequence[_Run], items: Items) -> Iterator[tuple[_Run, Prefilled]]:
    """One for all of them. A run that cannot take it in fails in `items`, and all do where the prefill itself fails."""
    if not asking:
        return
    first, caches = asking[0].runner, dict[_Run, KVCache]()
    for run in asking:
        run.prefill_error = None
    try:
        with Usage(first.device) as usage:
            began = perf_counter()
            ids, context = first.prompt(items[0])
            shared = SharedPrefill(first.engine, ids, room(items) - ids.shape[1])
            for run in asking:
                try:
                    caches[run] = shared.cache(run.runner.engine, run.absorb)
                except Exception as error:
                    run.prefill_error = error
            logits = shared.run(context)
    except Exception as error:
        for run in asking:
            run.prefill_error = run.prefill_error or error
    for run in asking:
        if run.prefill_error is None:
            yield run, Prefilled(caches[run], logits, began, usage)
            continue
        with _attempt(run):
            for item in filter(run.lacks, items):
                run.give_up(Failed(item, run.prefill_error))
