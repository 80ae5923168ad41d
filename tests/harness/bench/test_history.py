"""The benchmark of further turns: every way gives the same first token, and is held against recomputation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.bench import __main__ as bench
from harness.bench.history import TimedTurn, rows_of


@pytest.mark.tokens
def test_command_writes_table_figures_and_picture(tmp_path: Path) -> None:
    words = ["history", "--shape", "tiny", "--tokens", "300", "520", "--new", "9", "--rounds", "2"]
    assert (
        bench.main([*words, "--methods", "full", "streaming:sinks=2", "--budget", "1.0", "--out", str(tmp_path)]) == 0
    )
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    ways = ["recompute", "device_prefix", "device", "host", "disk"]
    assert [row["way"] for row in rows] == ways * 4
    assert {(row["method"], row["tokens"]) for row in rows} == {
        (method, tokens) for method in ("full", "streaming:sinks=2") for tokens in (300, 520)
    }
    for row in rows:
        assert row["same_token"]
        assert row["speedup"][0] > 0
        assert (row["way"] == "recompute") == (row["load_s"] is None)
        assert bool(row["stored_bytes"]) == (row["way"] in ("device", "host", "disk"))
    assert len({row["stored_bytes"] for row in rows[2:5]}) == 1
    assert (tmp_path / "table.md").read_text().count("disk") == 4
    assert (tmp_path / "plot.png").stat().st_size > 5000
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_way_that_says_another_first_token_is_told() -> None:
    def runs(token: int, seconds: float) -> list[TimedTurn]:
        return [TimedTurn(seconds, 0.1, 0.0, token, 0)] * 3

    turn: Any = SimpleNamespace(behind=SimpleNamespace(count=9), stored_bytes=lambda way: None)
    done = {"recompute": runs(7, 4.0), "device_prefix": runs(7, 2.0), "disk": runs(8, 1.0)}
    rows = {row["way"]: row for row in rows_of("full", turn, done)}
    assert {way: row["same_token"] for way, row in rows.items()} == {
        "recompute": True, "device_prefix": True, "disk": False,
    }  # fmt: skip
    assert [rows[way]["speedup"].median for way in done] == [1.0, 2.0, 4.0]


def test_a_history_beyond_the_window_is_refused(tmp_path: Path) -> None:
    assert bench.main(["history", "--shape", "tiny", "--tokens", "9000000", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
