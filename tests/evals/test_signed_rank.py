"""The signed-rank test against scipy, and by simulation what its interval holds."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats as scipy_stats

from evals import signed_rank
from evals.signed_rank import shift

Floats = NDArray[np.float64]


def test_doctests() -> None:
    assert doctest.testmod(signed_rank, optionflags=doctest.ELLIPSIS).failed == 0


def test_the_test_is_wilcoxons() -> None:
    rng = np.random.default_rng(0)
    for size in (5, 8, 30, 180):
        values = rng.normal(0.2, 1, size)
        wanted = scipy_stats.wilcoxon(values, method="exact").pvalue
        assert shift(list(values), [0.0] * size).p == pytest.approx(wanted, rel=1e-9)


def test_many_units_take_the_normal_distribution() -> None:
    size = signed_rank.EXACT
    mean, spread = size * (size + 1) / 4, np.sqrt(size * (size + 1) * (2 * size + 1) / 24)
    values = list(np.random.default_rng(1).normal(0.1, 1, size + 1))
    made = shift(values, [0.0] * len(values))
    assert made.p == pytest.approx(scipy_stats.wilcoxon(values, method="asymptotic", correction=True).pvalue, rel=1e-6)
    for away in (1.0, 1.96, 3.0):
        exact = signed_rank._distribution(size)[round(mean - away * spread)]
        assert exact == pytest.approx(scipy_stats.norm.cdf(-away), rel=0.05)


def test_the_interval_leaves_out_0_where_p_says_so() -> None:
    """With ties and zeros as well, which count for both sides."""
    rng = np.random.default_rng(2)
    for size in [6, 7, 12, 30, 201] * 12:
        values = np.round(rng.normal(0.4, 1, size), int(rng.integers(0, 3)))
        made = shift(list(values), [0.0] * size)
        assert (made.p < 0.05) == (not made.ci.low <= 0 <= made.ci.high)
        assert made.ci.low <= made.diff <= made.ci.high


def test_few_or_equal_units_show_nothing() -> None:
    assert shift([1.0] * 5, [0.0] * 5).ci is None
    same = shift([1.0, 2.0] * 10, [1.0, 2.0] * 10)
    assert (same.mean, same.diff, same.p) == (0.0, 0.0, 1.0)


def test_examples_of_one_unit_count_as_one() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(0.3, 1, 12)
    apart = shift(list(values), [0.0] * 12)
    twice = shift([*(values - 0.1), *(values + 0.1)], [0.0] * 24, [str(i) for i in range(12)] * 2)
    assert (twice.n, twice.diff, twice.p) == (12, pytest.approx(apart.diff), apart.p)


@pytest.mark.parametrize(("costs", "baseline"), [([], []), ([1.0], [1.0, 2.0]), ([float("nan")], [1.0])])
def test_what_cannot_be_compared_is_refused(costs: list[float], baseline: list[float]) -> None:
    with pytest.raises(ValueError, match="cost"):
        shift(costs, baseline)


def windows(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Mean differences over the tokens of a window, of which about 13 cost more, by as much as an exponential says: the
    skew is 0.55, and the mean is 0."""
    return rng.gamma(13, 1 / 13, shape) - 1


DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Floats]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "a tail on either side": lambda rng, shape: rng.standard_t(2, shape),
    "windows of a text": windows,
}


@pytest.mark.parametrize("size", [6, 24, 40])
@pytest.mark.parametrize("name", DRAWS)
def test_the_interval_holds_the_truth(name: str, size: int) -> None:
    """The mean, in 93 of 100 samples."""
    rng, samples, held = np.random.default_rng(size), 1000, 0
    for values in DRAWS[name](rng, (samples, size)):
        ci = shift(list(values), [0.0] * size).ci
        held += ci is not None and ci.low <= 0 <= ci.high
    assert held >= 0.93 * samples
