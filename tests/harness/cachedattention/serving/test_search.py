"""Which rates a search runs, and what it finds."""

from __future__ import annotations

import pytest

from harness.cachedattention.serving.figures import FirstTokenLimit
from harness.cachedattention.serving.runs import CLOSE, MOST, RateSearch
from harness.config.settings import SettingsError


def searched(given: list[float], true: float) -> RateSearch:
    """Over a system that keeps its limit up to the rate `true`."""
    search = RateSearch(given, most=100.0)
    for _ in range(100):
        if (rate := search.next()) is None:
            return search
        assert rate not in (*search.kept, *search.broken)
        search.learn(rate, rate <= true)
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("true", [0.013, 0.3, 0.55, 1.0, 1.7, 30.0])
def test_the_limit_is_found_wherever_it_lies(true: float) -> None:
    search = searched([0.5, 1.0], true)
    assert {0.5, 1.0} <= {*search.kept, *search.broken}
    assert search.highest is not None
    assert search.highest <= true < search.lowest_broken <= CLOSE * search.highest


def test_what_no_rate_keeps_and_what_none_breaks_comes_to_an_end() -> None:
    never, always = searched([1.0], 0.0), searched([1.0], 1e9)
    assert never.highest is None
    assert len(never.broken) == MOST + 1
    assert always.highest == 128.0
    assert always.broken == []


def test_limits_are_read_or_refused() -> None:
    limit = FirstTokenLimit.read("p90=2s")
    assert (limit.key, limit.seconds) == ("ttft_p90_s", 2.0)
    assert FirstTokenLimit.read("p99=0.5").seconds == 0.5
    for wrong in ("p95=2s", "2s", "p90=0s", "p90=-1s", "p90=2ms"):
        with pytest.raises(SettingsError, match="p90=2s"):
            FirstTokenLimit.read(wrong)
