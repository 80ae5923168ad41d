"""Killed at any point where it touches the disk, a run that goes on leaves what an undisturbed one leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LEAST = 30  # points: fewer, and the kills did not happen


@pytest.mark.parametrize(
    ("mode", "batch"),
    [
        ("alone", 2),
        pytest.param("alone", 1, marks=pytest.mark.slow),
        pytest.param("shared", 1, marks=pytest.mark.slow),
    ],
)
def test_every_crash_point(tmp_path: Path, mode: str, batch: int) -> None:
    command = [sys.executable, "-m", "tests.crash_points", str(tmp_path), mode, str(batch)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole, *others = map(json.loads, done.stdout.splitlines())
    assert len(others) > LEAST
    for at, runs in enumerate(others, 1):
        assert runs.keys() == whole.keys()
        for name, run in runs.items():
            sessions = run.pop("continued")
            assert sessions <= 1, (at, name)
            assert run == {key: value for key, value in whole[name].items() if key != "continued"}, (at, name)
