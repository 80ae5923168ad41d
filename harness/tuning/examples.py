"""Splits the examples of a search, those of the tuning seed: one half to choose by, one half to
report on.

A point that was chosen because it scored best scores too well on the examples it was chosen by (the
winner's curse), so its reported score comes from the other half."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from evals.base import Task
from harness.config.settings import Settings, SettingsError
from harness.jobs.planning.examples import PreparedExample, prepare
from harness.models.base import ModelSource

ROUNDS = 3  # rounds of the refinement, each on other examples; fewer if a group has fewer
SAME_EXAMPLES = (
    "This task has the same examples whatever the seed, so its tables would be about what was tuned on: tune on "
    "another task (niah, ruler) and run the preset on this one."
)


@dataclass(frozen=True)
class Examples:
    """Hold the examples of a search. `rounds`: disjoint parts of the examples to choose by. Every
    group has examples in each part, and in `held_out`."""

    rounds: tuple[list[PreparedExample], ...]
    held_out: list[PreparedExample]

    @property
    def all(self) -> list[PreparedExample]:
        return [*chain.from_iterable(self.rounds), *self.held_out]

    @property
    def choosing(self) -> int:
        return sum(map(len, self.rounds))


def refuse_unseeded(task: Task) -> None:
    """Raise `SettingsError` if the task's examples do not depend on the seed, before its data are
    looked for. A task of a user's own is recognised only by its examples."""
    if not task.seeded:
        raise SettingsError(SAME_EXAMPLES)


def examples_of(task: Task, model: ModelSource, settings: Settings) -> Examples:
    """Return the examples of a search. Raises `SettingsError` if they do not depend on the seed, or
    are too few to halve."""
    items = prepare(task, model, settings)
    usual = {item.sha256 for item in prepare(task, model, replace(settings, seed=Settings().seed))}
    if usual & {item.sha256 for item in items}:
        raise SettingsError(SAME_EXAMPLES)
    return halved(items)


def halved(items: Sequence[PreparedExample]) -> Examples:
    """Split the examples of each group alternately: one to choose by, one to report on."""
    groups: dict[str, list[PreparedExample]] = defaultdict(list)
    for item in items:
        groups[item.example.group].append(item)
    if few := [name for name, own in groups.items() if len(own) < 2]:
        raise SettingsError(
            f"{few[0]} has one example, and a search needs one to choose by and one to report on: ask the task for "
            "more (task.samples, task.rounds)."
        )
    choosing = [own[::2] for own in groups.values()]
    count = min(ROUNDS, *(len(own) for own in choosing), ROUNDS)
    rounds = tuple([item for own in choosing for item in own[start::count]] for start in range(count))
    return Examples(rounds, [item for own in groups.values() for item in own[1::2]])
