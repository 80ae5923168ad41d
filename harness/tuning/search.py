"""Searches a method's own parameters at equal budget: one parameter after the other, on one half of the examples.

The best of many candidates scores too well on the examples that it was chosen by (the winner's
curse), so it is held against the start on the other half. Nothing is random, so the same command
finds the same parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from evals import stats
from evals.base import Task
from harness.config.catalogue import plain
from harness.config.errors import sentence
from harness.config.plugins import build, describe
from harness.config.settings import TUNING_SEED, CommonWindows, Settings, SettingsError
from harness.jobs.evaluate import evaluate_together, reporting
from harness.jobs.examples import PreparedExample, Prompts, prepare
from harness.jobs.job import Job, Presets
from harness.jobs.resolve import resolve
from harness.models.base import ModelSource
from harness.results.compared import for_statistics, mean_score, paired
from harness.results.fact import mean
from harness.results.provenance import git
from harness.results.run_folder import StoredRun
from harness.terminal.notices import say_once, warn
from harness.terminal.tables import probability, with_ci
from methods.base import Method

TOLERANCE = 0.02  # share by which the read tokens may exceed the budget
SAME_EXAMPLES = (
    "This task has the same examples whatever the seed, so its tables would be about what was tuned on: tune on "
    "another task (niah, ruler) and run the preset on this one."
)
Values = Mapping[str, tuple[Any, ...]]  # by parameter
Runs = dict[Method, StoredRun]


@dataclass(frozen=True)
class Search:
    """A search that has been checked and can run. `start`: the job of the method's present parameters on all examples
    of the tuning seed, which no reported table uses; `grids`: at least two values of each parameter, the start's
    among them; `choosing` and `held_out`: the halves of the examples to choose by and to report on."""

    start: Job
    grids: Values
    choosing: Sequence[PreparedExample]
    held_out: Sequence[PreparedExample]

    @classmethod
    def plan(
        cls,
        method: Method,
        task: Task,
        model: ModelSource,
        wanted: Settings,
        names: Presets,
        asked: Values,
    ) -> Search:
        """Plan a search. Method, task, model and settings are those of one run; its seed is
        replaced by the tuning seed. `names`: what the command line calls method, task and model;
        `asked`: the values to try by parameter; without any, those that the method declares."""
        # before its data are looked for; a task of a user's own is recognised by its examples
        if not task.seeded:
            raise SettingsError(SAME_EXAMPLES)
        settings = replace(
            wanted,
            seed=TUNING_SEED,
            shared_prefill=True,
            likelihood="off",
            comm=None,
            windows=CommonWindows(),
        )
        task.require(settings.data.folder())
        items = prepare(task, model, settings)
        usual = {
            item.sha256 for item in prepare(task, model, replace(settings, seed=Settings().seed))
        }
        if usual & {item.sha256 for item in items}:
            raise SettingsError(SAME_EXAMPLES)
        both = halves(items)
        resolved = resolve(wanted, method, model.describe())
        for note in resolved.notes:
            say_once(note)
        start = Job.plan(resolved.method, task, model, settings, Prompts(items), names)
        return cls(start, grids_of(start, asked), *both)

    def lines(self) -> Iterator[str]:
        """Yield lines that say what the search will try, on how many examples, and how many answers
        that takes at most."""
        yield f"{self.start.label}, {self.start.model.describe().name}"
        for name, values in self.grids.items():
            yield f"  {name}: {', '.join(map(plain, values))}"
        points = 1 + sum(len(values) - 1 for values in self.grids.values())
        answers = points * len(self.choosing) + 2 * len(self.held_out)
        yield f"examples of seed {TUNING_SEED}: {len(self.choosing)} to choose by, {len(self.held_out)} held out"
        yield (
            f"{points} points, then the best and the start: at most {answers} answers, with "
            f"baseline={self.start.wanted.baseline}; runs in {self.start.wanted.results.root}"
        )

    def best(self) -> tuple[Method, Runs]:
        """Return the best candidate on the examples to choose by, and all that ran there. Each parameter in turn takes
        its best value while the others stay. Of equal scores the present value wins, then the one with which least
        is read (in whole percents), then the first."""
        best, runs = self.start.method, Runs()
        for name, values in self.grids.items():
            warn(f"{name}: {len(values)} values, {len(self.choosing)} examples")
            candidates = list[Method]()
            for value in values:
                with reporting(leave_out):
                    candidates.append(replace(best, **{name: value}))  # type: ignore[type-var]
            runs |= self.run("choose", self.choosing, candidates)
            within = [method for method in runs if self.keeps_budget(method, runs)]
            ranks = {method: rank(runs[method], method == best) for method in within}
            best = min(ranks, key=ranks.__getitem__)
        return best, runs

    def run(
        self, part: str, items: Sequence[PreparedExample], candidates: Sequence[Method]
    ) -> Runs:
        """Run candidates on `items`, and return the runs by candidate. One that cannot run is said and left out,
        unless it is the start. `part` names a subfolder of results; what is finished there is only read."""
        start, results = self.start, self.start.wanted.results
        here = replace(start.wanted, results=replace(results, root=f"{results.root}/{part}"))
        jobs, errors = dict[Method, Job](), list[Exception]()
        for method in candidates:
            with reporting(errors.append):
                jobs[method] = Job.plan(
                    method, start.task, start.model, here, Prompts(items), start.presets
                )
        runs, waiting = dict[Path, StoredRun](), list(jobs.values())
        while waiting:
            together = fitting(waiting)
            runs |= {run.folder: run for run in evaluate_together(together, errors.append)}
            waiting = waiting[len(together) :]
        for error in errors:
            if start.method in candidates and (
                start.method not in jobs or jobs[start.method].folder not in runs
            ):
                raise error  # nothing can be compared with the start
            leave_out(error)
        return {method: runs[job.folder] for method, job in jobs.items() if job.folder in runs}

    def keeps_budget(self, method: Method, runs: Runs) -> bool:
        """Return True if a candidate reads no more of the prompt than the budget allows, or the
        start; else say so."""
        read, usual = (
            mean([record["attended_prompt"] for record in runs[one].records])
            for one in (method, self.start.method)
        )
        budget, records = self.start.budget, runs[method].records
        if budget is None or read is None or usual is None:
            return True
        dense = getattr(method, "dense_layers", ())
        layers = range(self.start.model.describe().num_whole_layers)
        lengths = [round(fmean(reply.sealed_at for reply in record.replies)) for record in records]
        allowed = fmean(n if i in dense else budget.tokens(n, i) for n in lengths for i in layers)
        if read <= max(allowed, usual) * (1 + TOLERANCE):
            return True
        most, whole = max(allowed, usual), fmean(lengths)
        say_once(
            f"{self.changed(method)}: left out, since it reads {100 * read / whole:.1f} % of the prompt, and the "
            f"budget allows {100 * most / whole:.1f} %"
        )
        return False

    def changed(self, method: Method) -> str:
        """Return the parameters that differ from the start's; empty for the start."""
        values = {name: getattr(method, name) for name in self.grids}
        usual = self.start.method
        return " ".join(
            f"{name}={plain(v)}" for name, v in values.items() if v != getattr(usual, name)
        )

    def origin(self, best: Method, held: Runs) -> Iterator[str]:
        """Yield sentences on where a preset comes from: the model, the examples, and the held-out scores."""
        info = self.start.model.describe()
        revision = f" ({info.revision.rpartition(':')[2][:12]})" if info.revision else ""
        commit = str(git()["commit"] or "unknown")[:12]
        yield f"Model {info.name}{revision}, examples of seed {TUNING_SEED}, commit {commit}."
        name = (self.start.presets or {})["method"]
        scores = list[str]()
        for method, run in held.items():
            groups, units = (
                [getattr(record, key) for record in run.records] for key in ("group", "independent")
            )
            found = stats.interval([record.score for record in run.records], groups, units=units)
            score = with_ci(mean_score(run.records), [found.low, found.high] if found else None)
            scores.append(f"{self.changed(method) or name} {score}")
        yield f"Held out, {len(self.held_out)} other examples: {', '.join(scores)}."
        if best != self.start.method:
            pairs = paired(held[best].records, held[self.start.method].records)
            beside = stats.paired(*for_statistics(pairs))
            ends = [beside.ci.low, beside.ci.high] if beside.ci else None
            yield f"Difference: {with_ci(beside.diff, ends, True)} points, p = {probability(beside.p)}."


def fitting(jobs: Sequence[Job]) -> Sequence[Job]:
    """Return the first of these jobs, as many as fit into free memory together with Full: all hold a cache of the
    prompt that they share."""
    for count in range(len(jobs), 1, -1):
        with suppress(SettingsError):
            jobs[0].refuse_memory([job for job in (jobs[0].full, *jobs[1:count]) if job])
            return jobs[:count]
    return jobs[:1]


def rank(run: StoredRun, is_present: bool) -> tuple[float, ...]:
    """Return the key by which candidates are sorted, best first."""
    read = fmean(record.share("attended_prompt") or 0.0 for record in run.records)
    return -mean_score(run.records), not is_present, round(read, 2)


def leave_out(error: Exception) -> None:
    warn(f"left out: {sentence(error)}")


def grids_of(start: Job, asked: Values) -> dict[str, tuple[Any, ...]]:
    """Return the values to try by parameter, the start's first: those of the command line, or, if it names none, those
    that the method declares in `tunable` and that can run. Raise `SettingsError` where none has a second value."""
    method, grids = start.method, dict[str, tuple[Any, ...]]()
    for name, values in (asked or method.tunable).items():
        legal = [getattr(method, name)]
        for value in values:
            try:
                one = build(describe(method) | {name: value}, "method")
                Job.plan(one, start.task, start.model, start.wanted, start.prompts, start.presets)
                legal.append(getattr(one, name))
            except ValueError as error:
                if asked:
                    raise
                say_once(f"not tried: {name}={plain(value)}: {sentence(error)}")
        if len(once := dict.fromkeys(legal)) > 1:
            grids[name] = tuple(once)
    if not grids:
        raise SettingsError(
            f"{type(method).__name__} has no parameter with a second value to try: name values, as in "
            "method.PARAMETER=A,B, or choose another method."
        )
    return grids


def halves(items: Sequence[PreparedExample]) -> tuple[list[PreparedExample], list[PreparedExample]]:
    """Split the examples of each group alternately into two halves."""
    groups: dict[str, list[PreparedExample]] = defaultdict(list)
    for item in items:
        groups[item.example.group].append(item)
    if few := [name for name, own in groups.items() if len(own) < 2]:
        raise SettingsError(
            f"{few[0]} has one example, and a search needs one to choose by and one to report on: ask the task for "
            "more (task.samples, task.rounds)."
        )
    first, second = ([item for own in groups.values() for item in own[half::2]] for half in (0, 1))
    return first, second
