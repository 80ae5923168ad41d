"""`python -m harness.bench busy` on a small layer: both times from one run, and no process left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.bench import __main__ as bench
from harness.bench import busy


def test_a_row_holds_both_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "SETTLE_S", 0.0)
    monkeypatch.setattr(busy, "STEPS", 2)
    words = "--tokens 300 --budget 40 --heads 4 --kv-heads 2 --head-dim 64 --rounds 2 --methods full sparq --out"
    assert bench.main(["busy", *words.split(), str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["full", "sparq"]
    assert all(row["alone_s"][0] > 0 and row["beside_s"][0] > 0 for row in rows)
    assert "times as long" in (tmp_path / "table.md").read_text()


def test_the_busy_process_ends_with_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "SETTLE_S", 0.0)
    started = []
    start = busy.subprocess.Popen
    monkeypatch.setattr(busy.subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[0])
    with pytest.raises(KeyError), busy.busy_process():
        raise KeyError
    assert started[0].poll() is not None
