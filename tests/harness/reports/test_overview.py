"""The table that a reader sees first: narrow, with few lines that say what was lost and how sure that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.commands import report
from harness.reports.compare import comparisons
from harness.reports.overview import WIDTH, lines
from harness.results.run_folder import load
from tests.fake_records import records, write_run

SPARSE: dict[str, Any] = {"attended_prompt": 10.0}


def printed(capsys: pytest.CaptureFixture[str], folder: Path) -> list[str]:
    assert report.main([str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def said(folder: Path) -> list[str]:
    [table] = comparisons([load(file.parent) for file in sorted(folder.rglob("run.json"))])
    return lines(table)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Full, a method that loses everything and a method that loses one prompt of twelve."""
    write_run(tmp_path, records([1.0] * 12))
    write_run(tmp_path, records([0.0] * 12, **SPARSE), "h2o", budget=0.1)
    write_run(tmp_path, records([1.0] * 11 + [0.0], **SPARSE), "quest", budget=0.1)
    return tmp_path


def test_the_first_table_is_narrow_and_few_lines_stand_below(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    shown = printed(capsys, runs)
    assert max(map(len, shown)) <= WIDTH
    last_row = max(place for place, line in enumerate(shown) if line.startswith("quest"))
    assert len([line for line in shown[last_row + 1 :] if line]) <= 5
    assert "--details" in shown[-1]


def test_it_says_who_lost_and_what_stays_open(runs: Path) -> None:
    text = said(runs)
    assert "12 prompts of 100 tokens" in text[0]
    assert text[1].startswith("* differs from Full")
    assert "h2o 10% -100 points" in text[1]
    assert "quest" not in text[1]
    assert text[2].startswith("Scores not told from Full's: quest 10%")
    assert "is possible" in text[2]
    assert "h2o" not in text[2]


def test_many_rows_still_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, records([1.0] * 12))
    for place in range(20):
        write_run(tmp_path, records([0.0] * 12, **SPARSE), f"method{place}", budget=0.1)
        write_run(tmp_path, records([1.0] * 12, **SPARSE), f"another{place}", budget=0.1)
    text = said(tmp_path)
    assert max(map(len, text)) <= WIDTH - 2
    assert " more" in text[1]
    assert " more" in text[2]


def test_a_row_that_stands_alone_is_said_to_be_compared_with_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 4), dtype="bfloat16")
    write_run(tmp_path, records([0.0] * 4, **SPARSE), "quest", budget=0.1)
    assert any(line.startswith("Not compared with Full: quest 10%, because") for line in said(tmp_path))


def test_what_must_be_wrong_comes_before_what_is_unsure(tmp_path: Path) -> None:
    write_run(tmp_path, records([0.0] * 14), host_is_cpu=True)
    write_run(tmp_path, records([1.0] * 14, **SPARSE), "quest", budget=0.1)
    assert next(line for line in said(tmp_path)[1:] if ":" in line[:8]).startswith("ALARM: quest 10%: score above Full")


def test_a_long_caution_keeps_its_end_and_others_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path, records([1.0] * 12))
    for place in range(3):
        write_run(tmp_path, records([1.0] * 12, attended_prompt=90.0), f"a_method_of_a_long_name_{place}", budget=0.1)
    last = said(tmp_path)[-1]
    assert len(last) <= WIDTH - 2
    assert last.endswith("1 more with --details.")
