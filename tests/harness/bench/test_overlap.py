"""The benchmark of overlap: every way is measured, and holds what it says of the read buffer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from harness.bench import __main__ as bench
from harness.conversations.stored import StoredHistories


def test_command_writes_table_and_figures(tmp_path: Path) -> None:
    words = ["overlap", "--shape", "tiny", "--tokens", "300", "--new", "9", "--beside", "40", "--buffers", "1"]
    words += ["--prompts", "270", "--steps", "3"]
    assert bench.main([*words, "--rounds", "2", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    loads = ["off", "buffer 0", "buffer 1", "formula"]
    assert [row["way"] for row in rows] == [*loads, *loads, "off", "write buffer", "off", "asynchronous"]
    assert {row["what"] for row in rows} == {"load from host", "load from disk", "save to disk", "turn"}
    for row in rows[:8]:
        assert row["turn_s"][0] > row["waited_s"][0] > 0
        assert row["layers"] == {"off": 0, "buffer 0": 0, "buffer 1": 1}.get(row["way"], row["layers"])
    assert rows[8]["hidden_s"][0] == 0 < rows[9]["hidden_s"][0]
    assert rows[10]["hidden_s"][0] == 0 <= rows[11]["hidden_s"][0]  # a busy machine may let the thread end first
    assert rows[10]["tokens"] == 270
    assert rows[10]["turn_s"][0] > rows[10]["waited_s"][0] > 0
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_turn_waits_for_its_save_behind_the_prefill_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = StoredHistories._leave_ahead

    def slowly(*given: Any) -> None:
        time.sleep(0.05)
        ahead(*given)

    monkeypatch.setattr(StoredHistories, "_leave_ahead", slowly)
    words = ["overlap", "--shape", "tiny", "--tokens", "--beside", "9", "--prompts", "270", "--steps", "3"]
    assert bench.main([*words, "--rounds", "1", "--no-plot", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert len(rows) == 2
    assert all(row["turn_s"][0] > row["waited_s"][0] >= 0.05 for row in rows)
