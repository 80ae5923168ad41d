"""Statistics of scores: intervals, paired tests, Holm's correction, and the smallest difference a test can find.

The statistic is always the mean of group means. Scores of one unit, questions on one text say, are not independent and
count as one, their mean. Interval and test of a difference are one: p is below 0.05 exactly
where the 95 % interval leaves out 0. Both hold at any number of examples (tests/evals/test_coverage.py).
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

from evals import bounded

Floats = NDArray[np.float64]
Units = Sequence[str] | None  # of each score, what it belongs to; None: each is one by itself

ALPHA = 0.05
POWER = 0.8
# Scores of which no two are alike, as perplexities: so many must be seen before an unseen one is taken to be near them.
DENSE = 20
_EXACT = 128  # numbers of losses that a power is worked out at one by one; beyond them, at as many more


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Paired:
    """A method against a baseline on the same examples."""

    diff: float  # method - baseline
    ci: Interval
    p: float


def interval(
    scores: Sequence[float], groups: Sequence[str], *, units: Units = None, level: float = 1 - ALPHA
) -> Interval | None:
    """Of the mean of group means; Clopper and Pearson's where all scores are 0 or 1. None without a score.

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
    """Two-sided test of a mean difference of 0, and the 95 % interval that inverts it.

    McNemar's exact test where all scores are 0 or 1 and all groups equally large.
    """
    sample = _differences(scores, baseline, groups, units)
    return Paired(sample.mean, sample.interval(ALPHA / 2, pivot=0.0), sample.p)


def p_value(scores: Sequence[float], baseline: Sequence[float], units: Units = None) -> float:
    """`paired`'s p for one group, without its interval."""
    return _differences(scores, baseline, [""] * len(scores), units).p


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values that control the family-wise error (Holm 1979), in the given order.

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
    """Smallest true loss that `paired` finds with 80 % power, as the first of so many `comparisons` under Holm.

    The test's own power, worked out for examples that lose what examples differ by here, on top of as many that win and
    lose by chance as went against the trend. None where the test could not find it if every example were lost.
    """
    sample = _differences(scores, baseline, groups, units)
    size = round(1 / float((sample.weights**2).sum()))
    reach = max(-sample.low, sample.high)
    for step in (sample.step, 1.0):
        found = _smallest_rate(size, step / reach, sample.churn / step**2, ALPHA / comparisons)
        if found is not None:
            return step * found
    return None


@dataclass(frozen=True, slots=True)
class _Sample:
    """Values of one mean; `low` and `high` are the ends beyond which no value can lie."""

    values: Floats
    weights: Floats
    low: float
    high: float

    @property
    def mean(self) -> float:
        return float(np.clip(self.weights @ self.values, self.values.min(), self.values.max()))

    def by_unit(self, units: Units) -> _Sample:
        """A value for each unit: the mean of its values."""
        if units is None or len(set(units)) == len(self.values):
            return self
        _, which = np.unique(np.asarray(units), return_inverse=True)
        weights, sums = (np.bincount(which, one).astype(float) for one in (self.weights, self.weights * self.values))
        return replace(self, values=sums / weights, weights=weights)

    @property
    def mirrored(self) -> _Sample:
        return replace(self, values=-self.values, low=-self.high, high=-self.low)

    @property
    def p(self) -> float:
        """Two-sided, of a mean of 0."""
        side = self if self.mean < 0 else self.mirrored
        return min(1.0, 2 * side.upper_p(0.0)) if self.mean else 1.0

    @property
    def step(self) -> float:
        """What examples that differ differ by; 1 where none does."""
        return float(self.weights @ self.values**2 / total) if (total := self.weights @ abs(self.values)) else 1.0

    @property
    def churn(self) -> float:
        """Mean square of the values against the trend."""
        return min(float(self.weights @ np.maximum(side, 0) ** 2) for side in (self.values, -self.values))

    def upper_p(self, mean: float) -> float:
        return float(bounded.upper_p(self.values, self.weights, mean, self.high))

    def interval(self, level: float, pivot: float | None = None) -> Interval:
        """Leaves out as much as `level` on either side; `pivot` is left out exactly where its own p says so."""
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
    """Of each example in the mean of group means."""
    if len(groups) != size:
        raise ValueError(f"{size} scores for {len(groups)} groups: give each example one of both")
    sizes = Counter(groups)
    return np.array([1 / (len(sizes) * sizes[group]) for group in groups])


def _is_dense(values: Floats) -> bool:
    """Whether the values show no point on which many more might lie: 0, 1 or any other."""
    return len(values) >= DENSE and len(np.unique(values)) == len(values) and not np.isin(values, (0, 1)).any()


def _span(values: Floats) -> tuple[float, float]:
    """Half as far again as the values, and 0 with them, reach."""
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    return low - (high - low) / 2, high + (high - low) / 2


def _smallest_rate(size: int, step: float, churn: float, alpha: float) -> float | None:
    """Share of `size` examples that must lose `step`; besides, a share `churn` wins by chance, and as many lose."""
    if _power(1.0, size, step, churn, alpha) < POWER:
        return None
    low, high = 0.0, 1.0
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (low, middle) if _power(middle, size, step, churn, alpha) >= POWER else (middle, high)
    return high


def _power(rate: float, size: int, step: float, churn: float, alpha: float) -> float:
    churn = min(churn, (1 - rate) / 2)
    from scipy.stats import binom  # half a second, which few tables need

    first, last = binom.ppf([1e-6, 1 - 1e-6], size, churn + rate)
    lost = np.arange(int(first), int(last) + 1)
    most, wins = _most_won(size, round(step, 3), alpha)[lost], churn / (1 - churn - rate) if churn else 0.0
    found: Any = binom.pmf(lost, size, churn + rate) * binom.cdf(most, size - lost, wins)
    return float(found.sum())


@lru_cache(maxsize=256)
def _most_won(size: int, step: float, alpha: float) -> Floats:
    """For each number of losses the most wins beside which the test still finds a loss; -1 where it never does."""
    lost = np.arange(min(size, _EXACT) + 1)
    if size > _EXACT:
        lost = np.union1d(lost, np.geomspace(_EXACT, size, _EXACT).round().astype(int))
    low, high = np.full(len(lost), -1), lost.copy()  # as many wins as losses are never a loss
    while (high - low > 1).any():
        middle = (low + high) // 2
        values = np.array([-step, step, 1.0])
        p = 2 * bounded.tail(values, np.stack([lost, middle, np.ones_like(lost)], axis=-1).astype(float))
        low, high = np.where(p < alpha, middle, low), np.where(p < alpha, high, middle)
    return np.floor(np.interp(np.arange(size + 1), lost, low))
