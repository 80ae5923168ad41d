"""The latencies of batches: whose clocks they are, and that prompts differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.bench import __main__ as bench
from harness.bench.latency import prompts
from harness.models.random import Random

SMALL = "latency --shape tiny --layers 2 --dtype fp32 --new 4 --rounds 2 --tokens 300 --batches".split()


def test_latencies_of_batches_stand_beside_full(tmp_path: Path) -> None:
    words = ["1", "3", "--methods", "full", "snapkv", "--out", str(tmp_path)]
    assert bench.main([*SMALL, *words]) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [(row["batch"], row["method"]) for row in rows] == [(1, "full"), (1, "snapkv"), (3, "full"), (3, "snapkv")]
    for row in rows:
        assert 0 < row["ttft_s"][0] < row["tt2t_s"][0]
        assert row["tpot_s"][0] > 0
        assert (row["tpot_s_ratio"] is None) == (row["method"] == "full")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_batch_waits_for_its_rows_and_stands_beside_the_method_that_is_named(tmp_path: Path) -> None:
    words = "2 --placement host --link 20MBps --against full_offloaded --methods full_offloaded full infinigen".split()
    assert bench.main([*SMALL, *words, "--no-plot", "--out", str(tmp_path)]) == 0
    offloaded, full, infinigen = json.loads((tmp_path / "result.json").read_text())["rows"]
    crossing_s = 2 * Random("tiny", 2).describe().kv_bytes("fp32", 300) / 20e6
    assert offloaded["tpot_s"][1] > crossing_s
    assert offloaded["tpot_s_ratio"] is None
    assert full["tpot_s_ratio"][0] > 0
    assert infinigen["tpot_s_ratio"][0] > 0
    assert "full_offloaded / it, TPOT" in (tmp_path / "table.md").read_text()


def test_a_link_needs_rows_that_cross_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "2", "--link", "20MBps"]) == 2
    assert "add --placement host" in capsys.readouterr().err


def test_overlap_needs_rows_that_lie_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*SMALL, "2", "--overlap"]) == 2
    assert "add --placement host or disk" in capsys.readouterr().err


def test_what_overlap_leaves_exposed_is_measured_without_a_link_too(tmp_path: Path) -> None:
    words = (
        "decode --shape tiny --layers 2 --dtype fp32 --new 4 --rounds 2 --tokens 300 --no-plot --placement host".split()
    )
    for more in ([], ["--overlap"]):
        assert bench.main([*words, *more, "--methods", "full_offloaded", "--out", str(tmp_path)]) == 0
        [row] = json.loads((tmp_path / "result.json").read_text())["rows"]
        assert (row["hidden_s"] is not None) == (row["waiting_s"] is not None) == bool(more)


def test_each_sequence_has_a_prompt_of_its_own() -> None:
    assert prompts([1, 2, 3], 2, 3).tolist() == [[1, 2], [2, 3], [3, 1]]
    assert prompts([1, 2, 3], 5, 2).tolist() == [[1, 2, 3, 1, 2], [2, 3, 1, 2, 3]]
