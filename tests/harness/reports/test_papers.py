"""Our results for notebooks: those of a user's own folder come first; the committed ones say how they were made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.commands.simulate import main
from harness.reports.papers import PUBLISHED, our_figures

PAPERS = ("cachedattention", "infinigen", "shadowkv")
STORED = sorted(file for paper in PAPERS for file in (PUBLISHED / paper).glob("*.json"))


def test_own_results_come_before_the_committed_ones(tmp_path: Path) -> None:
    assert main(["sessions=3", "warmup=0", "--out", str(tmp_path / "figure_21")]) == 0
    assert our_figures("cachedattention", "figure_21", tmp_path)["words"] == ["sessions=3", "warmup=0"]
    assert our_figures("cachedattention", "figure_25", tmp_path)["figure"] == "25"


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_a_stored_result_says_how_it_was_made(file: Path) -> None:
    told = json.loads(file.read_text())
    assert told.get("words") is not None or told["options"]
    assert told["provenance"]["git"]["commit"]
    assert told["provenance"]["machine"]["cpu"]
