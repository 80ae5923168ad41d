"""Plans a search for a method's parameters before its first run: checks it, splits its examples,
counts its runs and prints all three.

The best of many candidates scores too well on the examples that it was chosen by (the winner's
curse), so its reported score comes from the other half of the examples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from evals.base import Task
from harness.config.catalogue import plain
from harness.config.errors import sentence
from harness.config.settings import TUNING_SEED, CommonWindows, Settings, SettingsError
from harness.jobs.examples import PreparedExample, Prompts, prepare
from harness.jobs.job import Job, Presets
from harness.jobs.resolve import resolve
from harness.models.base import ModelSource
from harness.terminal.notices import say_once
from harness.tuning.search import KEPT, Examples, curve_points, most_combinations
from harness.tuning.space import START, Space, grids_of, space_of
from methods.base import Method

ROUNDS = 3  # rounds of the refinement, each on other examples; fewer if a group has fewer
SAME_EXAMPLES = (
    "This task has the same examples whatever the seed, so its tables would be about what was tuned on: tune on "
    "another task (niah, ruler) and run the preset on this one."
)


@dataclass(frozen=True)
class SearchPlan:
    """A search that has been checked and can run. `start`: the job of the method's present
    parameters, from which the search starts, on all examples of the tuning seed (one that no
    reported table uses)."""

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
        """Plan a search. Method, task, model and settings are those of one run; its seed is
        replaced by the tuning seed. `names`: what the command line calls method, task and model;
        `asked`: the values to try by parameter, as typed."""
        resolved = resolve(wanted, method, model.describe())
        for words in resolved.notes:
            say_once(words)
        method = resolved.method
        settings = replace(
            wanted, seed=TUNING_SEED, shared_prefill=True, likelihood="off", comm=None, windows=CommonWindows()
        )
        grids = grids_of(method, asked)
        if not task.seeded:  # before its data are looked for; a task of a user's own is recognised by its examples
            raise SettingsError(SAME_EXAMPLES)
        task.require(settings.data.folder())
        items = prepare(task, model, settings)
        usual = {item.sha256 for item in prepare(task, model, replace(settings, seed=Settings().seed))}
        if usual & {item.sha256 for item in items}:
            raise SettingsError(SAME_EXAMPLES)
        examples = halved(items)
        both = [*chain.from_iterable(examples.rounds), *examples.held_out]

        def job(candidate: Method) -> Job:
            return Job.plan(candidate, task, model, settings, Prompts(both), names)

        def refusal(candidate: Method) -> str | None:
            try:
                job(candidate)
            except ValueError as error:
                return sentence(error)
            return None

        start = job(method)
        return cls(space_of(method, grids, refusal, bool(asked)), examples, start)

    def lines(self) -> Iterator[str]:
        """Yield lines that say what the search will try, on how many examples, and how many answers
        that takes at most."""
        yield f"{self.start.label}, {self.start.model.describe().name}"
        width = max(map(len, self.space.grids))
        for name, values in self.space.grids.items():
            own = self.space.value(START, name)
            yield f"  {name:<{width}}  {'  '.join(plain(v) + '*' * (v == own) for v in values)}"
        yield "  * the start"
        yield from (f"  not tried: {words}" for words in self.space.left_out)
        rounds, held_out = self.examples.rounds, len(self.examples.held_out)
        yield f"examples of seed {TUNING_SEED}: {self.examples.choosing} to choose by, {held_out} held out"
        curves, combinations = len(curve_points(self.space)), most_combinations(self.space)
        answers, field = curves * self.examples.choosing + 2 * held_out, combinations
        for items in rounds:
            answers += field * len(items)
            field = max(1, round(field * KEPT)) if field else 0
        yield (
            f"{curves} points on the curves, at most {combinations} combinations, then the best and the start: at most "
            f"{answers} answers, with baseline={self.start.wanted.baseline}; runs in {self.start.wanted.results.root}"
        )


def halved(items: Sequence[PreparedExample]) -> Examples:
    """Split the examples of each group alternately into two halves: one to choose parameters by,
    one to report on. The first half is split further into rounds."""
    groups: dict[str, list[PreparedExample]] = defaultdict(list)
    for item in items:
        groups[item.example.group].append(item)
    if few := [name for name, own in groups.items() if len(own) < 2]:
        raise SettingsError(
            f"{few[0]} has one example, and a search needs one to choose by and one to report on: ask the task for "
            "more (task.samples, task.rounds)."
        )
    choosing = [own[::2] for own in groups.values()]
    count = min(ROUNDS, *map(len, choosing), ROUNDS)
    rounds = tuple([item for own in choosing for item in own[start::count]] for start in range(count))
    return Examples(rounds, [item for own in groups.values() for item in own[1::2]])
