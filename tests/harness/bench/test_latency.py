"""The latencies of batches: whose clocks they are, and that prompts differ."""

from __future__ import annotations

import json
from pathlib import Path

from harness.bench import __main__ as bench
from harness.bench.latency import prompts


def test_latencies_of_batches_stand_beside_full(tmp_path: Path) -> None:
    small = ["--shape", "tiny", "--layers", "2", "--dtype", "fp32", "--new", "4", "--rounds", "2", "--tokens", "300"]
    words = [*small, "--batches", "1", "3", "--methods", "full", "snapkv", "--out", str(tmp_path)]
    assert bench.main(["latency", *words]) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [(row["batch"], row["method"]) for row in rows] == [(1, "full"), (1, "snapkv"), (3, "full"), (3, "snapkv")]
    for row in rows:
        assert 0 < row["ttft_s"][0] < row["tt2t_s"][0]
        assert row["tpot_s"][0] > 0
        assert (row["tpot_s_ratio"] is None) == (row["method"] == "full")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_each_sequence_has_a_prompt_of_its_own() -> None:
    assert prompts([1, 2, 3], 2, 3).tolist() == [[1, 2], [2, 3], [3, 1]]
    assert prompts([1, 2, 3], 5, 2).tolist() == [[1, 2, 3, 1, 2], [2, 3, 1, 2, 3]]
