"""The benchmark of overlap: every way is measured, and holds what it says of the read buffer."""

from __future__ import annotations

import json
from pathlib import Path

from harness.bench import __main__ as bench


def test_command_writes_table_and_figures(tmp_path: Path) -> None:
    words = ["overlap", "--shape", "tiny", "--tokens", "300", "--new", "9", "--beside", "40", "--buffers", "1"]
    assert bench.main([*words, "--rounds", "2", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    loads = ["off", "buffer 0", "buffer 1", "formula"]
    assert [row["way"] for row in rows] == [*loads, *loads, "off", "write buffer"]
    assert {row["what"] for row in rows} == {"load from host", "load from disk", "save to disk"}
    for row in rows[:8]:
        assert row["turn_s"][0] > row["waited_s"][0] > 0
        assert row["layers"] == {"off": 0, "buffer 0": 0, "buffer 1": 1}.get(row["way"], row["layers"])
    assert rows[8]["hidden_s"][0] == 0 < rows[9]["hidden_s"][0]
    assert not list(tmp_path.rglob("*.safetensors"))
