"""Statistics against scipy, closed forms and brute force. What they cover and find is simulated in test_coverage.py."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from evals import bounded, stats

ONE = ["a"]
QUARTERS = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])


def test_doctests() -> None:
    assert doctest.testmod(stats, optionflags=doctest.ELLIPSIS).failed == 0


class TestTail:
    @pytest.mark.parametrize(("won", "lost"), [(0, 1), (0, 6), (3, 8), (40, 70), (500, 520)])
    def test_equal_steps_are_a_binomial(self, won: int, lost: int) -> None:
        got = bounded.tail(np.array([[1.0, -1.0]]), np.array([[won + 1.0, lost]]))[0]
        assert got == pytest.approx(scipy_stats.binom.cdf(won, won + lost, 0.5), rel=1e-6)

    def test_uneven_values_and_shapes_are_those_of_a_simulation(self) -> None:
        values, shapes = np.array([0.3, -0.2, 0.05, -0.5, 0.8]), np.array([1, 2.3, 0.4, 1, 1])
        drawn = np.random.default_rng(0).gamma(shapes, size=(400_000, 5)) @ values
        assert bounded.tail(values[None], shapes[None])[0] == pytest.approx((drawn >= 0).mean(), abs=0.004)

    def test_one_sign_alone_is_certain(self) -> None:
        values = np.array([[0.0, -1.0], [0.0, 1.0], [0.0, 0.0], [-1.0, -2.0]])
        assert bounded.tail(values, np.ones((4, 2))).tolist() == [0.0, 1.0, 1.0, 0.0]


class TestInterval:
    @pytest.mark.parametrize(("right", "n"), [(0, 1), (0, 20), (7, 20), (20, 20), (499, 500)])
    def test_right_and_wrong_are_clopper_and_pearson(self, right: int, n: int) -> None:
        ours = stats.interval([1.0] * right + [0.0] * (n - right), ONE * n)
        theirs = scipy_stats.binomtest(right, n).proportion_ci()
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-8)

    def test_partial_scores_are_gaffkes(self) -> None:
        """A quantile of means over Dirichlet shares of the scores and one more at the end."""
        scores = [0.0, 0.25, 0.25, 0.5, 1.0, 0.75]
        shares = np.random.default_rng(0).dirichlet(np.ones(7), size=400_000)
        got = stats.interval(scores, ONE * 6)
        assert got.high == pytest.approx(np.quantile(shares @ np.array([*scores, 1.0]), 0.975), abs=0.002)
        assert got.low == pytest.approx(np.quantile(shares @ np.array([*scores, 0.0]), 0.025), abs=0.002)

    def test_equal_groups_pool_and_a_small_one_widens(self) -> None:
        scores = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
        assert stats.interval(scores, list("aaabbb")) == stats.interval(scores, ONE * 6)
        pooled, uneven = (stats.interval([1.0, 0.0] * 20, groups) for groups in (ONE * 40, ["a"] * 4 + ["b"] * 36))
        assert uneven.high - uneven.low > 1.3 * (pooled.high - pooled.low)

    def test_many_scores_have_the_width_of_the_normal_theory(self) -> None:
        scores = np.random.default_rng(3).choice(5, 3000) / 4
        got = stats.interval(list(scores), ONE * 3000)
        assert got.high - got.low == pytest.approx(2 * 1.96 * scores.std() / math.sqrt(3000), rel=0.02)

    def test_scores_of_which_no_two_are_alike_need_no_room_up_to_1(self) -> None:
        scores = list(np.exp(-np.random.default_rng(0).normal(2.5, 0.3, 40)))
        dense, alike = stats.interval(scores, ONE * 40), stats.interval([*scores[1:], scores[1]], ONE * 40)
        assert dense.high < np.mean(scores) + 0.02
        assert alike.high > np.mean(scores) + 0.04

    def test_a_score_each(self) -> None:
        assert stats.interval([], []) is None
        for score in (0.0, 0.5, 1.0):
            one = stats.interval([score], ["a"])
            assert one.low <= score <= one.high
            assert one.high - one.low >= 0.95

    @pytest.mark.parametrize("scores", [[1.0, math.nan], [1.0], [1.0, math.inf]])
    def test_refuses_what_has_no_mean(self, scores: list[float]) -> None:
        with pytest.raises(ValueError, match=r"finite|groups"):
            stats.interval(scores, ["a", "a"])

    @given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from("abc")), min_size=1, max_size=30))
    def test_bounded_and_around_the_mean(self, pairs: list[tuple[float, str]]) -> None:
        scores, groups = [score for score, _ in pairs], [group for _, group in pairs]
        got = stats.interval(scores, groups)
        mean = np.mean([np.mean([s for s, g in pairs if g == group]) for group in set(groups)])
        assert 0 <= got.low <= mean + 1e-12
        assert mean - 1e-12 <= got.high <= 1 + 1e-12
        assert got.low < got.high


class TestPaired:
    def test_mcnemar_by_hand(self) -> None:
        full = [1.0] * 8 + [0.0] * 12
        method = [0.0] * 6 + [1.0] * 3 + [0.0] * 11  # 6 lost, 1 won: p = 2 * (C(7,0) + C(7,1)) / 2^7
        got = stats.paired(method, full, ONE * 20)
        assert (got.diff, got.p) == (pytest.approx(-0.25), pytest.approx(2 * 8 / 128))

    @given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(1, 3))
    def test_right_and_wrong_are_mcnemars(self, won: int, lost: int, same: int, groups: int) -> None:
        if not won + lost:
            return
        ours, theirs = [1.0] * won + [0.0] * (lost + same), [0.0] * won + [1.0] * lost + [0.0] * same
        names = [str(i) for i in range(groups)]
        got = stats.paired(ours * groups, theirs * groups, sorted(names * len(ours)))
        known = scipy_stats.binomtest(won * groups, (won + lost) * groups).pvalue
        assert got.p == pytest.approx(known, rel=1e-6, abs=1e-12)

    def test_same_scores_prove_nothing(self) -> None:
        for scores in ([1.0, 0.0, 1.0], [0.2, 0.3, 0.4]):
            got = stats.paired(scores, scores, ONE * 3)
            assert (got.diff, got.p) == (0.0, 1.0)
            assert got.ci.low == pytest.approx(-got.ci.high)
            assert got.ci.high == pytest.approx(1 - 0.025 ** (1 / 3), abs=1e-6)  # what may be unseen in three examples

    @given(st.lists(st.tuples(QUARTERS, QUARTERS, st.sampled_from("abc")), min_size=1, max_size=40))
    def test_interval_and_test_never_contradict_each_other(self, rows: list[tuple[float, float, str]]) -> None:
        self.check(*map(list, zip(*rows, strict=True)))

    @given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.sampled_from("ab")), min_size=1, max_size=40))
    def test_nor_where_scores_are_any_numbers(self, rows: list[tuple[float, float, str]]) -> None:
        self.check(*map(list, zip(*rows, strict=True)))

    @given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 20))
    def test_nor_where_scores_are_right_and_wrong(self, won: int, lost: int, same: int) -> None:
        ours, theirs = [1.0] * won + [0.0] * (lost + same), [0.0] * won + [1.0] * lost + [0.0] * same
        if ours:
            self.check(ours, theirs, ONE * len(ours))

    @staticmethod
    def check(ours: list[float], theirs: list[float], groups: list[str]) -> None:
        got = stats.paired(ours, theirs, groups)
        assert (got.p < 0.05) == (got.ci.low > 0 or got.ci.high < 0)
        assert -1 <= got.ci.low <= got.diff + 1e-9
        assert got.diff - 1e-9 <= got.ci.high <= 1
        turned = stats.paired(theirs, ours, groups)
        assert (turned.p, turned.ci.high) == (pytest.approx(got.p, abs=1e-9), pytest.approx(-got.ci.low, abs=1e-6))

    def test_a_group_of_many_weighs_no_more_than_one_of_few(self) -> None:
        ours, theirs = [0.0] * 4 + [1.0] * 40, [1.0] * 4 + [0.0] * 10 + [1.0] * 30
        got = stats.paired(ours, theirs, ["few"] * 4 + ["many"] * 40)
        assert got.diff == pytest.approx((-1 + 0.25) / 2)
        assert got.p > 0.05  # four losses alone are p = 0.125, whatever the other group's ten wins

    def test_a_loss_on_every_window_of_a_text_is_found(self) -> None:
        rng = np.random.default_rng(1)
        full = np.exp(-rng.normal(2.5, 0.35, 30))
        got = stats.paired(list(full * np.exp(-rng.uniform(0.02, 0.1, 30))), list(full), ONE * 30)
        assert got.p < 1e-4
        assert -0.01 < got.ci.low < got.ci.high < 0

    def test_nothing_to_compare(self) -> None:
        with pytest.raises(ValueError, match="at least one example"):
            stats.paired([], [], [])
        with pytest.raises(ValueError, match="2 scores against 1"):
            stats.paired([1.0, 0.0], [1.0], ["a", "a"])


def test_holm_keeps_order_and_never_decreases() -> None:
    assert stats.holm([]) == []
    assert stats.holm([0.04, 0.001, 0.9, 0.02]) == pytest.approx([0.08, 0.004, 0.9, 0.06])
    assert stats.holm([0.5, 0.6]) == [1.0, 1.0]


def test_scores_of_a_unit_count_as_one() -> None:
    """Said twice, a score tells nothing new; the mean of a unit is what it says."""
    scores, other, groups = [1.0, 0.0, 1.0, 1.0, 0.5], [1.0, 1.0, 0.0, 1.0, 1.0], ["a", "a", "a", "b", "b"]
    units = [f"unit {i}" for i in range(5)]
    twice = [value for value in range(5) for _ in range(2)]
    said = [[column[i] for i in twice] for column in (scores, other, groups, units)]
    assert stats.interval(said[0], said[2], units=said[3]) == stats.interval(scores, groups)  # type: ignore[arg-type]
    assert stats.paired(*said) == stats.paired(scores, other, groups)  # type: ignore[arg-type]
    assert stats.p_value(said[0], said[1], said[3]) == stats.p_value(scores, other)  # type: ignore[arg-type]
    apart, together = (stats.interval([1, 1, 0, 0], ["a"] * 4, units=units) for units in (None, ["x", "x", "y", "y"]))
    assert together == stats.interval([1, 0], ["a"] * 2)
    assert together.low < apart.low < apart.high < together.high
    mixed = stats.interval([1, 0, 0, 0], ["a"] * 4, units=["x", "x", "y", "z"])
    assert mixed.low < 0.25 < mixed.high
