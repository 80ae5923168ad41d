"""Says which columns a table of a paper has: scores of tasks, of groups of examples and of several
of them together, and measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.config.catalogue import ConfigError
from harness.config.plugins import suggestion
from harness.reports.choice import Chosen
from harness.reports.compare import PERPLEXITY
from harness.reports.labels import name
from harness.reports.paper.layout import MEASURES, USUAL, Layout, Measure, items_of
from harness.results.records import Record

SCORE, GROUPS, AVERAGE = "score", "groups", "average"
MANY = 8  # groups beyond which the usual table has no column for each


@dataclass(frozen=True, slots=True)
class Piece:
    """Name what a column averages of one task: all examples, or those of some groups."""

    task: str
    groups: tuple[str, ...] = ()  # none: all

    def of(self, records: Sequence[Record]) -> list[Record]:
        return [record for record in records if not self.groups or record.group in self.groups]


@dataclass(frozen=True, slots=True)
class PaperColumn:
    """A column: the mean score over its pieces, each of which is the mean over its groups; or a
    measure, or an average that the task itself defines (`own`), of the one task of its piece."""

    head: str  # spans the columns that share it; empty for a column by itself
    name: str
    pieces: tuple[Piece, ...]
    measure: Measure | None = None
    own: str | None = None

    @property
    def scored(self) -> bool:
        return self.measure is None and self.own is None

    @property
    def of_one(self) -> bool:
        """True if it belongs to one task."""
        return len({piece.task for piece in self.pieces}) == 1

    @property
    def whole(self) -> bool:
        """True if it is the score of one task."""
        return self.scored and len(self.pieces) == 1 and not self.pieces[0].groups


def groups_called(word: str, groups: Sequence[str]) -> tuple[str, ...]:
    """Return the group of this name. If there is none, return all groups whose name has the word as
    a part, such as `vt` or `4096` in `vt/4096`."""
    parts = tuple(group for group in groups if word in group.split("/"))
    return (word,) if word in groups else parts


def columns(
    chosen: Sequence[Chosen], layout: Layout, names: Mapping[str, str]
) -> list[PaperColumn]:
    """Return the columns that the layout asks for, or those that suit what was run. Raise
    `ConfigError` for a name that is no column, or that two columns have. `names`: what is printed in
    place of a name."""
    offer = _Offer(chosen, layout, names)
    asked = layout.columns or offer.usual()
    spans = [
        span
        for part in ([asked] if isinstance(asked, Mapping) else asked)
        for span in (part.items() if isinstance(part, Mapping) else [("", part)])
    ]
    found = [
        replace(one, head=str(head))
        for head, items in spans
        for item in items_of(items)
        for one in offer.of(str(item))
    ]
    if not found:
        raise ConfigError(
            f"no run has one of the columns {', '.join(map(str, asked))}: name others"
        )
    found = _headed(list(dict.fromkeys(found)), names)
    alike = _alike(found)
    found = [
        replace(one, name=f"{one.pieces[0].task}: {one.name}")
        if one.of_one and (one.head, one.name) in alike
        else one
        for one in found
    ]
    for _, word in _alike(found):
        raise ConfigError(
            f"several columns are called {word}: give each a name of its own, as names: {{vt: VT}}"
        )
    return found


def _alike(found: Sequence[PaperColumn]) -> list[tuple[str, str]]:
    """Return the heads and names that several columns have."""
    counts = Counter((one.head, one.name) for one in found)
    return [words for words, count in counts.items() if count > 1]


def _headed(found: Sequence[PaperColumn], names: Mapping[str, str]) -> list[PaperColumn]:
    """Return the columns with the task as heading of what belongs to one of several tasks. A score
    of a task that has columns for its groups is called an average."""
    several = len({piece.task for one in found for piece in one.pieces}) > 1
    inner = {one.pieces[0].task for one in found if one.of_one and not one.whole}
    grouped = {one.pieces[0].task for one in found if one.of_one and one.pieces[0].groups}
    shown = []
    for one in found:
        task = one.pieces[0].task
        if one.whole and task in grouped:
            one = replace(one, name=names.get(AVERAGE, "Avg."))
        elif one.whole and several and task in inner and not one.head:
            one = replace(one, name=names.get(SCORE, "Score"))
        if one.of_one and several and task in inner and not one.head:
            one = replace(one, head=task)
        shown.append(one)
    return shown


class _Offer:
    """List the columns that there can be for these runs, and name them."""

    def __init__(self, chosen: Sequence[Chosen], layout: Layout, names: Mapping[str, str]) -> None:
        self._layout, self._names = layout, names
        # yaml reads a name, as 4096, as a number
        self._averages = {str(word): items_of(some) for word, some in layout.averages.items()}
        self._runs: dict[str, list[Chosen]] = {}
        for one in sorted(chosen, key=lambda one: one.places[1]):
            self._runs.setdefault(one.task, []).append(one)

    def usual(self) -> list[str]:
        """Return the names of the columns that suit the runs: the scores of several tasks and their
        average; of one task those of its groups, or the measures that are known."""
        if len(self._runs) > 1:
            return [SCORE, AVERAGE]
        [runs] = self._runs.values()
        if 1 < len(self._parts(runs)) <= MANY:
            return [GROUPS, SCORE]
        summaries = [one.row.summary for one in runs]
        return [
            SCORE,
            *(word for word in USUAL if any(map(MEASURES[word].of, summaries))),
        ]

    def of(self, item: str) -> list[PaperColumn]:
        """Return the columns that one item of the layout stands for."""
        if item == SCORE:
            return [self._score(task) for task in self._runs]
        if item == GROUPS:
            return [
                self._group(task, part, groups)
                for task, runs in self._runs.items()
                for part, groups in self._parts(runs).items()
            ]
        scored = [task for task in self._runs if not self._runs[task][0].table.of_perplexity]
        if item == AVERAGE:
            pieces = tuple(map(Piece, scored))
            name = self._names.get(AVERAGE, "Avg.")
            return [PaperColumn("", name, pieces)] if len(pieces) > 1 else self.of(SCORE)
        if item in self._averages:
            return self._own_average(item, scored)
        found = list(self._named(item))
        if not found and self._layout.missing == "refuse":
            raise ConfigError(f"columns: {item} is in no run{suggestion(item, self._known())}")
        return found

    def _own_average(self, item: str, scored: Sequence[str]) -> list[PaperColumn]:
        """Return the column of an average that the layout defines over tasks and groups with scores
        (`scored`: the tasks that have some). Return nothing if none of them was run and the average
        may be missing."""
        pieces: list[Piece] = []
        for member in self._averages[item]:
            found = list(self._named(str(member)))
            if not found and self._layout.missing == "drop":
                continue
            own = [piece for one in found if one.scored for piece in one.pieces]
            if not own or any(piece.task not in scored for piece in own):
                raise ConfigError(f"averages: {item}: no run has a score of {member}")
            pieces += own
        return [PaperColumn("", self._names.get(item, item), tuple(pieces))] if pieces else []

    def _named(self, item: str) -> Iterator[PaperColumn]:
        """Yield the columns of a task, of what `groups_called` finds, of an average that a task
        defines, or of a measure."""
        measure = MEASURES.get(item) or Measure(item, item)
        for task, runs in self._runs.items():
            summaries = [one.row.summary for one in runs]
            if item in (task, name(runs[0].row.run, "task")):
                yield self._score(task)
            elif groups := groups_called(item, self._groups(runs)):
                yield self._group(task, item, groups)
            elif any(item in summary["score"]["averages"] for summary in summaries):
                yield PaperColumn("", self._names.get(item, item), (Piece(task),), own=item)
            elif any(measure.of(summary) is not None for summary in summaries):
                head = self._names.get(item, measure.head)
                yield PaperColumn("", head, (Piece(task),), measure)

    def _score(self, task: str) -> PaperColumn:
        unit = f" ({PERPLEXITY})" * self._runs[task][0].table.of_perplexity
        return PaperColumn("", task + unit, (Piece(task),))

    def _group(self, task: str, part: str, groups: tuple[str, ...]) -> PaperColumn:
        return PaperColumn("", self._names.get(part, part), (Piece(task, groups),))

    @staticmethod
    def _groups(runs: Sequence[Chosen]) -> list[str]:
        return list(dict.fromkeys(g for one in runs for g in one.row.summary["score"]["groups"]))

    def _parts(self, runs: Sequence[Chosen]) -> dict[str, tuple[str, ...]]:
        """Return the groups of a task by the part of their names that tells them apart: the first
        part if it differs between all of them, as in `vt/4096` and `cwe/4096`; the second part if
        all have the same first one, or if there are many groups; otherwise the whole name. Empty if
        there is only one group."""
        groups = self._groups(runs)
        firsts, seconds = (_by_part(groups, at) for at in (0, -1))
        if len(groups) < 2:
            return {}
        if len(firsts) == 1 or (len(seconds) > 1 and len(groups) > MANY):
            return seconds
        return firsts if len(firsts) == len(groups) else {group: (group,) for group in groups}

    def _known(self) -> list[str]:
        words = [SCORE, GROUPS, AVERAGE, *self._averages, *MEASURES, *self._runs]
        for runs in self._runs.values():
            words += self._groups(runs)
            words += [part for group in self._groups(runs) for part in group.split("/")]
        return list(dict.fromkeys(words))


def _by_part(groups: Sequence[str], at: int) -> dict[str, tuple[str, ...]]:
    """Return the groups by the part of their name at a place: 0 for the first, -1 for the last."""
    parts = {group: group.split("/")[at] for group in groups}
    return {
        part: tuple(group for group in groups if parts[group] == part) for part in parts.values()
    }
