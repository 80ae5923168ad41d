"""Searches the best parameters: one curve per parameter around the start, then the best few values
of all together.

The curves run on all examples to choose by. The combinations are halved: each round adds examples
and keeps the better half, so that most of the work goes to what may win. Nothing is random, so the
same command finds the same point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from statistics import fmean
from typing import Any

from harness.results.compared import mean_score
from harness.tuning.examples import Examples
from harness.tuning.space import START, Point, Space
from harness.tuning.trials import Trials

BEST = 2  # values of a parameter that enter the combinations, besides the start's
COMBINATIONS = 16  # most combinations, chosen by the curves
KEPT = 0.5  # share of the combinations that stay from round to round

Say = Callable[[str], None]


@dataclass(frozen=True)
class ParameterSearch:
    """Search one space. `trials` run the examples to choose by; `say` reports the progress."""

    space: Space
    examples: Examples
    trials: Trials
    say: Say

    def run(self) -> Point:
        """Return the best point that ran on all examples."""
        self.draw_curves()
        self.refine()
        return self.ranked(self.finished())[0]

    def draw_curves(self) -> None:
        points = curve_points(self.space)
        for number in range(1, 1 + len(self.examples.rounds)):
            points = self.trials.left(points)
            self._round(points, number, f"curves: {len(points)} points")

    def refine(self) -> None:
        field = self.combinations()
        for number in range(1, 1 + len(self.examples.rounds)):
            if not field:
                return
            self._round(field, number, f"together: {len(field)} combinations")
            field = self.ranked(self.trials.left(field))
            field = field[: max(1, round(len(field) * KEPT))]

    def combinations(self) -> list[Point]:
        """Return points that combine the best values of two or more parameters, in the order of the
        gain they promise if the gains of single parameters add up."""
        best = {name: self._best_values(name) for name in self.space.grids}
        new = [point for point in self.space.combinations(best) if len(point) > 1]
        return sorted(new, key=lambda point: (-self._promise(point), *self.space.distance(point)))[:COMBINATIONS]

    def finished(self) -> list[Point]:
        """Return the points that ran on every example to choose by."""
        ran = self.trials.records
        return [point for point in self.trials.left(list(ran)) if len(ran[point]) == self.examples.choosing]

    def ranked(self, points: Sequence[Point]) -> list[Point]:
        """Return points, best first. Among equal scores the start comes first, then what reads
        least (in whole percents), then the point nearest to the start."""
        return sorted(points, key=self._rank)

    def _round(self, points: Sequence[Point], number: int, what: str) -> None:
        items = self.examples.rounds[number - 1]
        self.say(f"{what}, part {number}/{len(self.examples.rounds)}: {len(items)} examples")
        self.trials.run(points, f"choose-{number}", items)

    def _best_values(self, name: str) -> list[Any]:
        """Return the start's value, and the best few values that beat it."""
        curve = self.ranked(self.trials.left(self.space.curve(name)))
        better = [point for point in curve if self._mean(point) > self._mean(START)]
        return [self.space.value(point, name) for point in [START, *better[:BEST]]]

    def _promise(self, point: Point) -> float:
        return sum(self._mean((change,)) - self._mean(START) for change in point)

    def _rank(self, point: Point) -> tuple[float, ...]:
        read = fmean(record.attended_share or 0.0 for record in self.trials.records[point])
        return -self._mean(point), point != START, round(read, 2), *self.space.distance(point)

    def _mean(self, point: Point) -> float:
        return mean_score(self.trials.records[point])


def curve_points(space: Space) -> list[Point]:
    """Return the start, and every point that differs from it in one parameter."""
    return list(dict.fromkeys([START, *chain.from_iterable(map(space.curve, space.grids))]))


def most_combinations(space: Space) -> int:
    """Return how many combinations may follow the curves."""
    better = [min(BEST, len(values) - 1) for values in space.grids.values()]
    return min(COMBINATIONS, prod(1 + count for count in better) - sum(better) - 1)
