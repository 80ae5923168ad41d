"""Outputs as they were, and the first token in which two runs part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.commands import show
from harness.results.run_folder import load
from tests.fake_records import record, write_failed, write_run


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """Two runs of three examples; the second differs in `b`, and has no `d`."""
    same = record("a", output="the same", details={"leading_digits": 3.0, "by": "regex"})
    full = record("b", output="It is 4817, of course.", tokens=[5, 6, 7, 8])
    sparse = record("b", output="It is 9, " + "maybe " * 20, tokens=[5, 6, 9, 8], score=0.25, stop="length")
    first = write_run(tmp_path, [same, full, record("d")])
    return str(first), str(write_run(tmp_path, [same, sparse], "quest"))


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "61")

    def run(*words: str) -> str:
        assert show.main(words) == 0
        return capsys.readouterr().out

    return run


def test_one_run(pair: tuple[str, str], shown: Any) -> None:
    text = shown(pair[1])
    assert "score 25.0" in text
    assert "maybe maybe" in text
    assert text.count("3.00, by regex\n") == 1
    only = shown(pair[1], "--id", "a")
    assert "[a]" in only
    assert "[b]" not in only


def test_a_run_that_failed_says_why(tmp_path: Path, shown: Any) -> None:
    folder = write_failed(tmp_path, [], KeyError("no such head"))
    head, why, finish = shown(str(folder)).splitlines()
    assert head == f"{folder.name}: 0 examples, failed"
    assert "KeyError" in why
    assert f"{folder}/error.txt" in why
    assert "python -m harness " in finish


def test_diff_says_what_differs_between_the_runs(tmp_path: Path) -> None:
    def keys(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
        folders = [write_run(tmp_path / name, [record()], "quest", **run) for name, run in (("a", ours), ("b", theirs))]
        found = show.differing(*map(load, folders))
        for folder in folders:
            folder.rename(tmp_path / f"{folder.parent.name}{len(list(tmp_path.iterdir()))}")
        return found

    quest = {"_target_": "methods.quest.Quest", "page": 16}
    assert keys({}, {}) == []
    assert keys({"budget": 0.2}, {"budget": 0.5}) == ["budget (0.2 | 0.5)"]
    assert keys({"method": quest, "seed": 1}, {"method": quest | {"page": 32}}) == [
        "seed (1 | 0)",
        "method.page (16 | 32)",
    ]
    code = {"identity": {"code": {"methods.quest": "1"}, "prompts": "x"}}
    changed = {"identity": {"code": {"methods.quest": "2"}, "prompts": "x"}}
    assert keys({"facts": code}, {"facts": changed}) == ["the code of methods.quest"]


def test_diff_shows_what_differs_and_where(pair: tuple[str, str], shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(pair[0], "--diff", pair[1])
    assert "2 examples in" in text
    assert "token: 2" in text
    assert "[a]" not in text
    assert "▶4817" in text
    assert "▶9, maybe" in text
    assert max(map(len, text.splitlines()[2:])) <= 61
    monkeypatch.setattr(show, "FIRST", 1)
    assert "2 more:" in shown(pair[0])
    assert "[d]" in shown(pair[0], "--all")
    assert "same tokens" in shown(pair[0], "--diff", pair[1], "--all")
    assert "same tokens" in shown(pair[0], "--diff", pair[1], "--id", "a")
    assert show.first_difference([1, 2], [1, 2, 3]) == 2  # one output may be the beginning of the other


def test_what_cannot_be_shown(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = write_run(tmp_path, [record("z")], "h2o")
    for words, named in (([pair[0], "--id", "x"], "--id x"), ([pair[0], "--diff", str(alone)], str(alone))):
        assert show.main(words) == 2
        assert named in capsys.readouterr().err
