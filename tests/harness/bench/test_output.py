"""What benchmarks write: rows as they come, marked where other load or launches got into a sample."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from harness.bench.common import output
from harness.bench.common.measure import MarkedSeconds, marks
from tests.abandoned import abandoned

CLEAN = {"samples": 3, "disturbed": 0, "with_launches": 0}


TABLE = output.table(output.Cell("what", "what", left=True))


def report(folder: Path | None, **options: Any) -> output.Report:
    return output.Report("ops", "A title", argparse.Namespace(out=folder, device="cpu", **options), TABLE, limits={})


def result(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return made


def test_each_row_is_written_and_printed_when_it_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = report(tmp_path)
    made.add({"what": "first", **CLEAN}, "first: 1 ms")
    assert capsys.readouterr().out.endswith("first: 1 ms\n")
    assert [row["what"] for row in result(tmp_path)["rows"]] == ["first"]
    assert result(tmp_path)["status"] == "partial"
    assert (tmp_path / "table.md").read_text().startswith("PARTIAL: ")
    made.add({"what": "second", **CLEAN}, "second: 2 ms")
    assert [row["what"] for row in made.finish()] == ["first", "second"]
    assert result(tmp_path)["status"] == "complete"
    assert (tmp_path / "table.md").read_text().startswith("A title")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "table.md"]


def test_the_next_benchmark_removes_the_store_of_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "ROOT", tmp_path)
    (tmp_path / "ops-of-yesterday").mkdir()
    left = abandoned(tmp_path / "ops-of-yesterday")
    assert left.exists()
    report(None)
    assert not left.exists()


def test_disturbed_samples_are_marked_in_row_table_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = report(tmp_path)
    made.add({"what": "calm", **marks([MarkedSeconds(1.0), MarkedSeconds(2.0)])}, "calm")
    made.add({"what": "held up", **marks([MarkedSeconds(1.0, disturbed=True)], [MarkedSeconds(2.0)])}, "held up")
    made.finish()
    printed = capsys.readouterr().out
    assert "(1 of 2 samples disturbed)" in printed
    assert [row["disturbed"] for row in result(tmp_path)["rows"]] == [0, 1]
    assert "| held up | 1 of 2 |" in (tmp_path / "table.md").read_text()


def test_what_does_not_fit_into_the_minutes_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = report(tmp_path, minutes=0.0)
    made.add({"what": "first", **CLEAN}, "first")
    assert made.skips("second at 4096")
    made.finish()
    assert result(tmp_path)["left_out"] == ["second at 4096"]
    assert "second at 4096" in capsys.readouterr().out
    assert not report(tmp_path, minutes=None).skips("anything")


def test_another_process_takes_over_what_was_measured_and_leaves_out_what_ended_the_first(tmp_path: Path) -> None:
    first = report(tmp_path, row_s=99.0)
    assert not first.skips("first at 4096")
    first.add({"what": "first", **CLEAN}, "first")
    assert not first.skips("second at 4096")
    then = report(tmp_path, row_s=99.0)
    assert [then.skips(f"{name} at 4096") for name in ("first", "second", "third")] == [True, True, False]
    then.add({"what": "third", **CLEAN}, "third")
    assert [row["what"] for row in then.finish()] == ["first", "third"]
    assert "second at 4096: the process ended" in (tmp_path / "table.md").read_text()
    assert output.result_in(tmp_path / "elsewhere") is None
