"""Pareto fronts of points whose answer is known."""

from __future__ import annotations

import numpy as np

from harness.reports import costs


def test_a_front_is_what_nothing_beats() -> None:
    points = [(1, 0.5), (2, 0.5), (2, 0.9), (3, 0.9), (4, 0.8), None, (1, 0.5), (5, 1.0)]
    assert costs.front(points) == {0, 2, 6, 7}
    assert costs.front([]) == costs.front([None]) == set()


def test_a_front_rises() -> None:
    points = [tuple(point) for point in np.random.default_rng(0).random((200, 2)).tolist()]
    front = sorted(points[i] for i in costs.front(points))
    assert [score for _, score in front] == sorted(score for _, score in front)
    for cost, score in points:
        assert any(c <= cost and s >= score for c, s in front)
