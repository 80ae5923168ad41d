"""Statistics against scipy, closed forms and brute force."""

from __future__ import annotations

import doctest
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from evals import stats

ONE = ["a"]


def test_doctests() -> None:
    assert doctest.testmod(stats).failed == 0


class TestInterval:
    @pytest.mark.parametrize(("right", "n"), [(0, 1), (0, 20), (7, 20), (20, 20), (499, 500)])
    def test_wilson_is_scipys(self, right: int, n: int) -> None:
        ours = stats.interval([1.0] * right + [0.0] * (n - right), ONE * n)
        theirs = scipy_stats.binomtest(right, n).proportion_ci(method="wilson")
        assert ours is not None
        assert ours.kind == "wilson"
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)

    def test_equal_groups_pool_and_unequal_ones_weigh_less(self) -> None:
        scores = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
        assert stats.interval(scores, list("aaabbb")) == stats.interval(scores, ONE * 6)
        unequal = stats.interval(scores, list("abbbbb"))  # worth 4 / (1 + 1/5) = 3.33 examples
        assert unequal is not None
        centre = (0.8 + 1.959963984540054**2 / (2 * 10 / 3)) / (1 + 1.959963984540054**2 / (10 / 3))
        assert (unequal.low + unequal.high) / 2 == pytest.approx(centre, abs=1e-9)

    def test_bootstrap_has_the_width_of_the_normal_theory(self) -> None:
        rng = np.random.default_rng(3)
        scores = [*rng.uniform(0, 1, 400), *rng.uniform(0.4, 0.6, 100)]
        got = stats.interval(scores, ["a"] * 400 + ["b"] * 100)
        assert got is not None
        assert got.kind == "bootstrap"
        error = math.sqrt(np.var(scores[:400]) / 400 + np.var(scores[400:]) / 100) / 2
        assert got.high - got.low == pytest.approx(2 * 1.96 * error, rel=0.05)
        assert got == stats.interval(scores, ["a"] * 400 + ["b"] * 100)
        assert got != stats.interval(scores, ["a"] * 400 + ["b"] * 100, seed=1)

    def test_too_little_to_tell(self) -> None:
        assert stats.interval([], []) is None
        assert stats.interval([0.5], ["a"]) is None
        assert stats.interval([0.5, 0.4, 0.3], ["a", "a", "b"]) is None

    @pytest.mark.parametrize("scores", [[1.0, math.nan], [1.0], [1.0, math.inf]])
    def test_refuses_what_has_no_mean(self, scores: list[float]) -> None:
        with pytest.raises(ValueError, match=r"finite|groups"):
            stats.interval(scores, ["a", "a"])

    @given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from("abc")), min_size=1, max_size=30))
    def test_bounded_and_around_the_mean(self, pairs: list[tuple[float, str]]) -> None:
        scores, groups = [score for score, _ in pairs], [group for _, group in pairs]
        got = stats.interval(scores, groups)
        if got is not None:
            assert 0 <= got.low <= got.high <= 1 + 1e-12


class TestPaired:
    def test_mcnemar_by_hand(self) -> None:
        full = [1.0] * 8 + [0.0] * 12
        method = [0.0] * 6 + [1.0] * 3 + [0.0] * 11  # 6 lost, 1 won: p = 2 * (C(7,0) + C(7,1)) / 2^7
        got = stats.paired(method, full, ONE * 20)
        assert (got.test, got.diff) == ("mcnemar_exact", pytest.approx(-0.25))
        assert got.p == pytest.approx(2 * 8 / 128)
        assert got.ci is not None
        better, worse = 2 / 22, 7 / 22
        half = 1.959963984540054 * math.sqrt((better + worse - (better - worse) ** 2) / 22)
        assert (got.ci.low, got.ci.high) == pytest.approx((better - worse - half, better - worse + half))

    def test_same_outputs(self) -> None:
        for scores in ([1.0, 0.0, 1.0], [0.2, 0.3, 0.4]):
            got = stats.paired(scores, scores, ONE * 3)
            assert (got.diff, got.p, got.detectable) == (0.0, 1.0, None)
        binary = stats.paired([1.0] * 9, [1.0] * 9, ONE * 9).ci
        assert binary is not None
        assert binary.low < 0 < binary.high  # nine equal pairs do not prove that there is no difference

    @given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=2, max_size=12))
    def test_sign_flips_of_binary_scores_are_mcnemar(self, differences: list[float]) -> None:
        zeros = [0.0] * len(differences)
        flips = stats.paired([d / 2 for d in differences], zeros, ONE * len(differences))  # halves: not 0 or 1
        ours, theirs = [float(d > 0) for d in differences], [float(d < 0) for d in differences]
        assert flips.p == pytest.approx(stats.paired(ours, theirs, ONE * len(differences)).p)

    def test_exact_flips_are_scipys_permutations(self) -> None:
        rng = np.random.default_rng(0)
        a, b = rng.uniform(0, 1, 11), rng.uniform(0, 0.8, 11)
        theirs = scipy_stats.permutation_test(
            (a, b), lambda x, y, axis: (x - y).mean(axis=axis), permutation_type="samples", n_resamples=np.inf
        )
        got = stats.paired(list(a), list(b), ONE * 11)
        assert (got.test, got.p) == ("sign_flip_exact", pytest.approx(theirs.pvalue))

    def test_groups_weigh_the_same(self) -> None:
        differences, groups = [0.3, 0.1, -0.2, 0.05, 0.4], ["a", "a", "a", "b", "b"]
        got = stats.paired(differences, [0.0] * 5, groups)
        weights = np.array([1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2]) / 2
        seen = float(weights @ differences)
        signs = itertools.product([1, -1], repeat=5)
        share = np.mean([abs(weights * np.array(s) @ differences) >= seen - 1e-12 for s in signs])
        assert (got.diff, got.p) == (pytest.approx(seen), pytest.approx(share))

    def test_monte_carlo_nears_the_t_test(self) -> None:
        rng = np.random.default_rng(1)
        differences = rng.normal(0.02, 0.15, 200)
        got = stats.paired(list(differences), [0.0] * 200, ONE * 200, seed=5)
        assert got.test == "sign_flip_monte_carlo"
        assert got.p == pytest.approx(scipy_stats.ttest_1samp(differences, 0).pvalue, abs=0.02)
        assert got == stats.paired(list(differences), [0.0] * 200, ONE * 200, seed=5)

    def test_nothing_to_compare(self) -> None:
        with pytest.raises(ValueError, match="at least one example"):
            stats.paired([], [], [])


def test_p_alone_is_that_of_the_whole_comparison() -> None:
    for ours, theirs in (([1, 0, 0, 1], [1, 1, 1, 1]), ([0.5, 0.25, 1.0], [0.75, 1.0, 1.0])):
        assert stats.p_value(ours, theirs) == stats.paired(ours, theirs, ["g"] * len(ours)).p


def test_holm_keeps_order_and_never_decreases() -> None:
    assert stats.holm([]) == []
    assert stats.holm([0.04, 0.001, 0.9, 0.02]) == pytest.approx([0.08, 0.004, 0.9, 0.06])
    assert stats.holm([0.5, 0.6]) == [1.0, 1.0]


def test_smallest_detectable_is_detected_in_four_of_five_trials() -> None:
    rng = np.random.default_rng(2)
    noise = rng.normal(0, 0.1, 50)
    noise = (noise - noise.mean()) / noise.std(ddof=1) * 0.1
    effect = stats.smallest_detectable(list(noise), ONE * 50)
    assert effect == pytest.approx((1.959964 + 0.841621) * 0.1 / math.sqrt(50), rel=1e-5)
    trials = rng.normal(effect, 0.1, (4000, 50))
    z = trials.mean(axis=1) / (0.1 / math.sqrt(50))
    assert (abs(z) > 1.96).mean() == pytest.approx(0.8, abs=0.02)
    assert stats.smallest_detectable([0.1], ONE) is None
