"""Which costs a score is drawn against."""

from __future__ import annotations

from typing import Any

import pytest

from harness.reports.costs import PANELS

READ, HELD, _, TIME = PANELS


def row(method: str, tpot_s: float | None, score: float | None = 0.5, share: float | None = 0.2) -> dict[str, Any]:
    budget = {"union": {"share": None}, "attended": {"share": share}}
    return {"method": method, "score": {"mean": score}, "budget": budget, "tpot_s": {"p50": tpot_s}}


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ([row("full", 0.1), row("quest", 0.1)], True),
        ([row("full", None), row("quest", None), row("infllm", 0.1)], False),  # which had a prefill of its own
        ([row("full", None), row("full", 0.1), row("quest", 0.1)], True),
        ([row("quest", 0.1)], True),  # a table without Full
        ([row("full", 0.1), row("quest", None)], False),
        ([row("full", 0.1), row("quest", 0.1, score=None)], False),
        ([], False),
    ],
)
def test_times_are_drawn_where_fulls_are_beside_them(rows: list[dict[str, Any]], shown: bool) -> None:
    assert TIME.shows(rows) is shown


def test_what_is_read_is_drawn_without_full() -> None:
    assert READ.shows([row("full", None, share=None), row("quest", None)])
    assert not READ.shows([row("full", None)])


def test_what_lies_on_the_host_is_held_as_well() -> None:
    memory = {"kv_device_bytes": 8 * 2**20, "kv_host_bytes": 120 * 2**20, "kv_disk_bytes": None}
    assert HELD.cost({"memory": memory}) == 128
    assert HELD.cost({"memory": {"kv_device_bytes": None}}) is None
