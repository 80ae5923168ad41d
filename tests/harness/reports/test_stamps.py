"""Every stamp stands in the rows it belongs to, and is explained below the table where it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.reports.columns import notes, score_table
from harness.reports.compare import comparisons
from harness.reports.stamps import meanings
from harness.results.run_folder import load
from tests.fake_records import records, write_run

AWAY = {"kv_host_bytes": 10}
EARLIER = [{"status": "interrupted", "started": "2026-01-01T00:00:00+00:00"}]


@pytest.mark.parametrize(
    ("stamp", "lines", "status", "changes"),
    [
        ("", {}, "complete", {"facts": {"host_is_cpu": True}}),  # nothing lies there
        ("S", {}, "complete", {"facts": {"simulated": True}}),
        ("T", {}, "complete", {"trace": "on"}),
        ("D", {"kv_disk_bytes": 10}, "complete", {"facts": {"host_is_cpu": True}}),
        ("HD", AWAY | {"kv_disk_bytes": 10}, "complete", {"facts": {"host_is_cpu": True}}),
        ("", {"kv_disk_bytes": 10}, "complete", {"facts": {"host_is_cpu": False}}),
        ("H", AWAY, "complete", {"facts": {"host_is_cpu": True}}),
        ("X", {"lost_turns": 2, "lost_to": "the disk is full"}, "complete", {}),
        ("", {"lost_turns": 0}, "complete", {}),
        ("P", {}, "complete", {"facts": {"plain_steps": "a step waits for a value"}}),
        ("C", {}, "complete", {"facts": {"earlier": EARLIER}}),
        ("I", {}, "interrupted", {}),
        ("F", {}, "failed", {}),
        ("!", {"stop": "length"}, "complete", {}),
    ],
)
def test_a_row_has_its_stamp(
    tmp_path: Path, stamp: str, lines: dict[str, Any], status: str, changes: dict[str, Any]
) -> None:
    run = write_run(tmp_path, records([1.0] * 12, **lines), "full", status, **changes)
    [table] = comparisons([load(run)])
    assert {column.head: column.cells for column in score_table(table)}["stamps"] == [stamp]
    legend = {f"{letter}: {meaning}": letter for letter, meaning in meanings().items()}
    assert [legend[note] for note in notes(table) if note in legend] == [*stamp.replace("!", "")]  # the notes say why
