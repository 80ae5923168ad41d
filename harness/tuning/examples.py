"""The examples of a search: those of the tuning seed, one half to choose by and one half to report on.

What was chosen because it scored best scores too well where it was chosen (the winner's curse), so its score is taken
from examples that had no say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from evals.base import Task
from harness.config.settings import Settings, SettingsError
from harness.jobs.planning.items import Item, prepare
from harness.models.base import ModelSource

ROUNDS = 3  # of the refinement, each on examples of its own; fewer where a group has fewer
SAME_EXAMPLES = (
    "This task has the same examples whatever the seed, so its tables would be about what was tuned on: tune on "
    "another task (niah, ruler) and run the preset on this one."
)


@dataclass(frozen=True)
class Examples:
    """`rounds`: disjoint parts of what is chosen by. Every group has examples in each, and in `held_out`."""

    rounds: tuple[list[Item], ...]
    held_out: list[Item]

    @property
    def all(self) -> list[Item]:
        return [*chain.from_iterable(self.rounds), *self.held_out]

    @property
    def choosing(self) -> int:
        return sum(map(len, self.rounds))


def refuse_unseeded(task: Task) -> None:
    """Before its data are looked for. A source of one's own is known by its examples alone."""
    if not task.seeded:
        raise SettingsError(SAME_EXAMPLES)


def examples_of(task: Task, model: ModelSource, settings: Settings) -> Examples:
    """Raises `SettingsError` where the task's examples do not depend on the seed, or are too few to halve."""
    items = prepare(task, model, settings)
    usual = {item.sha256 for item in prepare(task, model, replace(settings, seed=Settings().seed))}
    if usual & {item.sha256 for item in items}:
        raise SettingsError(SAME_EXAMPLES)
    return halved(items)


def halved(items: Sequence[Item]) -> Examples:
    """Within each group one by one: to choose by, to report on."""
    groups: dict[str, list[Item]] = defaultdict(list)
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
