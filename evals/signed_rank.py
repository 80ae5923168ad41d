"""Tests whether paired costs differ, and by how much, without an assumption about how far apart
they may lie.

Costs of right answers have tails: one prompt that a method fails may cost more than all others
together, and a test of means then sees nothing. Wilcoxon's signed-rank test (Biometrics Bulletin 1,
1945) counts instead which of two signs the larger differences have. Its estimate is the median of
the means of all pairs of differences (Hodges and Lehmann, Annals of Mathematical Statistics 34,
1963), and its interval holds the differences that the test does not refute.

scipy.stats.wilcoxon gives the same p where no difference is 0 and no two are equal. It has no
interval, and its p for zeros and ties would not agree with one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from evals.stats import ALPHA, Interval, Units

Floats = NDArray[np.float64]

EXACT = 200  # units up to which the test's distribution is counted; beyond, the normal one differs in the fifth digit


@dataclass(frozen=True, slots=True)
class Shift:
    """Say by how much a method's costs exceed a baseline's on the same units."""

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
        raise ValueError(f"{len(costs)} costs against {len(baseline)}: give each example one of both, and one at least")
    differences = _by_unit(np.asarray(costs, dtype=float) - np.asarray(baseline, dtype=float), units)
    if not np.isfinite(differences).all():
        raise ValueError("a cost is not finite: leave its example out")
    size, means = len(differences), _pair_means(differences)
    fewer = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p = min(1.0, 2 * _at_most(fewer, size))
    return Shift(size, float(differences.mean()), float(np.median(means)), _interval(means, size), p)


def _by_unit(values: Floats, units: Units) -> Floats:
    if units is None:
        return values
    _, which = np.unique(np.asarray(units), return_inverse=True)
    means: Floats = np.bincount(which, values) / np.bincount(which)
    return means


def _pair_means(values: Floats) -> Floats:
    """Return the means of all pairs, a value with itself among them, in order. As many of them lie
    above a number as the signed-rank statistic of the differences to it says."""
    first, second = np.triu_indices(len(values))
    return np.sort((values[first] + values[second]) / 2)


def _interval(means: Floats, size: int) -> Interval | None:
    """Return the numbers that the test does not refute. Its statistic steps at the means of
    pairs."""
    from scipy import special  # here, because a bare GPU machine, whose tests import this module, has none

    if size <= EXACT:
        most = int(np.searchsorted(_distribution(size), ALPHA / 2))
    else:
        mean, deviation = _moments(size)
        most = math.ceil(mean - 0.5 + deviation * special.ndtri(ALPHA / 2))
    return Interval(float(means[most - 1]), float(means[-most])) if most else None


def _at_most(count: int, size: int) -> float:
    """Return the probability of a signed-rank statistic of at most `count` where signs fall by
    chance."""
    from scipy import special  # here, because a bare GPU machine, whose tests import this module, has none

    if size <= EXACT:
        return float(_distribution(size)[count])
    mean, deviation = _moments(size)
    return float(special.ndtr((count + 0.5 - mean) / deviation))


def _moments(size: int) -> tuple[float, float]:
    """Return mean and standard deviation of the statistic."""
    return size * (size + 1) / 4, math.sqrt(size * (size + 1) * (2 * size + 1) / 24)


@lru_cache(maxsize=64)
def _distribution(size: int) -> Floats:
    """Return P(statistic <= w) for each w: every rank from 1 to `size` has either sign with
    probability 1/2."""
    shares = np.ones(1)
    for rank in range(1, size + 1):
        apart = np.zeros(rank)
        shares = (np.append(shares, apart) + np.append(apart, shares)) / 2
    total: Floats = np.cumsum(shares)
    return total
