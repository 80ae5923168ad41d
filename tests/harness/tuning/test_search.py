"""What is tried of a method, and the strategy of the search: a made-up score in place of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from harness.config.catalogue import entries
from harness.config.plugins import build
from harness.tuning.search import Examples, ParameterSearch, Trials, curve_points, most_combinations
from harness.tuning.space import START, Point, Space, SpaceError, grids_of, space_of
from methods.base import Method
from methods.snapkv import SnapKV
from tests.fake_records import record

SPACE = Space(SnapKV(), {"window": (8, 16, 32), "kernel": (7, 15, 31), "pooling": ("max", "avg")}, ())
ROUNDS = (["a", "b"], ["c", "d"], ["e", "f"])
Score = Callable[[dict[str, Any]], float]


class Fake(Trials):
    """Scores of `score`, tokens read of `read`."""

    score: Score
    read: Score
    answers = 0

    def run(self, points: Sequence[Point], part: str, items: Sequence[Any]) -> None:
        for point in points:
            values = {name: self.space.value(point, name) for name in self.space.grids}
            made = [record(str(item), score=self.score(values), attended_prompt=self.read(values)) for item in items]
            self.records[point] = [*self.records.get(point, []), *made]
            self.answers += len(made)


def searched(score: Score, read: Score = lambda values: 20.0) -> tuple[Point, Fake, list[str]]:
    trials = Fake(SPACE, None)  # type: ignore[arg-type]
    trials.score, trials.read = score, read
    said: list[str] = []
    examples = Examples(ROUNDS, [])  # type: ignore[arg-type]
    return ParameterSearch(SPACE, examples, trials, said.append).run(), trials, said


def test_values_that_only_win_together_with_others_are_found() -> None:
    """Each helps a little alone; together they are best, and more than the sum."""

    def score(values: dict[str, Any]) -> float:
        wide, averaged = values["kernel"] == 15, values["pooling"] == "avg"
        return 0.1 + 0.1 * wide + 0.1 * averaged + 0.6 * (wide and averaged)

    best, trials, said = searched(score)
    assert best == (("kernel", 15), ("pooling", "avg"))
    assert all(f"part {part}/3" in words for part, words in enumerate(said[:3], 1))
    assert trials.answers < 6 * 6 + 6 * most_combinations(SPACE)


def test_of_equal_scores_the_start_wins_then_who_reads_less_then_the_nearest() -> None:
    assert searched(lambda values: 0.5)[0] == START
    ahead: Score = lambda v: float((v["kernel"], v["window"]) != (7, 32))  # noqa: E731
    assert searched(ahead)[0] == (("window", 16),)
    assert searched(ahead, lambda v: 10.0 if v["kernel"] == 31 else 20.0)[0] == (("kernel", 31),)


def no_refusal(method: Method) -> None:
    return None


def test_what_a_budget_or_model_refuses_is_left_out_and_an_error_where_it_was_asked_for() -> None:
    def refusal(method: Method) -> str | None:
        return "too wide" if isinstance(method, SnapKV) and method.window > 32 else None

    space = space_of(SnapKV(), grids_of(SnapKV(), {}), refusal, strict=False)
    assert space.grids["window"] == (8, 16, 32)
    assert space.left_out == ("window=64: too wide",)
    with pytest.raises(SpaceError, match="too wide"):
        space_of(SnapKV(), grids_of(SnapKV(), {"window": (16, 64)}), refusal, strict=True)


@pytest.mark.parametrize("entry", entries("method"), ids=lambda entry: entry.name)
def test_every_method_declares_values_that_it_takes(entry: object) -> None:
    method: Method = build(entry.values(), "method")  # type: ignore[attr-defined]
    if not method.tunable:
        with pytest.raises(SpaceError):
            grids_of(method, {})
        return
    space = space_of(method, grids_of(method, {}), no_refusal, strict=True)
    assert not space.left_out
    assert "dense_layers" not in space.grids


def test_the_worse_half_of_the_combinations_gets_no_more_examples() -> None:
    _, trials, said = searched(lambda v: 0.1 + v["kernel"] / 100 - v["window"] / 1000)
    fields = [int(words.split()[1]) for words in said if words.startswith("together")]
    assert fields == [4, 2, 1]
    assert trials.answers == 6 * len(curve_points(SPACE)) + 2 * sum(fields)
