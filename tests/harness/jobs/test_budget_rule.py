"""`budget_rule=paper` and `windows`: what runs, what its identity holds, and what a table says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.commands.report import main as report
from harness.config.settings import CommonWindows, Results, Settings
from harness.jobs.evaluate import evaluate
from harness.jobs.job import Job
from methods.full import Full
from methods.oracle import Oracle
from methods.quest import Quest
from methods.sparq import SparQ
from tests.fast import MODEL, PQ, STREAMING, niah


def settings(folder: Path, **changes: Any) -> Settings:
    return Settings(results=Results(root=str(folder)), baseline="off", **changes)


def test_sinks_come_on_top_and_a_table_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paper = evaluate(PQ, niah(), MODEL, settings(tmp_path, budget_rule="paper"))
    for record in paper.records:
        assert record["attended_prompt"] == PQ.sinks + int(0.2 * (record.prompt_tokens - PQ.sinks))
    evaluate(STREAMING, niah(), MODEL, settings(tmp_path, budget_rule="paper"))
    capsys.readouterr()
    report([str(tmp_path), "--details"])
    out = capsys.readouterr().out
    assert "pqcache budget_rule=paper" in out
    assert "streaming budget_rule" not in out  # its paper counts as we do


@pytest.mark.parametrize("method", [Full(), STREAMING, Quest(), SparQ(r=4), Oracle(sinks=0), PQ], ids=repr)
def test_the_rule_is_part_of_the_identity_where_a_paper_counts_otherwise(method: Any, tmp_path: Path) -> None:
    read, paper = (
        Job.plan(method, niah(), MODEL, settings(tmp_path, budget_rule=rule)).folder for rule in ("read", "paper")
    )
    assert (read == paper) == (method != PQ)


def test_a_common_split_is_a_short_name_for_parameters(tmp_path: Path) -> None:
    common = settings(tmp_path, windows=CommonWindows(sinks=6, recent_ratio=0.25))
    short = Job.plan(PQ, niah(), MODEL, common)
    spelled = Job.plan(replace(PQ, sinks=6, recent_ratio=0.25), niah(), MODEL, settings(tmp_path))
    assert short.method == spelled.method
    assert short.identity == spelled.identity
    assert (
        Job.plan(Quest(), niah(), MODEL, common).folder == Job.plan(Quest(), niah(), MODEL, settings(tmp_path)).folder
    )
