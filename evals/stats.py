"""Computes statistics of scores: intervals, paired tests and Holm's correction.

The statistic is always the mean of group means. Scores of one unit, such as questions on one text,
are not independent and count as one, their mean. Interval and test of a difference agree: p is
below 0.05 exactly where the 95 % interval leaves out 0. Both hold for any number of examples
(tests/evals/test_coverage.py)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evals import bounded

Floats = NDArray[np.float64]
Units = Sequence[str] | None  # what each score belongs to; None: each is a unit of its own

ALPHA = 0.05
# How many scores of which no two are alike, as perplexities are, must be seen before an unseen one is taken to be near
# them.
DENSE = 20


@dataclass(frozen=True, slots=True)
class Interval:
    """Hold the two ends of an interval."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Paired:
    """Compare a method with a baseline on the same examples."""

    diff: float  # method - baseline
    ci: Interval
    p: float


def interval(
    scores: Sequence[float], groups: Sequence[str], *, units: Units = None, level: float = 1 - ALPHA
) -> Interval | None:
    """Return the interval of the mean of group means, or None without a score. Where all scores are
    0 or 1 it is Clopper and Pearson's.

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
    """Test on two sides whether a mean difference is 0, and return the 95 % interval that inverts
    the test.

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


@dataclass(frozen=True, slots=True)
class _Sample:
    """Hold the values of one mean; none of them can lie beyond `low` and `high`."""

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

    def upper_p(self, mean: float) -> float:
        return float(bounded.upper_p(self.values, self.weights, mean, self.high))

    def interval(self, level: float, pivot: float | None = None) -> Interval:
        """Return an interval that leaves out `level` on either side. It leaves out `pivot` exactly
        where the p of `pivot` says so."""
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
    """Return whether the values show no point, be it 0, 1 or any other, on which many more might
    lie."""
    return len(values) >= DENSE and len(np.unique(values)) == len(values) and not np.isin(values, (0, 1)).any()


def _span(values: Floats) -> tuple[float, float]:
    """Return the range of the values and 0, widened by half of itself on either side."""
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    return low - (high - low) / 2, high + (high - low) / 2
