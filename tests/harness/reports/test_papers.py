"""Our results for notebooks: those of a user's own folder come first; the committed ones say how they were made."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.commands.simulate import main
from harness.reports.papers import our_figures, ours


def test_own_results_come_before_the_committed_ones(tmp_path: Path) -> None:
    assert main(["sessions=3", "warmup=0", "--out", str(tmp_path / "figure_21")]) == 0
    assert our_figures("cachedattention", "figure_21", tmp_path)["words"] == ["sessions=3", "warmup=0"]
    assert our_figures("cachedattention", "figure_25", tmp_path)["figure"] == "25"


def test_rows_of_one_experiment_are_read_alone() -> None:
    rows = ours("pqcache_fig8")
    assert len(rows) == 6
    assert rows["score.mean"].between(0, 1).all()
    with pytest.raises(ValueError, match="pqcache_fig0"):
        ours("pqcache_fig0")
