"""Computes statistics of scores: intervals, paired tests, Holm's correction, and the smallest difference that a test
can find.

The statistic is always the mean of group means. Scores of one unit, such as questions on one text, are not independent
and count as one, their mean. Interval and test of a difference agree: p is below 0.05 exactly where the 95 % interval
leaves out 0. Both hold for any number of examples (tests/evals/test_coverage.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from evals import bounded

Floats = NDArray[np.float64]
Units = Sequence[str] | None  # what each score belongs to; None: each is a unit of its own

ALPHA = 0.05
POWER = 0.8
# How many scores of which no two are alike, as perplexities are, must be seen before an unseen one is taken to be near
# them.
DENSE = 20
_SIZES = np.unique((10 ** np.linspace(0.5, 5, 91)).round().astype(int))  # numbers of examples, 12 % apart
_TRIED = 24
_EXACT = 128  # every number of losses up to this one is tried, and as many more spread above it


@dataclass(frozen=True, slots=True)
class Interval:
    """Holds the two ends of an interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Paired:
    """Compares a method with a baseline on the same examples."""

    diff: float  # method - baseline
    ci: Interval
    p: float


def interval(
    scores: Sequence[float], groups: Sequence[str], *, units: Units = None, level: float = 1 - ALPHA
) -> Interval | None:
    """Return the interval of the mean of group means, or None without a score. Where all scores are 0 or 1 it is
    Clopper and Pearson's.

    >>> interval([1, 1, 1, 0], ["a"] * 4)
    Interval(low=0.194120..., high=0.993690...)
    """
    values = _finite(scores)
    if not len(values):
        return None
    sample = _Sample(values, _weights(groups, len(values)), 0.0, 1.0).by_unit(units)
    low, high = _span(sample.values) if _is_dense(sample.values) else (0.0, 1.0)
    return replace(sample, low=max(0.0, low), high=min(1.0, high)).interval((1 - level) / 2)


def paired(scores: Sequence[float], baseline: Sequence[float], groups: Sequence[str], units: Units = None) -> Paired:
    """Test on two sides whether a mean difference is 0, and return the 95 % interval that inverts the test.

    Where all scores are 0 or 1 and all groups equally large it is McNemar's exact test.
    """
    sample = _differences(scores, baseline, groups, units)
    return Paired(sample.mean, sample.interval(ALPHA / 2, pivot=0.0), sample.p)


def p_value(scores: Sequence[float], baseline: Sequence[float], units: Units = None, groups: Units = None) -> float:
    """Return the p of `paired` without its interval, for one group unless several are given."""
    return _differences(scores, baseline, groups or [""] * len(scores), units).p


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p-values that control the family-wise error (Holm 1979), in the given order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, floor = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        floor = max(floor, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = floor
    return adjusted


def detectable(
    scores: Sequence[float],
    baseline: Sequence[float],
    groups: Sequence[str],
    units: Units = None,
    *,
    comparisons: int = 1,
) -> float | None:
    """Return the smallest true loss that `paired` finds with 80 % power, as the first of so many `comparisons` under
    Holm.

    It is the test's own power, for examples that each lose what examples differ by here, on top of as many wins and
    losses by chance as went against the trend. None where the test could not find the loss if every example had it.
    """
    sample = _differences(scores, baseline, groups, units)
    size = round(1 / float((sample.weights**2).sum()))
    reach = max(-sample.low, sample.high)
    for step in (sample.step, 1.0):
        rate = _smallest_rate(size, step / reach, sample.churn / step**2, ALPHA / comparisons)
        if rate is not None:
            return step * rate
    return None


def needed(
    scores: Sequence[float],
    baseline: Sequence[float],
    groups: Sequence[str],
    units: Units = None,
    *,
    loss: float,
    comparisons: int = 1,
) -> int | None:
    """Return how many examples would find a true `loss` with 80 % power, rounded up by 12 % at most; None where more
    than 100,000 would be needed.

    As in `detectable`, examples differ by what they differ by here, and as many win and lose by chance. Groups and
    units are taken to stay as large as they are to one another.
    """
    sample = _differences(scores, baseline, groups, units)
    step = max(sample.step, loss)
    rate, reach, churn = loss / step, max(-sample.low, sample.high), sample.churn / step**2
    alpha, square = ALPHA / comparisons, loss * step + 2 * sample.churn
    deviations = special.ndtri([1 - alpha / 2, POWER]) @ np.sqrt([square, square - loss**2])
    place = int(np.searchsorted(_SIZES, (deviations / loss) ** 2))  # as if differences were normal (Connor 1987)

    def finds(place: int) -> bool:
        return _power(rate, int(_SIZES[place]), step / reach, churn, alpha, thinned=True) >= POWER

    while place < len(_SIZES) and not finds(place):
        place += 1
    while 0 < place < len(_SIZES) and finds(place - 1):
        place -= 1
    examples = len(scores) * float((sample.weights**2).sum())  # for each that counts
    return round(float(_SIZES[place]) * examples) if place < len(_SIZES) else None


@dataclass(frozen=True, slots=True)
class _Sample:
    """Holds the values of one mean; none of them can lie beyond `low` and `high`."""

    values: Floats
    weights: Floats
    low: float
    high: float

    @property
    def mean(self) -> float:
        return float(np.clip(self.weights @ self.values, self.values.min(), self.values.max()))

    def by_unit(self, units: Units) -> _Sample:
        """Return a sample with one value for each unit: the mean of its values."""
        if units is None or len(set(units)) == len(self.values):
            return self
        _, which = np.unique(np.asarray(units), return_inverse=True)
        weights, sums = (np.bincount(which, part).astype(float) for part in (self.weights, self.weights * self.values))
        return replace(self, values=sums / weights, weights=weights)

    @property
    def mirrored(self) -> _Sample:
        """Return the sample with all signs reversed."""
        return replace(self, values=-self.values, low=-self.high, high=-self.low)

    @property
    def p(self) -> float:
        """Return the two-sided p of a mean of 0."""
        side = self if self.mean < 0 else self.mirrored
        return min(1.0, 2 * side.upper_p(0.0)) if self.mean else 1.0

    @property
    def step(self) -> float:
        """Return by how much examples differ that do differ; 1 where none does."""
        return float(self.weights @ self.values**2 / total) if (total := self.weights @ abs(self.values)) else 1.0

    @property
    def churn(self) -> float:
        """Return the mean square of the values that go against the trend."""
        return min(float(self.weights @ np.maximum(side, 0) ** 2) for side in (self.values, -self.values))

    def upper_p(self, mean: float) -> float:
        return float(bounded.upper_p(self.values, self.weights, mean, self.high))

    def interval(self, level: float, pivot: float | None = None) -> Interval:
        """Return an interval that leaves out `level` on either side. It leaves out `pivot` exactly where the p of
        `pivot` says so."""
        return Interval(-self.mirrored._upper(level, pivot), self._upper(level, pivot))

    def _upper(self, level: float, pivot: float | None) -> float:
        start, stop = self.mean, self.high
        if pivot is not None and start < pivot:
            if self.upper_p(pivot) < level:
                end = bounded.upper_end(self.values, self.weights, self.high, level, (start, pivot))
                return min(end, math.nextafter(pivot, -math.inf))
            start = pivot
        return bounded.upper_end(self.values, self.weights, self.high, level, (start, stop))


def _differences(scores: Sequence[float], baseline: Sequence[float], groups: Sequence[str], units: Units) -> _Sample:
    ours, theirs = _finite(scores), _finite(baseline)
    if not len(ours):
        raise ValueError("a paired comparison needs at least one example that both runs scored")
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} scores against {len(theirs)}: give each example one of both")
    sample = _Sample(ours - theirs, _weights(groups, len(ours)), -1.0, 1.0).by_unit(units)
    dense = all(map(_is_dense, (ours, theirs, sample.values)))
    low, high = _span(sample.values) if dense else (-1.0, 1.0)
    return replace(sample, low=max(-1.0, low), high=min(1.0, high))


def _finite(scores: Sequence[float]) -> Floats:
    values = np.asarray(scores, dtype=float)
    if not np.isfinite(values).all():
        raise ValueError("a score is not finite: statistics need finite scores")
    return values


def _weights(groups: Sequence[str], size: int) -> Floats:
    """Return the weight of each example in the mean of group means."""
    if len(groups) != size:
        raise ValueError(f"{size} scores for {len(groups)} groups: give each example one of both")
    sizes = Counter(groups)
    return np.array([1 / (len(sizes) * sizes[group]) for group in groups])


def _is_dense(values: Floats) -> bool:
    """Say whether the values show no point, be it 0, 1 or any other, on which many more might lie."""
    return len(values) >= DENSE and len(np.unique(values)) == len(values) and not np.isin(values, (0, 1)).any()


def _span(values: Floats) -> tuple[float, float]:
    """Return the range of the values and 0, widened by half of itself on either side."""
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    return low - (high - low) / 2, high + (high - low) / 2


def _smallest_rate(size: int, step: float, churn: float, alpha: float) -> float | None:
    """Return the share of `size` examples that must lose `step`, while a share `churn` wins by chance and as many
    lose."""
    if _power(1.0, size, step, churn, alpha) < POWER:
        return None
    low, high = 0.0, 1.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (low, middle) if _power(middle, size, step, churn, alpha) >= POWER else (middle, high)
    return high


def _power(rate: float, size: int, step: float, churn: float, alpha: float, thinned: bool = False) -> float:
    """thinned: work out the test for a few numbers of losses, for a size that is asked about once."""
    churn = min(churn, (1 - rate) / 2)
    from scipy.stats import binom  # takes half a second, and few tables need it

    first, last = binom.ppf([1e-6, 1 - 1e-6], size, churn + rate)
    lost = np.arange(int(first), int(last) + 1)
    if thinned:
        tried = np.unique(np.linspace(lost[0], lost[-1], _TRIED).round().astype(int))
        most = np.floor(np.interp(lost, tried, _won_beside(tried, step, alpha)))
    else:
        most = _most_won(size, round(step, 3), alpha)[lost]
    wins = churn / (1 - churn - rate) if churn else 0.0
    probabilities: Any = binom.pmf(lost, size, churn + rate) * binom.cdf(most, size - lost, wins)
    return float(probabilities.sum())


@lru_cache(maxsize=256)
def _most_won(size: int, step: float, alpha: float) -> Floats:
    """Return for each number of losses the most wins beside which the test still finds a loss; -1 where it never
    does."""
    lost = np.arange(min(size, _EXACT) + 1)
    if size > _EXACT:
        lost = np.union1d(lost, np.geomspace(_EXACT, size, _EXACT).round().astype(int))
    return np.floor(np.interp(np.arange(size + 1), lost, _won_beside(lost, step, alpha)))


def _won_beside(lost: NDArray[np.int_], step: float, alpha: float) -> NDArray[np.int_]:
    """Return the same for the numbers `lost`."""
    low, high = np.full(len(lost), -1), lost.copy()  # as many wins as losses are never a loss
    while (high - low > 1).any():
        middle = (low + high) // 2
        values = np.array([-step, step, 1.0])
        p = 2 * bounded.tail(values, np.stack([lost, middle, np.ones_like(lost)], axis=-1).astype(float))
        low, high = np.where(p < alpha, middle, low), np.where(p < alpha, high, middle)
    return low
