"""The benchmark of further turns: every way gives the same first token, and is held against recomputation."""

from __future__ import annotations

import json
from pathlib import Path

from harness.bench import __main__ as bench


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


def test_a_history_beyond_the_window_is_refused(tmp_path: Path) -> None:
    assert bench.main(["history", "--shape", "tiny", "--tokens", "9000000", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
