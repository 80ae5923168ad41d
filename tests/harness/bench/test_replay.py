"""Steps over a link take what their schedule says, and cells without enough undisturbed samples do not count."""

from __future__ import annotations

import json
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from harness.bench import __main__ as bench
from harness.bench import replay
from harness.bench.calibrate import Limits
from harness.bench.common.load import MarkedSeconds
from harness.bench.decode import ModelDecoding

LIMITS: Limits = {"read_gb_s": 10.0, "read_by": "torch.sum", "matmul_gflop_s": {"fp32": 100.0, "bf16": 100.0}}
SMALL = ["--shape", "tiny", "--layers", "2", "--dtype", "fp32", "--tokens", "400", "--no-plot", "--rounds", "2"]


def ran(folder: Path, *words: str) -> list[dict[str, Any]]:
    assert bench.main(["replay", *SMALL, *words, "--out", str(folder)]) == 0
    rows: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())["rows"]
    return rows


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.bench.calibrate.calibrate", lambda device: LIMITS)


def test_a_slow_link_takes_its_time_live_and_replayed(tmp_path: Path) -> None:
    """Two layers of Full, 20 ms each: nothing else of a step takes as long, so both ways wait for the link."""
    rows = ran(tmp_path, "--methods", "full_offloaded", "--transfer-ms", "20")
    assert [row["way"] for row in rows] == ["on", "off"]
    for row in rows:
        assert row["link_gb_s"] == pytest.approx(2 * 400 * 2 * 16 * 4 / 0.02 / 1e9, rel=0.05)
        assert abs(row["replayed_s"][0] - 0.04) < 3 * row["free_s"][2]  # a step's work more or less
        assert row["tpot_s"][0] >= 0.034  # a turn begins while the link brings rows that the last one asked for


def test_what_stays_on_the_device_crosses_no_link(tmp_path: Path) -> None:
    rows = ran(tmp_path, "--methods", "full", "full_offloaded", "--transfer-ms", "1")
    assert rows[0]["error"] == "Nothing crosses the link."


def test_samples_are_taken_until_enough_are_undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for marks, samples, counts in ((repeat(False), 2, True), (repeat(True), 6, False)):

        def turn(self: ModelDecoding, marks: Any = marks) -> MarkedSeconds:
            self.moved.append(1.0)
            self.exposed_s.append(1e-3)
            return MarkedSeconds(0.1, next(marks))

        monkeypatch.setattr(ModelDecoding, "timed_turn", turn)
        rows = ran(tmp_path, "--methods", "full_offloaded", "--transfer-ms", "1")
        assert [(row["samples"], row["counts"]) for row in rows] == 2 * [(samples, counts)]
        assert replay.verdict(rows).startswith(f"0 of {2 * counts} cells")


def test_the_verdict_counts_cells_with_enough_samples() -> None:
    rows = [{"ratio": (ratio, ratio, ratio), "counts": counts} for ratio, counts in ((1.1, 1), (1.3, 1), (1.0, 0))]
    assert replay.verdict(rows).startswith("1 of 2 cells lie within 0.85 to 1.2 times the replay; 1 more")


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--new", "3"], "--new 3 leaves no step to time"), (["--methods", "quset"], "quset is unknown")],
)
def test_a_wrong_command_line_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["replay", *words]) == 2
    assert said in capsys.readouterr().err
