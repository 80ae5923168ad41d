"""Times drawn by seed, stretched by the rate, and kept in a file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from harness.cachedattention.serving import trace
from tests.talks import item

ITEMS = [item(str(place), *[(6, 3)] * (1 + place % 4), seed=place) for place in range(200)]


def test_a_seed_gives_the_same_times_and_a_rate_stretches_arrivals_alone() -> None:
    once, again = (trace.drawn(ITEMS, seed=3, think_s=4.0) for _ in range(2))
    assert once == again
    assert once != trace.drawn(ITEMS, seed=4, think_s=4.0)
    faster = trace.stretched(once, 1 / 4)
    assert [one.start_s for one in faster] == pytest.approx([one.start_s / 4 for one in once])
    assert [one.think_s for one in faster] == [one.think_s for one in once]
    assert [len(one.think_s) for one in once] == [len(one.item.further) for one in once]


def test_arrivals_are_a_poisson_process_and_thinking_is_exponential() -> None:
    """Mean and standard deviation of an exponential law are equal; 200 and 300 draws, four standard errors."""
    sessions = trace.stretched(trace.drawn(ITEMS, seed=0, think_s=4.0), 2.0)
    starts = [0.0, *(one.start_s for one in sessions)]
    gaps = [later - one for one, later in pairwise(starts)]
    thinks = [one for session in sessions for one in session.think_s]
    for values, mean in ((gaps, 2.0), (thinks, 4.0)):
        found = sum(values) / len(values)
        spread = (sum((one - found) ** 2 for one in values) / len(values)) ** 0.5
        assert found == pytest.approx(mean, rel=4 / len(values) ** 0.5)
        assert spread == pytest.approx(mean, rel=4 * 2**0.5 / len(values) ** 0.5)


def test_a_file_brings_conversations_and_times_back(tmp_path: Path) -> None:
    sessions = trace.drawn(ITEMS[:8], seed=3, think_s=4.0)
    trace.write(tmp_path / "trace.jsonl", sessions, {"_target_": "evals.niah.Niah", "lengths": (400,)}, 0.5)
    found = trace.read(tmp_path / "trace.jsonl")
    assert found.examples == [one.item.example for one in sessions]
    assert found.task == {"_target_": "evals.niah.Niah", "lengths": [400]}
    assert found.sessions(ITEMS[:8]) == sessions
    assert found.rate == 0.5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"trace\.jsonl holds no rows"),
        ('{"schema": 1, "rate": 1.0}\n', "lacks 'task'"),
        ('{"schema": 1, "rate": 1.0, "task": {}}\n', r"trace\.jsonl holds no conversations: record it again"),
        ('{"schema": 2}\n', "schema 2"),
        ('{"schema": 1, "rate": 1, "task": {}}\n{"start_s": 0, "think_s": [], "conversation": {"id": "a", "group": '
         '"g", "context": "c", "references": [], "max_new_tokens": 2, "stops": ["x"]}}\n', "row 2 of .* has 'stops'"),
        ('{"schema": 1, "rate": 1, "task": {}}\n{"start_s": 0, "think_s": [1], "conversation": {"id": "a", "group": '
         '"g", "context": "c", "references": [], "max_new_tokens": 2}}\n', "0 further turns"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ValueError, match=told):
        trace.read(tmp_path / "trace.jsonl")
