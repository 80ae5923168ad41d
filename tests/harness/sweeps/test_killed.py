"""Sweeps whose process is killed: the same command ends them, and nothing is run twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SEED = int(os.environ.get("KV_HARNESS_TEST_SEED", "0"))


@pytest.mark.parametrize("seed", [SEED, *(pytest.param(SEED + more, marks=pytest.mark.slow) for more in range(1, 4))])
def test_twelve_runs_killed_three_times_end_complete_without_duplicates(tmp_path: Path, seed: int) -> None:
    command = [sys.executable, "-m", "tests.killed_sweep", str(tmp_path), str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole, left = json.loads(done.stdout.splitlines()[-1])
    assert left["ends"] == whole["ends"] == ["done"] * 12
    assert left["runs"] == whole["runs"]
    assert all(run["status"] == "complete" and run["lines"] == 2 for run in left["runs"].values())
    assert len(left["runs"]) == 13  # and Full, once
