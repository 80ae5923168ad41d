"""Killed at any point where it touches the disk, a run that goes on leaves what an undisturbed one leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.crash_points import kill_and_go_on
from tests.forks import Forked

SEED = int(os.environ.get("KV_HARNESS_TEST_SEED", "0"))
LEAST = 30  # points: fewer, and the kills did not happen
STEP = 8  # between the points of the quick test


@pytest.mark.parametrize(
    ("mode", "batch", "step"),
    [
        ("alone", 2, STEP),
        pytest.param("alone", 2, 1, marks=pytest.mark.slow),
        pytest.param("alone", 1, 1, marks=pytest.mark.slow),
        pytest.param("shared", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_every_crash_point(tmp_path: Path, mode: str, batch: int, step: int) -> None:
    first = 1 + SEED % step
    process = Forked(kill_and_go_on, tmp_path, mode == "shared", batch, first, step)
    assert process.wait() == 0, process.err
    whole, *others = map(json.loads, process.out.splitlines())
    assert len(others) > LEAST / step
    for number, runs in enumerate(others):
        at = first + number * step
        assert runs.keys() == whole.keys()
        for name, run in runs.items():
            sessions = run.pop("continued")
            assert sessions <= 1, (at, name)
            assert run == {key: value for key, value in whole[name].items() if key != "continued"}, (at, name)
