"""By simulation: intervals hold the truth, and tests keep their level."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from evals import bounded, stats
from tests.quick import mostly_slow

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, ...]], Floats]

LEAST = 0.93
BATCH = 500  # samples drawn at a time


def right(share: float) -> Draw:
    return lambda rng, shape: (rng.random(shape) < share).astype(float)


def quarters(*odds: float) -> Draw:
    return lambda rng, shape: rng.choice(len(odds), p=odds, size=shape) / 4


def f1(zeros: float, ones: float) -> Draw:
    """No word right, all right, or some."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        kind = rng.random(shape)
        return np.where(kind < zeros, 0.0, np.where(kind > 1 - ones, 1.0, rng.beta(2, 3, shape)))

    return draw


def perplexity(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return np.exp(-rng.normal(2.5, 0.35, shape))


SCORES: dict[str, tuple[Draw, float]] = {
    "right 5 %": (right(0.05), 0.05),
    "right 50 %": (right(0.5), 0.5),
    "right 90 %": (right(0.9), 0.9),
    "quarters": (quarters(0.1, 0.2, 0.2, 0.2, 0.3), 0.6),
    "quarters, mostly all": (quarters(0.05, 0, 0, 0.1, 0.85), 0.925),
    "F1": (f1(0.25, 0.15), 0.39),
    "F1, mostly zero": (f1(0.85, 0.05), 0.09),
    "1/perplexity": (perplexity, float(np.exp(-2.5 + 0.35**2 / 2))),
}


def lost(rng: np.random.Generator, scores: Floats, share: float) -> Floats:
    return np.where(rng.random(scores.shape) < share, 0.0, scores)


def again(draw: Draw, share: float) -> Callable[[np.random.Generator, Floats], Floats]:
    """As the baseline, but for a share of the examples that came out anew."""
    return lambda rng, theirs: np.where(rng.random(theirs.shape) < share, draw(rng, theirs.shape), theirs)


# baseline, what the method makes of it, the true mean difference
PAIRS: dict[str, tuple[Draw, Callable[[np.random.Generator, Floats], Floats], float]] = {
    "one in twenty lost": (right(1.0), lambda rng, theirs: lost(rng, theirs, 0.05), -0.05),
    "half lost": (right(0.8), lambda rng, theirs: lost(rng, theirs, 0.5), -0.4),
    "right, as good": (right(0.6), again(right(0.6), 0.3), 0.0),
    "quarters, as good": (SCORES["quarters"][0], again(SCORES["quarters"][0], 0.5), 0.0),
    "quarters, a quarter less": (quarters(0, 0, 0, 0, 1), again(quarters(0, 0, 0, 1, 0), 0.4), -0.1),
    "F1, as good": (SCORES["F1"][0], again(SCORES["F1"][0], 0.5), 0.0),
    "F1, a tenth lost": (SCORES["F1"][0], lambda rng, theirs: lost(rng, theirs, 0.1), -0.039),
    "1/perplexity, as good": (perplexity, again(perplexity, 1.0), 0.0),
}


def coverage(
    draw: Callable[[np.random.Generator, tuple[int, ...]], Floats],
    truth: float,
    low: float,
    sizes: Sequence[int],
    samples: int,
) -> float:
    """Share of samples whose interval, between `low` and 1, holds the truth. The ends are not searched for: the truth
    lies inside where its own p says so, which test_the_ends_are_where_p_says holds."""
    rng, held = np.random.default_rng(sum(sizes)), 0
    weights = np.repeat([1 / (len(sizes) * size) for size in sizes], sizes)
    for _ in range(samples // BATCH):
        values, mean = draw(rng, (BATCH, len(weights))), np.full(BATCH, truth)
        above = bounded.upper_p(values, weights, mean, 1.0)
        below = bounded.upper_p(-values, weights, -mean, -low)
        held += int(((above >= 0.025) & (below >= 0.025)).sum())
    return held / samples


def check_scores(name: str, sizes: list[int], samples: int) -> None:
    draw, truth = SCORES[name]
    held = coverage(draw, truth, 0.0, sizes, samples)
    assert held >= LEAST, f"{name}, {sizes} examples: {held:.3f}"


def check_pairs(name: str, sizes: list[int], samples: int) -> None:
    draw, method, truth = PAIRS[name]

    def differences(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
        theirs = draw(rng, shape)
        return method(rng, theirs) - theirs

    held = coverage(differences, truth, -1.0, sizes, samples)
    assert held >= LEAST, f"{name}, {sizes} examples: {held:.3f}"


@pytest.mark.parametrize("sizes", mostly_slow([(3, 20), (2, 5, 10, 40, 100)], (3, 20)))
@pytest.mark.parametrize("name", SCORES)
def test_a_score_lies_in_its_interval(name: str, sizes: Sequence[int]) -> None:
    """1000 samples: where 95 % hold, 93 % are missed once in 500 cases; where 90 %, they are reached as rarely."""
    for size in sizes:
        check_scores(name, [size], 1000)


@pytest.mark.parametrize("sizes", mostly_slow([(3, 20), (2, 5, 10, 40, 100)], (3, 20)))
@pytest.mark.parametrize("name", PAIRS)
def test_a_difference_lies_in_its_interval(name: str, sizes: Sequence[int]) -> None:
    for size in sizes:
        check_pairs(name, [size], 1000)


@pytest.mark.parametrize("sizes", [[6], [4, 9]], ids=str)
def test_the_ends_are_where_p_says(sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    groups = [str(i) for i, size in enumerate(sizes) for _ in range(size)]
    weights = np.repeat([1 / (len(sizes) * size) for size in sizes], sizes)
    for draw, _ in SCORES.values():
        values = draw(rng, (len(groups),))
        got = stats.interval(list(values), groups)
        inside, outside = (float(bounded.upper_p(values, weights, got.high + d, 1.0)) for d in (-1e-6, 1e-6))
        assert outside <= 0.025 <= inside or got.high == 1
        inside, outside = (float(bounded.upper_p(-values, weights, -got.low + d, 0.0)) for d in (-1e-6, 1e-6))
        assert outside <= 0.025 <= inside or got.low == 0


def test_an_interval_without_a_common_score_holds_the_truth() -> None:
    """Where no two scores are alike the interval is narrower than 0 to 1 allow: the ends themselves are simulated."""
    rng, samples, held = np.random.default_rng(4), 100, np.zeros(2)
    groups, truth = ["a"] * stats.DENSE, SCORES["1/perplexity"][1]
    for _ in range(samples):
        theirs = perplexity(rng, (stats.DENSE,))
        worse = theirs * rng.uniform(0.7, 1.0, stats.DENSE)
        score, pair = stats.interval(list(theirs), groups), stats.paired(list(worse), list(theirs), groups)
        held += score.low <= truth <= score.high, pair.ci.low <= -0.15 * truth <= pair.ci.high
        assert pair.ci.high - pair.ci.low < 0.05
    assert min(held) >= samples * LEAST


def test_tables_without_a_difference_rarely_show_one() -> None:
    """200 tables of six methods that are as good as Full: at most 16 (8 %) mark a row after Holm's correction."""
    rng, marked = np.random.default_rng(5), 0
    draw = SCORES["quarters"][0]
    for _ in range(200):
        full = draw(rng, (30,))
        rows = [np.where(rng.random(30) < 0.6, draw(rng, (30,)), full) for _ in range(6)]
        p = [stats.p_value(list(row), list(full)) for row in rows]
        marked += min(stats.holm(p)) < stats.ALPHA
    assert marked <= 16
