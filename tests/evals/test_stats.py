"""Statistics against scipy, closed forms and brute force. What they cover and find is simulated in test_coverage.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from evals import bounded, stats

ONE = ["a"]
QUARTERS = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])


class TestTail:
    @pytest.mark.parametrize(("won", "lost"), [(0, 1), (0, 6), (3, 8), (40, 70), (500, 520)])
    def test_equal_steps_are_a_binomial(self, won: int, lost: int) -> None:
        got = bounded.tail(np.array([[1.0, -1.0]]), np.array([[won + 1.0, lost]]))[0]
        assert got == pytest.approx(scipy_stats.binom.cdf(won, won + lost, 0.5), rel=1e-6)

    def test_one_sign_alone_is_certain(self) -> None:
        values = np.array([[0.0, -1.0], [0.0, 1.0], [0.0, 0.0], [-1.0, -2.0]])
        assert bounded.tail(values, np.ones((4, 2))).tolist() == [0.0, 1.0, 1.0, 0.0]


class TestInterval:
    def test_groups_in_groups_weigh_the_same_at_each_level(self) -> None:
        """Two tasks, one with groups of 2 and 1 examples, the other with one of 3."""
        groups = [("a", "x"), ("a", "x"), ("a", "y"), *[("b", "z")] * 3]
        ours, theirs = [1.0, 0.5, 0.25, 0.0, 0.5, 1.0], [0.0] * 6
        assert stats.paired(ours, theirs, groups).diff == pytest.approx(((0.75 + 0.25) / 2 + 0.5) / 2)
        single, flat = ([(group,) for group in "aabccc"], list("aabccc"))
        assert stats.interval(ours, single) == stats.interval(ours, flat)

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

    def test_scores_of_which_no_two_are_alike_need_no_room_up_to_1(self) -> None:
        scores = list(np.exp(-np.random.default_rng(0).normal(2.5, 0.3, 40)))
        dense, alike = stats.interval(scores, ONE * 40), stats.interval([*scores[1:], scores[1]], ONE * 40)
        assert dense.high < np.mean(scores) + 0.02
        assert alike.high > np.mean(scores) + 0.04

    @given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from("abc")), min_size=1, max_size=30))
    def test_bounded_and_around_the_mean(self, pairs: list[tuple[float, str]]) -> None:
        scores, groups = [score for score, _ in pairs], [group for _, group in pairs]
        got = stats.interval(scores, groups)
        mean = np.mean([np.mean([s for s, g in pairs if g == group]) for group in set(groups)])
        assert 0 <= got.low <= mean + 1e-12
        assert mean - 1e-12 <= got.high <= 1 + 1e-12
        assert got.low < got.high


class TestPaired:
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

    @staticmethod
    def check(ours: list[float], theirs: list[float], groups: list[str]) -> None:
        got = stats.paired(ours, theirs, groups)
        assert (got.p < 0.05) == (got.ci.low > 0 or got.ci.high < 0)
        assert -1 <= got.ci.low <= got.diff + 1e-9
        assert got.diff - 1e-9 <= got.ci.high <= 1
        turned = stats.paired(theirs, ours, groups)
        assert (turned.p, turned.ci.high) == (pytest.approx(got.p, abs=1e-9), pytest.approx(-got.ci.low, abs=1e-6))

    def test_a_loss_on_every_window_of_a_text_is_found(self) -> None:
        rng = np.random.default_rng(1)
        full = np.exp(-rng.normal(2.5, 0.35, 30))
        got = stats.paired(list(full * np.exp(-rng.uniform(0.02, 0.1, 30))), list(full), ONE * 30)
        assert got.p < 1e-4
        assert -0.01 < got.ci.low < got.ci.high < 0


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


def test_a_shift_is_wilcoxons_and_its_interval_leaves_out_0_where_p_says_so() -> None:
    """With ties and zeros as well, which count for both sides."""
    rng = np.random.default_rng(0)
    for size in (5, 8, 30, 180):
        values = rng.normal(0.2, 1, size)
        wanted = scipy_stats.wilcoxon(values, method="exact").pvalue
        assert stats.shift(list(values), [0.0] * size).p == pytest.approx(wanted, rel=1e-9)
    many = rng.normal(0.02, 1, stats.EXACT + 9)
    wanted = scipy_stats.wilcoxon(many, method="asymptotic", correction=True).pvalue
    assert stats.shift(list(many), [0.0] * len(many)).p == pytest.approx(wanted, rel=1e-9)
    for size in [6, 7, 12, 30, 201] * 12:
        values = np.round(rng.normal(0.4, 1, size), int(rng.integers(0, 3)))
        made = stats.shift(list(values), [0.0] * size)
        assert (made.p < 0.05) == (not made.ci.low <= 0 <= made.ci.high)
        assert made.ci.low <= made.diff <= made.ci.high


def test_few_or_equal_units_show_nothing_and_examples_of_one_count_as_one() -> None:
    assert stats.shift([1.0] * 5, [0.0] * 5).ci is None
    same = stats.shift([1.0, 2.0] * 10, [1.0, 2.0] * 10)
    assert (same.mean, same.diff, same.p) == (0.0, 0.0, 1.0)
    values = np.random.default_rng(3).normal(0.3, 1, 12)
    apart = stats.shift(list(values), [0.0] * 12)
    twice = stats.shift([*(values - 0.1), *(values + 0.1)], [0.0] * 24, [str(i) for i in range(12)] * 2)
    assert (twice.n, twice.diff, twice.p) == (12, pytest.approx(apart.diff), apart.p)


@pytest.mark.parametrize("size", [6, 24])
def test_the_interval_holds_the_truth(size: int) -> None:
    """The mean, in 93 of 100 samples, also with a tail on either side."""
    rng = np.random.default_rng(size)
    for draws in (rng.normal(size=(1000, size)), rng.standard_t(2, (1000, size))):
        found = [stats.shift(list(values), [0.0] * size).ci for values in draws]
        assert sum(ci is not None and ci.low <= 0 <= ci.high for ci in found) >= 930
