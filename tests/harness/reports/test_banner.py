"""Alarms stand above every table: in colour on a terminal alone, and marked without colour elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from harness.commands import report
from harness.reports.document import shows_colour
from tests.fake_records import records, write_run

SPARSE = {"attended_prompt": 10.0, "attended_total": 12.0}
TOLD = "quest 10%: score above Full, so look for a bug"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A Full that answers nothing, and a method that answers everything."""
    write_run(tmp_path / "runs", records([0.0] * 14))
    write_run(tmp_path / "runs", records([1.0] * 14, **SPARSE), "quest", budget=0.1)
    return tmp_path / "runs"


def flat(text: str) -> str:
    return " ".join(text.split())


def test_the_alarm_stands_above_its_table(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(broken), "--details", "--md", str(broken / "all.md")]) == 0
    text = capsys.readouterr().out
    assert f"ALARM: {TOLD}" in flat(text)
    assert text.index("niah, tiny") < text.index("ALARM") < text.index("prompts:") < text.index("quest  ")
    assert "\033" not in text
    assert max(map(len, text.splitlines())) <= 160
    page = (broken / "all.md").read_text()
    assert f"> 🟥 **ALARM:** {TOLD}" in page
    assert page.index("🟥") < page.index("| method")


def test_a_single_sparse_run_still_warns_of_its_full(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [quest] = broken.glob("*quest*")
    assert report.main([str(quest), "--details"]) == 0
    assert TOLD in flat(capsys.readouterr().out)


def test_the_end_of_a_run_shows_it_too_and_a_terminal_in_red(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, red in (("1", False), ("", True)):
        monkeypatch.setenv("NO_COLOR", name)
        screen = Terminal()
        monkeypatch.setattr("sys.stdout", screen)
        report.print_report(sorted(broken.glob("niah-*")))
        text = screen.getvalue()
        assert ("\033[1;31m  ALARM: quest 10%: score above Full" in text) == red
        assert "ALARM: quest 10%: score above Full" in text


def test_only_a_terminal_shows_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shows_colour(Terminal())
    assert not shows_colour(io.StringIO())
