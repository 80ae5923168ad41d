"""Plans a search before its first run: checks it, counts its runs and prints both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from evals.base import Task
from harness.config.catalogue import plain
from harness.config.errors import sentence
from harness.config.settings import TUNING_SEED, CommonWindows, Settings
from harness.jobs.job import Job, Presets
from harness.jobs.planning.effective import method_of, without_effect
from harness.models.base import ModelSource
from harness.terminal.notices import say_once
from harness.tuning.examples import Examples, examples_of, refuse_unseeded
from harness.tuning.search import KEPT, curve_points, most_combinations
from harness.tuning.space import START, Space, grids_of, space_of
from methods.base import Method

FULL = {  # baseline -> what becomes of Full
    "run": ", and Full's",
    "reuse": ", and Full's where it has run",
    "off": " without Full's, so nobody will know what is lost to it (baseline=off)",
}


@dataclass(frozen=True)
class SearchPlan:
    """Hold what a search will run. `start`: the job of the start on all examples, with the tuning
    seed."""

    space: Space
    examples: Examples
    start: Job

    @classmethod
    def of(
        cls,
        method: Method,
        task: Task,
        model: ModelSource,
        wanted: Settings,
        names: Presets,
        asked: Mapping[str, tuple[Any, ...]],
    ) -> SearchPlan:
        """Plan a search whose start is configured like one run, with the reserved seed. `names`:
        what the command line calls method, task and model; `asked`: its grids."""
        for words in without_effect(wanted, method):
            say_once(words)
        method = method_of(wanted, method, model.describe())
        settings = replace(
            wanted, seed=TUNING_SEED, shared_prefill=True, likelihood="off", comm=None, windows=CommonWindows()
        )
        grids = grids_of(method, asked)
        refuse_unseeded(task)
        task.require(settings.data.folder())
        examples = examples_of(task, model, settings)

        def job(candidate: Method) -> Job:
            return Job.plan(candidate, task, model, settings, examples.all, names)

        start = job(method)
        space = space_of(method, grids, lambda other: _refusal(job, other), bool(asked))
        return cls(space, examples, start)

    @property
    def names(self) -> Presets:
        """Return what the command line calls method, task and model."""
        return self.start.presets or {}

    @property
    def title(self) -> str:
        settings, model = self.start.wanted, self.start.model.describe().name
        bytes_too = "" if settings.align == "tokens" else f" (align={settings.align})"
        asked = f"budget={settings.budget}{bytes_too}"
        for name in ("budget_bytes",):
            if value := getattr(settings, name):
                asked = f"{name}={value}"
        return f"{self.names['task']}, {asked}, {model}"

    def lines(self) -> Iterator[str]:
        """Yield lines that say what would run at most."""
        yield f"{self.start.label}, {self.start.model.describe().name}"
        width = max(map(len, self.space.grids))
        for name, values in self.space.grids.items():
            own = self.space.value(START, name)
            yield f"  {name:<{width}}  {'  '.join(plain(v) + '*' * (v == own) for v in values)}"
        yield "  * the start"
        yield from (f"  not tried: {words}" for words in self.space.left_out)
        parts = f", in {len(self.examples.rounds)} parts" if len(self.examples.rounds) > 1 else ""
        yield (
            f"examples of seed {TUNING_SEED}: {self.examples.choosing} to choose by{parts}, "
            f"{len(self.examples.held_out)} held out"
        )
        curves, combinations = len(curve_points(self.space)), most_combinations(self.space)
        settings = self.start.wanted
        yield (
            f"{curves} points on the curves, at most {combinations} combinations, then the best beside the start: "
            f"at most {self.answers} answers{FULL[settings.baseline]}; runs in {settings.results.root}"
        )

    @property
    def answers(self) -> int:
        """Return the most answers that the search gives: examples times candidates."""
        total = len(curve_points(self.space)) * self.examples.choosing + 2 * len(self.examples.held_out)
        field = most_combinations(self.space)
        for items in self.examples.rounds:
            total += field * len(items)
            field = max(1, round(field * KEPT)) if field else 0
        return total


def _refusal(job: Any, candidate: Method) -> str | None:
    try:
        job(candidate)
    except ValueError as error:
        return sentence(error)
    return None
