"""No control character of a model, a data set or a run's folder reaches a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.commands import report, show
from harness.config.errors import sentence
from harness.results.records import Record
from harness.terminal.notices import visible
from tests.fake_records import record, write_failed, write_run

NASTY = "\x1b]0;owned\x07 \x1b[2J\x9b31m\r\x7f\u202e"  # titles, clears and colours the terminal, turns the line around


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b\x00\r", "\\x9b\\x00\\r"),
        ("a\u202eb", "a\\u202eb"),
        ("\ud800", "\\ud800"),
        *((text, text) for text in ("line\n\ttab", "25\xa0%", "é 中 👩\u200d🔬", "\\x1b")),
    ],
)
def test_what_a_terminal_obeys_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


def controls(text: str) -> set[str]:
    return {char for char in text if not char.isprintable()} - {"\n"}


def test_no_command_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines(output: str) -> list[Record]:
        nasty: dict[str, Any] = {"details": {NASTY: 1.0}, "warnings": [NASTY], "output": output}
        return [record(f"a{NASTY}{i}", group=NASTY, score=0.5, **nasty) for i in range(3)]

    facts = {"task_info": {"metric": NASTY, "version": "1", "chance": 0.0}, "presets": {"method": NASTY, "task": NASTY}}
    first = write_run(tmp_path / "runs", lines(NASTY), facts=facts)
    second = write_run(tmp_path / "runs", lines(f"{NASTY} otherwise"), "quest", facts=facts)
    failed = write_failed(tmp_path / "failed", [], ValueError(f"{NASTY} stood there"))
    commands: list[tuple[Callable[[Sequence[str]], int], list[object]]] = [
        (show.main, [first]), (show.main, [first, "--diff", second]), (show.main, [failed]),
        (show.main, [first, "--id", NASTY]), (report.main, [tmp_path]),
        (report.main, [tmp_path / NASTY]),
    ]  # fmt: skip
    for main, words in commands:
        main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert "\\x1b]0;owned" in out + err, words
        assert controls(out + err) == set(), words


def test_names_are_no_markup_in_files(tmp_path: Path) -> None:
    name = f"<script>alert(1)</script>\n\n## x | y \\input z {NASTY}"
    facts = {
        "task_info": {"metric": name, "version": "1"},
        "presets": {"method": name, "task": name},
        "cautions": [name],
    }
    write_run(tmp_path / "runs", [record(group=name, warnings=[name])], facts=facts)
    runs, files = str(tmp_path / "runs"), {end: tmp_path / f"page.{end}" for end in ("md", "tex")}
    assert report.main([runs, f"--html={tmp_path}", f"--md={files['md']}"]) == 0
    assert report.main([runs, "--paper", f"--out={files['tex']}"]) == 0
    markdown, latex, html = (path.read_text() for path in (*files.values(), tmp_path / "index.html"))
    assert controls(markdown) == controls(latex) == set()
    assert "<script>alert" not in markdown + html
    assert "\n## x" not in markdown
    assert "\\input" not in "".join(line for line in latex.splitlines() if not line.startswith("%"))


def test_neither_do_errors() -> None:
    assert controls(sentence(ValueError(f"no such {NASTY}"))) == set()
