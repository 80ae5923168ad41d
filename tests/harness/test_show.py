"""Outputs as they were, and the first token in which two runs part."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.commands import show
from tests.fake_records import record, write_failed, write_run


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "61")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """Two runs of three examples; the second differs in `b`, and has no `d`."""
    same = record("a", output="the same")
    full = record("b", output="It is 4817, of course.", tokens=[5, 6, 7, 8])
    sparse = record("b", output="It is 9, " + "maybe " * 20, tokens=[5, 6, 9, 8], score=0.25, stop="length")
    first = write_run(tmp_path, [same, full, record("d")])
    return str(first), str(write_run(tmp_path, [same, sparse], "quest"))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert show.main(arguments) == 0
    return capsys.readouterr().out


def test_one_run(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, pair[1])
    assert "[b] g  score 25.0, 4 tokens, stop: length" in text
    assert "  It is 9, maybe maybe" in text
    only = shown(capsys, pair[1], "--id", "a")
    assert "[a]" in only
    assert "[b]" not in only


def test_what_else_the_score_says_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, [record("a", details={"leading_digits": 3.0, "by": "regex"}), record("b", details={})])
    assert shown(capsys, str(folder)).count("  leading_digits 3.00, by regex\n") == 1


def test_a_run_that_failed_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_failed(tmp_path, [], KeyError("no such head"))
    head, why, where, finish = shown(capsys, str(folder)).splitlines()
    assert head == f"{folder.name}: 0 examples, failed"
    assert why == "It failed: KeyError: 'no such head'."
    assert where == f"The traceback is in {folder}/error.txt."
    assert finish.startswith("To finish it: python -m harness ")


def test_long_runs_are_cut_short_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_run(tmp_path, [record(f"e{i}") for i in range(30)]))
    assert "10 more: --all" in shown(capsys, folder)
    assert "[e29]" in shown(capsys, folder, "--all")


def test_diff_says_what_differs_between_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(one: dict[str, Any], other: dict[str, Any]) -> str:
        folders = [write_run(tmp_path / str(n), [record()], "quest", **kind) for n, kind in enumerate((one, other))]
        lines = shown(capsys, str(folders[0]), "--diff", str(folders[1])).splitlines()[2:]
        for folder in folders:
            shutil.rmtree(folder)
        return " ".join(" ".join(lines).split())

    quest = {"_target_": "methods.quest.Quest", "page": 16}
    assert told({}, {}) == "nothing that bears on them differs"
    assert told({"budget": 0.2}, {"budget": 0.5}) == "they differ in budget (0.2 | 0.5)"
    assert told({"method": quest}, {"method": quest | {"page": 32}}) == "they differ in method.page (16 | 32)"
    assert told({"method": quest}, {}) == "nothing that bears on them differs", "a parameter that came later"
    other = {"_target_": "methods.h2o.H2O", "recent": 8}
    assert told({"method": quest, "seed": 1}, {"method": other}) == "they differ in method (quest | h2o), seed (1 | 0)"
    assert told({"model": {"name": "a"}}, {"model": {"name": "b"}}) == "they differ in model.name (a | b)"
    code = {"identity": {"code": {"methods.quest": "1"}, "prompts": "x"}}
    changed = {"identity": {"code": {"methods.quest": "2"}, "prompts": "x"}}
    assert told({"facts": code}, {"facts": changed}) == "they differ in the code of methods.quest"


def test_diff_shows_what_differs_and_where(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, pair[0], "--diff", pair[1])
    assert "2 examples in common, 1 with different outputs" in text
    assert "[b] g  first different token: 2" in text
    assert "[a]" not in text
    assert "It is ▶4817, of course." in text
    assert "It is ▶9, maybe" in text
    assert max(map(len, text.splitlines()[2:])) <= 61
    assert "[a] g  same tokens" in shown(capsys, pair[0], "--diff", pair[1], "--all")
    assert "[a] g  same tokens" in shown(capsys, pair[0], "--diff", pair[1], "--id", "a")


def test_one_output_may_be_the_beginning_of_the_other() -> None:
    assert show.first_difference([1, 2], [1, 2, 3]) == 2
    assert show.first_difference([1, 2], [1, 2]) is None
    assert show.first_difference([], [1]) == 0


def test_control_characters_are_shown_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, [record("a", output="one\x1b[31m\ntwo")])
    text = shown(capsys, str(folder))
    assert "  one\\x1b[31m\n  two" in text
    assert "\x1b" not in text


def test_what_cannot_be_shown(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = write_run(tmp_path, [record("z")], "h2o")
    for arguments, complaint in [
        ([pair[0], "--id", "x"], "no example --id x"),
        ([pair[0], "--diff", str(alone)], "no example in common"),
        ([str(tmp_path)], "not the folder of a run"),
    ]:
        assert show.main(arguments) == 2
        assert complaint in capsys.readouterr().err
