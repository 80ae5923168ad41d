"""`budget_rule=paper` and `windows`: what runs, what its identity holds, and what a table says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.commands.report import main as report
from harness.config.compose import built, composed
from harness.config.settings import CommonWindows, Results, Settings, SettingsError
from harness.jobs.evaluate import evaluate
from harness.jobs.job import Job
from harness.terminal.notices import say_once
from methods.full import Full
from methods.oracle import Oracle
from methods.quest import Quest
from methods.sparq import SparQ
from tests.fast import MODEL, PQ, STREAMING, niah


def settings(folder: Path, **changes: Any) -> Settings:
    return Settings(results=Results(root=str(folder)), baseline="off", **changes)


def test_sinks_come_on_top_and_a_table_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paper = evaluate(PQ, niah(), MODEL, settings(tmp_path / "paper", budget_rule="paper"))
    for record in paper.records:
        assert record.measured["attended_prompt"] == PQ.sinks + int(0.2 * (record.prompt_tokens - PQ.sinks))
    evaluate(STREAMING, niah(), MODEL, settings(tmp_path / "paper", budget_rule="paper"))
    capsys.readouterr()
    report([str(tmp_path / "paper"), "--details"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert "budget_rule=paper" in head
    assert any("pqcache budget_rule=paper" in row for row in rows)
    assert not any("streaming budget_rule" in row for row in rows)  # its paper counts as we do
    evaluate(PQ, niah(), MODEL, settings(tmp_path / "read"))
    capsys.readouterr()
    report([str(tmp_path / "read")])
    assert "budget_rule" not in capsys.readouterr().out


@pytest.mark.parametrize("method", [Full(), STREAMING, Quest(), SparQ(r=4), Oracle(sinks=0)], ids=repr)
def test_what_its_paper_counts_as_we_do_is_one_run(method: Any, tmp_path: Path) -> None:
    read, paper = (
        Job.plan(method, niah(), MODEL, settings(tmp_path, budget_rule=rule)).folder for rule in ("read", "paper")
    )
    assert read == paper


def test_the_rule_is_part_of_the_identity(tmp_path: Path) -> None:
    read, paper = (Job.plan(PQ, niah(), MODEL, settings(tmp_path, budget_rule=rule)) for rule in ("read", "paper"))
    assert read.folder != paper.folder
    assert paper.config["budget_rule"] == "paper"


def test_a_common_split_is_a_short_name_for_parameters(tmp_path: Path) -> None:
    common = settings(tmp_path, windows=CommonWindows(sinks=6, recent_ratio=0.25))
    short = Job.plan(PQ, niah(), MODEL, common)
    spelled = Job.plan(replace(PQ, sinks=6, recent_ratio=0.25), niah(), MODEL, settings(tmp_path))
    assert short.method == spelled.method
    assert short.identity == spelled.identity
    for kept in (Full(), Quest()):
        assert Job.plan(kept, niah(), MODEL, common).folder == Job.plan(kept, niah(), MODEL, settings(tmp_path)).folder


def test_wrong_values_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"align=device_bytes .*budget_rule=paper"):
        settings(tmp_path, budget_rule="paper", align="device_bytes")
    with pytest.raises(SettingsError, match=r"windows\.sinks=-1"):
        settings(tmp_path, windows=CommonWindows(sinks=-1))
    with pytest.raises(SettingsError, match=r"windows.recent_ratio=1.0"):
        settings(tmp_path, windows=CommonWindows(recent_ratio=1.0))
    with pytest.raises(SettingsError, match=r"budget_rule=mine is"):
        settings(tmp_path, budget_rule="mine")


def test_the_command_line_takes_them() -> None:
    *_, made = built(composed(["budget_rule=paper", "windows.sinks=4", "windows.recent_ratio=0.25"]))
    assert made.budget_rule == "paper"
    assert made.windows == CommonWindows(sinks=4, recent_ratio=0.25)
    with pytest.raises(SettingsError, match=r"windows\.sink; did you mean windows.sinks"):
        composed(["windows.sink=4"])


def test_what_changes_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say_once.cache_clear()
    wanted = settings(tmp_path, budget_rule="paper", windows=CommonWindows(sinks=4, recent_ratio=0.25))
    for method in (Full(), PQ, STREAMING, Quest()):
        Job.plan(method, niah(), MODEL, wanted)
    said = [line.split(",")[0].removeprefix("note: ") for line in capsys.readouterr().err.splitlines()]
    assert [(line.split(" change")[0], line.rpartition(" ")[2]) for line in said] == [
        ("budget_rule", "Full"),
        ("baseline", "Full"),
        ("windows.recent_ratio and windows.sinks", "Full"),
        ("budget_rule", "Streaming"),
        ("windows.recent_ratio", "Streaming"),
        ("budget_rule", "Quest"),
        ("windows.recent_ratio and windows.sinks", "Quest"),
    ]
