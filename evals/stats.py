"""Computes statistics of scores: intervals, paired tests and Holm's correction.

The statistic is always the mean of group means. Scores of one unit, such as questions on one text,
are not independent and count as one, their mean. Interval and test of a difference agree: p is
below 0.05 exactly where the 95 % interval leaves out 0. Both hold for any number of examples
(tests/evals/test_coverage.py).

Costs of right answers have tails: one prompt that a method fails may cost more than all others
together, and a test of means then sees nothing. `shift` compares them by Wilcoxon's signed-rank test
(Biometrics Bulletin 1, 1945), which counts which of two signs the larger differences have. Its
estimate is the median of the means of all pairs of differences (Hodges and Lehmann, Annals of
Mathematical Statistics 34, 1963), and its interval holds the differences that the test does not
refute. scipy.stats.wilcoxon gives the same p where no difference is 0 and no two are equal. It has no
interval, and its p for zeros and ties would not agree with one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evals import bounded

Floats = NDArray[np.float64]
Units = Sequence[str] | None  # what each score belongs to; None: each is a unit of its own
# of each score; a group in a group, as of one of several tasks, is named by both: (task, group)
Groups = Sequence[str] | Sequence[tuple[str, ...]]

ALPHA = 0.05
# How many scores of which no two are alike, as perplexities are, must be seen before an unseen one is taken to be near
# them.
DENSE = 20
# Units up to which the distribution of a signed-rank test is counted; beyond, a normal one differs in the fifth digit.
EXACT = 200


class Interval(NamedTuple):
    """Hold the two ends of a confidence interval."""

    low: float
    high: float


class Paired(NamedTuple):
    """Hold the comparison of a method with a baseline on the same examples: the difference of their
    means, its 95 % interval, and the p-value of no difference."""

    diff: float  # method - baseline
    ci: Interval
    p: float


def interval(scores: Sequence[float], groups: Groups, *, units: Units = None) -> Interval | None:
    """Return the 95 % confidence interval of the mean of group means, or None without a score. Where all
    scores are 0 or 1 it is Clopper and Pearson's. `units`: the unit of each score; scores of one
    unit count as one.

    >>> interval([1, 1, 1, 0], ["a"] * 4)
    Interval(low=0.194120..., high=0.993690...)
    """
    values = _finite(scores)
    if not len(values):
        return None
    sample = _Sample(values, _weights(groups, len(values)), 0.0, 1.0).by_unit(units)
    low, high = _span(sample.values) if _is_dense(sample.values) else (0.0, 1.0)
    return replace(sample, low=max(0.0, low), high=min(1.0, high)).interval(ALPHA / 2)


def paired(
    scores: Sequence[float], baseline: Sequence[float], groups: Groups, units: Units = None
) -> Paired:
    """Compare two runs on the same examples by the difference of their mean scores: test on two
    sides whether it is 0, and return it with the p-value and a 95 % interval, which leaves out 0
    exactly where p is below 0.05.

    `groups`: the group of each example; the mean is that of group means. `units`: examples of one
    unit count as one. Where all scores are 0 or 1 and all groups equally large, this is McNemar's
    exact test."""
    sample = _differences(scores, baseline, groups, units)
    return Paired(sample.mean, sample.interval(ALPHA / 2, pivot=0.0), sample.p)


def p_value(
    scores: Sequence[float],
    baseline: Sequence[float],
    units: Units = None,
    groups: Groups | None = None,
) -> float:
    """Return the p-value of `paired` alone, without the interval, which takes longer. `groups`:
    None for one group."""
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
    """Hold the values whose weighted mean is estimated. `weights` add up to 1; `low` and `high` are
    the limits between which any value, also one that was not seen, must lie."""

    values: Floats
    weights: Floats
    low: float
    high: float

    @property
    def mean(self) -> float:
        return float(np.clip(self.weights @ self.values, self.values.min(), self.values.max()))

    def by_unit(self, units: Units) -> _Sample:
        """Return a sample with one value for each unit: the weighted mean of the values that belong
        to it. `units`: the unit of each value; None: each value is one."""
        if units is None or len(set(units)) == len(self.values):
            return self
        _, which = np.unique(np.asarray(units), return_inverse=True)
        weights, sums = (
            np.bincount(which, part).astype(float)
            for part in (self.weights, self.weights * self.values)
        )
        return replace(self, values=sums / weights, weights=weights)

    @property
    def mirrored(self) -> _Sample:
        """Return the sample with the signs of its values reversed, so that a bound from above
        becomes one from below."""
        return replace(self, values=-self.values, low=-self.high, high=-self.low)

    @property
    def p(self) -> float:
        """Return the two-sided p-value of the hypothesis that the mean is 0."""
        side = self if self.mean < 0 else self.mirrored
        return min(1.0, 2 * side.upper_p(0.0)) if self.mean else 1.0

    def upper_p(self, mean: float) -> float:
        return float(bounded.upper_p(self.values, self.weights, mean, self.high))

    def interval(self, level: float, pivot: float | None = None) -> Interval:
        """Return the confidence interval of the mean, with an error probability of `level` on
        either side. `pivot`: a mean that the interval leaves out exactly where the test of that
        mean rejects it at this level, so that interval and p-value never disagree."""
        return Interval(-self.mirrored._upper(level, pivot), self._upper(level, pivot))

    def _upper(self, level: float, pivot: float | None) -> float:
        known = tuple(self.values.tolist()), tuple(self.weights.tolist()), self.high, level
        start = self.mean
        if pivot is not None and start < pivot:
            if self.upper_p(pivot) < level:
                end = bounded.upper_end(*known, (start, pivot))
                return min(end, math.nextafter(pivot, -math.inf))
            start = pivot
        return bounded.upper_end(*known, (start, self.high))


def _differences(
    scores: Sequence[float], baseline: Sequence[float], groups: Groups, units: Units
) -> _Sample:
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


def _weights(groups: Groups, size: int) -> Floats:
    """Return the weight of each of `size` examples in the mean of group means: 1 / (number of
    groups * examples of its group); with groups in groups, of the means of these."""
    if len(groups) != size:
        raise ValueError(f"{size} scores for {len(groups)} groups: give each example one of both")
    paths = [(group,) if isinstance(group, str) else tuple(group) for group in groups]
    sizes = Counter(paths)
    nodes = {path[: depth + 1] for path in sizes for depth in range(len(path))}
    parts = Counter(node[:-1] for node in nodes)
    inverse = {
        path: many * math.prod(parts[path[:depth]] for depth in range(len(path)))
        for path, many in sizes.items()
    }
    return np.array([1 / inverse[path] for path in paths])


def _is_dense(values: Floats) -> bool:
    """Return whether the values look as if drawn from a continuous distribution: DENSE or more, no
    two equal, none 0 or 1. If not, many unseen values might equal one of those seen."""
    return (
        len(values) >= DENSE
        and len(np.unique(values)) == len(values)
        and not np.isin(values, (0, 1)).any()
    )


def _span(values: Floats) -> tuple[float, float]:
    """Return the range in which unseen values of a dense sample (`_is_dense`) are taken to lie:
    that of the values and 0, widened by half of itself on either side."""
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    return low - (high - low) / 2, high + (high - low) / 2


class Shift(NamedTuple):
    """Hold by how much a method's costs exceed a baseline's on the same units."""

    n: int  # units
    mean: float  # of the differences
    diff: float  # the estimate that belongs to the test
    ci: Interval | None  # 95 %; None below 6 units, where no difference can be found
    p: float


def shift(costs: Sequence[float], baseline: Sequence[float], units: Units = None) -> Shift:
    """Compare paired costs; those of one unit count as one, their mean. p is below 0.05 exactly
    where the interval leaves out 0.

    >>> shift([1.5, 2.25, 3.5, 4.75, 5.5, 6.25], [1, 2, 3, 4, 5, 6])
    Shift(n=6, mean=0.4583..., diff=0.5, ci=Interval(low=0.25, high=0.75), p=0.03125)
    """
    if len(costs) != len(baseline) or not len(costs):
        raise ValueError(
            f"{len(costs)} costs against {len(baseline)}: give each example one of both, and one at least"
        )
    differences: Floats = np.asarray(costs, dtype=float) - np.asarray(baseline, dtype=float)
    if units is not None:
        _, which = np.unique(np.asarray(units), return_inverse=True)
        differences = np.bincount(which, differences) / np.bincount(which)
    if not np.isfinite(differences).all():
        raise ValueError("a cost is not finite: leave its example out")
    # The means of all pairs of differences, those of one with itself included (Walsh averages). The
    # number of them above x is the signed-rank statistic of the differences less x.
    size = len(differences)
    first, second = np.triu_indices(size)
    means = np.sort((differences[first] + differences[second]) / 2)
    fewer = min(int((means <= 0).sum()), int((means >= 0).sum()))
    # the shifts that the test does not refute lie between two of the means, unless there are too few
    most, at_most = _tails(size, fewer)
    return Shift(
        n=size,
        mean=float(differences.mean()),
        diff=float(np.median(means)),
        ci=Interval(float(means[most - 1]), float(means[-most])) if most else None,
        p=min(1.0, 2 * at_most),
    )


def _tails(size: int, count: int) -> tuple[int, float]:
    """Return the least signed-rank statistic of `size` differences that the test does not refute,
    and the probability that it is at most `count`."""
    if size <= EXACT:
        distribution = _distribution(size)
        return int(np.searchsorted(distribution, ALPHA / 2)), float(distribution[count])
    # here, because a bare GPU machine, whose tests import this module, has none
    from scipy import special

    mean = size * (size + 1) / 4
    deviation = math.sqrt(size * (size + 1) * (2 * size + 1) / 24)
    most = math.ceil(mean - 0.5 + deviation * special.ndtri(ALPHA / 2))
    return most, float(special.ndtr((count + 0.5 - mean) / deviation))


@lru_cache(maxsize=64)
def _distribution(size: int) -> Floats:
    """Return P(signed-rank statistic <= w) for each w, where every rank from 1 to `size` has either
    sign with probability 1/2."""
    shares = np.ones(1)
    for rank in range(1, size + 1):
        apart = np.zeros(rank)
        shares = (np.append(shares, apart) + np.append(apart, shares)) / 2
    total: Floats = np.cumsum(shares)
    return total
