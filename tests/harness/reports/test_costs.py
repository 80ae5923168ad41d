"""Fronts and bytes within a point of Full, on tables whose answers are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.reports import costs
from harness.reports.compare import Comparison, comparisons
from harness.results.run_folder import find, load
from tests.fake_records import records, talk, turn, write_run


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


@pytest.fixture
def table(tmp_path: Path) -> Comparison:
    """Of 200 examples, quest loses 10, 2 and 1 at 5, 10 and 20 %; snapkv always half."""
    write_run(tmp_path, records([1.0] * 200, kv_device_bytes=1000))
    for budget, lost, moved in ((0.05, 10, 0.0), (0.1, 2, 100.0), (0.2, 1, 0.0)):
        sizes = {"kv_device_bytes": int(1000 * budget), "moved_bytes_per_step": moved}
        write_run(tmp_path, records([0.0] * lost + [1.0] * (200 - lost), **sizes), "quest", budget=budget)
        write_run(tmp_path, records([1.0, 0.0] * 100, **sizes), "snapkv", budget=budget)
    write_run(tmp_path, records([1.0] * 5, kv_device_bytes=1), "h2o", "interrupted", facts={"num_expected": 200})
    [found] = comparisons([load(run) for run in find([tmp_path])])
    return found


def test_bytes_within_a_point_count_what_is_moved(table: Comparison) -> None:
    found = costs.within(table)
    assert found["snapkv"] is None
    assert found["quest"] is not None
    assert found["quest"].title == "quest 10%"  # 100 bytes and 100 moved, as at 20 %, but a tie goes to the smaller
    assert costs.needed(found["quest"]) == ({"device": 100, "host": 0}, 100)
    assert "h2o" not in found  # not complete


def test_the_table_says_what_was_not_reached(table: Comparison) -> None:
    method, total, of_full, *_, budget, difference, _ = costs.within_table(table)
    assert method.cells == ["quest", "snapkv"]
    assert (total.cells, total.unit) == (["200", "not reached"], "B")
    assert of_full.cells == ["20.0", ""]
    assert budget.cells == ["10%", ""]
    assert difference.cells[0].startswith("-1.0 [")


def test_bytes_of_an_example_are_added_up_before_rows_are_compared(tmp_path: Path) -> None:
    """The largest KV of any example and the mean of what is moved would put sparq, at 3800, before pqcache at 4000."""
    write_run(tmp_path, records([1.0] * 2, kv_device_bytes=4000))
    for method, sizes in (("sparq", (1000, 600.0, 2000, 3000.0)), ("pqcache", (2500, 500.0, 3000, 1500.0))):
        short, long = (
            records([1.0], name, kv_device_bytes=held, moved_bytes_per_step=moved, kv_host_bytes=3 * held)
            for name, held, moved in (("e", *sizes[:2]), ("f", *sizes[2:]))
        )
        write_run(tmp_path, [*short, *long], method)
    [found] = comparisons([load(run) for run in find([tmp_path])])
    method, total, _, device, moved, host, *_ = costs.within_table(found)
    assert method.cells == ["pqcache", "sparq"]
    assert total.values == [4500, 5000]
    assert (device.values, moved.values, host.values) == ([3000, 2000], [1500, 3000], [9000, 6000])


def test_of_a_conversation_the_turn_counts_that_needs_the_most(tmp_path: Path) -> None:
    turns = [turn(kv_device_bytes=held, moved_bytes_per_step=moved) for held, moved in ((5, 9.0), (6, 7.0))]
    write_run(tmp_path, [talk("a", *turns)])
    write_run(tmp_path, [talk("a", *turns)], "quest")
    [found] = comparisons([load(run) for run in find([tmp_path])])
    assert costs.within_table(found)[1].values == [14]


def test_where_full_guesses_nothing_is_within_a_point_of_it(tmp_path: Path) -> None:
    for folder, scores in (("guessing", [0.25, 0.0] * 50), ("right", [0.5, 0.25] * 50)):
        write_run(tmp_path / folder, records(scores), facts={"task_info": {"chance": 0.125}})
        write_run(tmp_path / folder, records(scores), "quest", facts={"task_info": {"chance": 0.125}})
        [found] = comparisons([load(run) for run in find([tmp_path / folder])])
        assert bool(costs.within_table(found)) == (folder == "right")


def test_without_full_there_is_no_such_table(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 10), "quest")
    [found] = comparisons([load(run) for run in find([tmp_path])])
    assert costs.within_table(found) == []
