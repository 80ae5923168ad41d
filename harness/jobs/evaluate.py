"""Runs jobs from beginning to end: refuse what does not fit into memory, open the run folders, load
the model, attach the methods, run the examples that are missing, record them, write summaries.

evaluate(PQCache(...), Niah(...), SmolLM2(), budget=0.2).summary["score"]

An interrupted run resumes here: `_open` opens its folder, and `_OpenRun.pending` lists only the
examples that the folder has no record of yet. How an example becomes an answer is in runner.py.

Jobs run in groups. Under `shared_prefill=true` all jobs whose methods prefill as Full does form one
group; any other job is a group by itself. An error of one job leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import Any

from evals.base import Task
from harness.config.errors import is_memory, own_line, sentence
from harness.config.settings import Settings, SettingsError
from harness.engine.cache import KVCache
from harness.engine.hf import routed
from harness.jobs.examples import PreparedExample, by_context, room
from harness.jobs.job import Job, Presets
from harness.jobs.memory import conversation_bytes
from harness.jobs.prefill import Prefilled, SharedPrefill, Usage
from harness.jobs.questions import Failed, let_go, refuse_to_go_on
from harness.jobs.runner import Runner
from harness.models.base import LoadedModel, ModelSource
from harness.models.remote import RemoteModel
from harness.results.compared import averages
from harness.results.provenance import provenance
from harness.results.records import LeftOut, Record
from harness.results.run_folder import SETTINGS, Run, StoredRun, read_records
from harness.terminal.notices import lasting_output, say_once, warn
from harness.terminal.progress import announce, progress
from methods.base import AttnInput, KVLayer, LayerSpec, Method, refuse_other_than_method
from methods.layers.returned import unchanged

# settings that `python -m harness` reads before it runs jobs
OF_COMMANDS = ("dry_run", "wandb.project")
FAILED_BATCHES = 3  # that end a run in which nothing succeeds
OnError = Callable[[Exception], None]


@lasting_output()
def evaluate(
    method: Method,
    task: Task,
    model: ModelSource,
    settings: Settings | None = None,
    *,
    presets: Presets | None = None,
    **changes: Any,
) -> StoredRun:
    """Run `task` with `model` under `method`, and also under Full (dense attention) for comparison,
    unless `baseline=off`. Return the method's run, as its folder holds it.

    `changes` are fields of `Settings`. `presets`: the names that tables give method, task and
    model, in place of the names of their modules. The same call again finds the finished run; an
    interrupted one goes on where it stopped.
    """
    refuse_other_than_method(method)
    asked = replace(settings or Settings(), **changes)
    for name in OF_COMMANDS:
        if (value := attrgetter(name)(asked)) != attrgetter(name)(Settings()):
            raise SettingsError(
                f"{name}={value} is for the command line, and evaluate does not read it: leave it out."
            )
    job = Job.plan(method, task, model, asked, presets=presets)
    job.require_known()
    return evaluate_together([job])[-1]


@lasting_output()
def evaluate_together(jobs: Sequence[Job], on_error: OnError | None = None) -> list[StoredRun]:
    """Run jobs, and for each the job of Full (dense attention) that it is compared with, and return
    the finished runs as their folders hold them. Under `shared_prefill=true` the jobs must have the
    same prompts.

    A job that fails (Full is one, too) is missing from the result and leaves the others alone. Its
    error goes to `on_error`; without `on_error`, the first error is raised after the last job."""
    errors = list[Exception]()
    report = on_error or errors.append
    groups: dict[str, dict[Path, Job]] = {}  # jobs that run together, each folder once
    for job in jobs:
        for each in ([job.full] if job.full and job.settings.baseline == "run" else []) + [job]:
            name = "shared" if each.settings.shared_prefill else str(each.folder)
            groups.setdefault(name, {}).setdefault(each.folder, each)
    runs: dict[Path, StoredRun] = {}
    for group in groups.values():
        with reporting(report):
            for job in _run_group(list(group.values()), report):
                full = job.full
                runs[job.folder] = job.stored(
                    (runs.get(full.folder) or full.finished()) if full else None
                )
    if errors:
        raise errors[0]
    return list(runs.values())


@contextmanager
def reporting(report: OnError) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        report(error)


def _run_group(jobs: Sequence[Job], on_error: OnError) -> list[Job]:
    """Run the examples that the folders of a group of jobs lack, and return the jobs that are
    complete afterwards. After Ctrl-C or an error the same command continues from the folders."""
    if unfinished := [job for job in jobs if not job.is_done()]:
        unfinished[0].refuse_memory(unfinished[1:])
    with ExitStack() as stack:
        runs = []
        # so that two processes do not wait for each other
        for job in sorted(jobs, key=lambda job: job.folder):
            with reporting(on_error):
                runs.append(_open(job, stack, on_error))
        lacking = [run for run in runs if run.pending]
        for run in runs:
            if not run.pending:
                run.close("complete")  # before anything can fail
        if lacking:
            with _failing(*lacking):
                _generate(lacking)
        for run in lacking:
            if not run.failed:
                run.end()
    complete = {run.folder for run in runs if run.info["status"] == "complete"}
    return [job for job in jobs if job.folder in complete]


def _open(job: Job, stack: ExitStack, on_error: OnError) -> _OpenRun:
    """Open the folder of a job for writing; examples that it holds already are not run again. If
    another process is running the same job, wait for it and use what it recorded."""
    job.remove_leftovers()
    root = Path(job.settings.results.root)
    run = stack.enter_context(_OpenRun.open(root, job.config, job.identity, *job.names, wait=True))
    run.job, run.on_error = job, on_error
    run.complement(**job.facts())
    run.append_left_out(job.prompts.left_out)
    announce(job.label, job.folder, len(job.items) - len(run.pending), len(job.items))
    begun_without = run.info[SETTINGS].get("likelihood") == "off"
    if job.settings.measures_likelihood and begun_without and len(run.pending) < len(job.items):
        say_once(
            f"{job.folder} was begun with likelihood=off, so its finished examples have no likelihood: delete that "
            "folder or name another results.root to measure it"
        )
    return run


def _generate(runs: Sequence[_OpenRun]) -> None:
    """Load the model, attach the methods, and run every example that one of the runs lacks."""
    first = runs[0].job
    loaded = None if isinstance(first.model, RemoteModel) else first.load()
    with ExitStack() as runners, routed(loaded.model) if loaded else nullcontext():
        for run in runs:
            with _failing(run):
                run.attach(loaded, runners)
        pending = [item for item in first.items if any(run.lacks(item) for run in runs)]
        # these last
        pending.sort(key=lambda item: any(item.example.id in run.failed_before for run in runs))
        tokens = [item.prompt_tokens for item in pending]
        label = first.label if len(runs) == 1 else f"{first.label.split()[0]}, {len(runs)} jobs"
        records = (
            _share_prefills(runs, pending)
            if first.settings.shared_prefill
            else _run_alone(runs[0], pending)
        )
        found = len(first.items) - len(pending)
        for _ in progress(
            records, label, tokens, size=lambda record: record.prompt_tokens, before=found
        ):
            pass


class _OpenRun(Run):
    """The run of a job while it is in progress: its folder, open for writing, and the `Runner` that
    answers its examples once the model is loaded."""

    job: Job
    on_error: OnError
    runner: Runner  # once the model is there

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.tried: set[str] = set()  # ids of this session's examples that failed
        # of these; its frames may hold a cache, so only one is kept
        self.last_error: Exception | None = None
        # why it has no cache of the prompt that is prefilled for several
        self.prefill_error: Exception | None = None

    @property
    def failed(self) -> bool:
        return bool(self.info["status"] == "failed")

    @property
    def pending(self) -> list[PreparedExample]:
        return [item for item in self.job.items if not self.contains(item.example.id)]

    def lacks(self, item: PreparedExample) -> bool:
        """Return True if the example is still to be run: the folder has no record of it, and it has
        not failed since this process opened the folder."""
        return not (self.failed or self.contains(item.example.id) or item.example.id in self.tried)

    def attach(self, loaded: LoadedModel | None, stack: ExitStack) -> None:
        """Pair the method with the loaded model, which prepares the method (it may calibrate
        itself), and make the runner that answers examples with the two. Where a server runs the model, there is
        none here, and the runner asks that server. `stack` closes the runner later, even after an error."""
        job = self.job
        self.note(provenance=provenance(job.settings.device), **job.facts())
        if loaded is None:
            assert isinstance(job.model, RemoteModel)
            self.runner = job.model.runner(job.task, job.settings)
            return
        if (checked := job.checked(loaded)) is not None:
            self.note(model_check=checked)
        with Usage(loaded.model.device) as usage:
            attachment = job.attachment(loaded, self.info)
        self.note(device_map=_placed(attachment.model_specs))
        if measured := job.method.measured(attachment.prepared):
            self.note(measured=dict(measured))
        self.note(prepare_s=None if attachment.prepared is None else attachment.prepare_s)
        self.runner = Runner(job.task, job.settings, job.folder, attachment, loaded)
        stack.callback(self._close_runner)
        self.runner.used(usage.backends)
        self.runner.kept.expect(
            conversation_bytes(job.model.describe(), job.settings, self.pending)
        )

    def _close_runner(self) -> None:
        with _failing(self):
            self.runner.close()

    def answers(
        self, items: Iterable[PreparedExample], prefilled: dict[str, Prefilled] | None = None
    ) -> Iterator[Record | LeftOut]:
        """Run `items` and yield their records as they end, each after it has been written to disk.
        `prefilled`: prompts that have been prefilled already, by the example's id."""
        for answer in self.runner.answers(items, prefilled):
            if isinstance(answer, Failed):
                yield self.give_up(answer)
                continue
            try:
                record = self.runner.record(answer)
                # first, so that no kill leaves a record without them
                self.note(**self.runner.notes)
                self.append(record)
            except Exception as error:  # of the task's score
                yield self.give_up(Failed(answer.item, error))
            else:
                yield record

    def give_up(self, failed: Failed) -> LeftOut:
        """Record that an example failed, and return that record. Raise its error, which ends the
        run, if as many as FAILED_BATCHES batches have failed and none has an answer."""
        example, error, label = failed.item.example, failed.error, self.job.label
        why = f"{type(error).__name__}: {sentence(error)}{f' ({line})' if (line := own_line(error)) else ''}"
        item = failed.item
        record = LeftOut(example.id, example.group, item.sha256, item.prompt_tokens, "error", why)
        self.note(**self.runner.notes)
        self.append_failed(record)
        self.tried.add(example.id)
        self.last_error = error
        warn(f"{label}: example {example.id} failed ({why}).")
        if len(self.tried) >= FAILED_BATCHES * self.job.settings.batch and not self.has_records:
            warn(f"{label}: the first {len(self.tried)} examples failed, which ends the run.")
            raise error
        return record

    def end(self) -> None:
        """Close the run after all its examples have been tried: as failed if none of them
        succeeded, otherwise as complete."""
        if self.last_error is not None and not self.has_records:
            warn(f"{self.job.label}: every example failed.")
            self.fail(self.last_error)
            self.on_error(self.last_error)
            return
        self.info["averages"] = averages(self.job.task, read_records(self.folder))
        self.close("complete")
        refused = sum(example.kind == "error" for example in self.job.prompts.left_out)
        if failed := len(self.tried) + refused:
            warn(
                f"{self.job.label}: complete with {failed} failed; the same command tries them again."
            )


def _placed(specs: Sequence[LayerSpec]) -> dict[str, str] | None:
    """Return which layers lie on each device, as {device: "0 to 15"}; None if all lie on one."""
    layers: dict[str, list[int]] = {}
    for index, spec in enumerate(specs):
        layers.setdefault(str(spec.device), []).append(index)
    several = {device: f"{numbers[0]} to {numbers[-1]}" for device, numbers in layers.items()}
    return several if len(several) > 1 else None


@contextmanager
def _failing(*runs: _OpenRun) -> Iterator[None]:
    """Catch an error inside the `with`, mark these runs as failed, and report it; other runs go
    on."""
    try:
        yield
    except Exception as error:
        for run in runs:
            if not run.failed:
                run.fail(error)
        runs[0].on_error(error)


def _run_alone(run: _OpenRun, pending: Sequence[PreparedExample]) -> Iterator[Record | LeftOut]:
    if not run.failed:
        with _failing(run):
            run.runner.warm_up(pending)
            yield from run.answers(pending)


def _share_prefills(
    runs: Sequence[_OpenRun], pending: Sequence[PreparedExample]
) -> Iterator[Record | LeftOut]:
    """Run `pending` for several runs under `shared_prefill=true`, and yield the records of all
    runs' examples as they come. Each context is prefilled once for all runs that lack an example on
    it; then the runs answer one after the other, and each run's caches are dropped when it has
    answered."""
    started = [run for run in runs if not run.failed]
    if not started:
        return
    settings, stage = started[0].job.settings, started[0].runner.engine.attachment.stage
    contexts = list(by_context(pending, stage, shared=settings.questions == "shared"))
    for start in range(0, len(contexts), settings.batch):
        batch = contexts[start : start + settings.batch]
        prefilled: dict[_OpenRun, dict[str, Prefilled]] = {run: {} for run in started}
        for items in batch:
            asking = [run for run in started if any(map(run.lacks, items))]
            with _failing(*asking):
                _prefill(asking, items, prefilled)
        records: dict[str, Record | LeftOut] = {}
        for run in started:
            with _failing(run):
                lacking = [item for items in batch for item in items if run.lacks(item)]
                records |= {
                    record.id: record for record in run.answers(lacking, prefilled.pop(run))
                }
        yield from records.values()


def _prefill(
    asking: Sequence[_OpenRun],
    items: Sequence[PreparedExample],
    prefilled: dict[_OpenRun, dict[str, Prefilled]],
) -> None:
    """Prefill the context that `items` share, once for all `asking` runs, and put each run's filled
    cache into `prefilled`, under the id of the first example that the run lacks. If a run's method
    cannot take in the prompt, `items` fail in that run alone; if the prefill itself fails, they fail
    in all runs. If memory runs out, each run prefills them again by itself, where fewer caches are
    held."""
    if not asking:
        return
    first, caches = asking[0].runner, dict[_OpenRun, KVCache]()
    for run in asking:
        run.prefill_error = None

    def absorb(run: _OpenRun, layer: KVLayer, x: AttnInput) -> None:
        if run.prefill_error is None:
            try:
                # until the run's first prompt is sealed, as it checks what methods return
                with (
                    unchanged(layer, x) if "first" in layer.cache.checks.pending else nullcontext()
                ):
                    layer.absorb(x)
            except Exception as error:
                run.prefill_error = error

    try:
        with Usage(first.device) as usage:
            began = perf_counter()
            ids, context = first.prompt(items[0])
            shared = SharedPrefill(first.engine, ids, room(items) - ids.shape[1])
            for run in asking:
                try:
                    caches[run] = shared.cache(run.runner.engine, partial(absorb, run))
                except Exception as error:
                    run.prefill_error = error
            logits = shared.run(context)
    except Exception as error:
        for run in asking:
            run.prefill_error = run.prefill_error or error
    for run in asking:
        lacking = list(filter(run.lacks, items))
        if run.prefill_error is None:
            prefilled[run][lacking[0].example.id] = Prefilled(caches[run], logits, began, usage)
        elif is_memory(run.prefill_error):
            let_go(run.prefill_error)
        else:
            with _failing(run):
                refuse_to_go_on(run.prefill_error)
                for item in lacking:
                    run.give_up(Failed(item, run.prefill_error))
