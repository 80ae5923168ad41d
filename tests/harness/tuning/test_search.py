"""What is tried of a method, and how the best is found: a made-up score in place of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.catalogue import entries
from harness.config.plugins import build, describe
from harness.config.settings import SettingsError
from harness.results.run_folder import StoredRun
from harness.tuning.search import Runs, Search, fitting
from methods.base import Method
from methods.snapkv import SnapKV
from tests.fake_records import record

GRIDS = {"window": (32, 16, 8), "kernel": (7, 15, 31), "pooling": ("max", "avg")}
Score = Callable[[SnapKV], float]


class Fake(Search):
    """Scores of `score`, tokens read of `read`."""

    score: Score
    read: Score
    ran: list[Method]

    def run(self, part: str, items: Sequence[Any], candidates: Sequence[Any]) -> Runs:
        self.ran.extend(one for one in candidates if one not in self.ran)
        return {one: StoredRun(Path(), {}, {}, self.records(one), "complete") for one in candidates}

    def records(self, one: SnapKV) -> list[Any]:
        return [record(str(item), score=type(self).score(one), attended_prompt=type(self).read(one)) for item in "ab"]


def searched(score: Score, read: Score = lambda method: 20.0) -> tuple[SnapKV, list[Method]]:
    start = SimpleNamespace(method=SnapKV(), budget=None)
    kind = type("Scored", (Fake,), {"score": staticmethod(score), "read": staticmethod(read), "ran": []})
    search = kind(start, GRIDS, "ab", [])
    best: SnapKV = search.best()[0]
    return best, search.ran


def test_each_parameter_in_turn_takes_its_best_value() -> None:
    """Each helps a little alone; together they are best, and more than the sum."""

    def score(method: SnapKV) -> float:
        wide, averaged = method.kernel == 15, method.pooling == "avg"
        return 0.1 + 0.1 * wide + 0.1 * averaged + 0.6 * (wide and averaged)

    best, ran = searched(score)
    assert best == SnapKV(kernel=15, pooling="avg")
    assert len(ran) == 1 + 2 + 2 + 1


def test_of_equal_scores_the_present_value_wins_then_who_reads_less_then_the_first() -> None:
    assert searched(lambda method: 0.5)[0] == SnapKV()
    assert searched(lambda m: float(m.window != 32))[0] == SnapKV(window=16)
    assert searched(lambda m: float(m.window != 32), lambda m: 10.0 + (m.window > 8))[0] == SnapKV(window=8)


@pytest.mark.parametrize(("room", "together"), [(9, 4), (3, 2), (0, 1)])
def test_as_many_share_a_prefill_as_fit_into_memory(room: int, together: int) -> None:
    def refuse_memory(beside: Sequence[Any]) -> None:
        if 1 + len(beside) > room:
            raise SettingsError("too much")

    jobs: list[Any] = [SimpleNamespace(full=1, refuse_memory=refuse_memory)] * 4
    assert len(fitting(jobs)) == together


@pytest.mark.parametrize("entry", entries("method"), ids=lambda entry: entry.name)
def test_every_method_declares_values_that_it_takes(entry: Any) -> None:
    method: Method = build(entry.values(), "method")
    for name, values in method.tunable.items():
        assert name != "dense_layers"
        for value in values:
            build(describe(method) | {name: value}, "method")
