"""A sweep that is killed at random moments: the same command ends it, and leaves what an undisturbed one leaves."""

from __future__ import annotations

import csv
import json
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.commands import report
from harness.results.lock import is_locked
from harness.results.run_folder import find, load
from tests import forks
from tests.fast import MODEL_ARGS, TASK_ARGS
from tests.forks import Forked
from tests.quick import every

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("KV_HARNESS_TEST_SEED", "0"))
SWEEP = [
    *MODEL_ARGS, *TASK_ARGS, "-m", "method=full,streaming,pqcache", "budget=0.2,0.4", "device=cpu", "warmup=0",
]  # fmt: skip
RUNS, EXAMPLES = 5, 20  # Full runs once, under any budget


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("undisturbed")
    command = Forked(forks.module, "harness", *SWEEP, f"results.root={root}")
    assert command.wait() == 0, command.err
    return left(root)


@pytest.mark.parametrize("seed", every(8, range(SEED, SEED + 8)))
def test_a_killed_sweep_goes_on(tmp_path: Path, undisturbed: dict[str, Any], seed: int) -> None:
    words, draw = [*SWEEP, f"results.root={tmp_path}"], random.Random(seed)
    for _ in range(3):
        killed = Forked(forks.module, "harness", *words)
        wait_for_a_random_moment(draw, tmp_path, killed.process.is_alive)
        killed.process.kill()
        killed.wait()
    command = Forked(forks.module, "harness", *words)
    assert command.wait() == 0, command.err
    assert left(tmp_path) == undisturbed


def wait_for_a_random_moment(draw: random.Random, root: Path, goes_on: Callable[[], bool]) -> None:
    """Return a moment after so many more examples are on disk; a moment may be longer than an example takes."""
    at = lines(root) + draw.randrange(EXAMPLES // 3)
    while lines(root) < at and goes_on():
        time.sleep(0.001)
    time.sleep(draw.random() * 0.1)


def lines(root: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in root.glob("*/examples.jsonl"))


def left(root: Path) -> dict[str, Any]:
    """Return records, summaries and the rows of the table, all without times, and the names of all files."""
    assert report.main([str(root), "--csv", str(root / "table.csv")]) == 0
    with (root / "table.csv").open(newline="") as file:
        rows = [steady(row) for row in csv.DictReader(file)]
    folders = find([root])
    assert not any(map(is_locked, folders))
    assert lines(root) == EXAMPLES
    assert len(folders) == len(rows) == RUNS
    runs = {}
    for folder in folders:
        stored = load(folder)
        assert stored.status == "complete"
        records = sorted((steady(json.loads(record.to_json())) for record in stored.records), key=lambda one: one["id"])
        summary = steady(json.loads((folder / "summary.json").read_text()))
        runs[folder.name] = records, summary, sorted(file.name for file in folder.iterdir())
    return {"rows": rows, "runs": runs}


def steady(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return what does not depend on the machine's pace and on the session: nothing in seconds, no peak of a process's
    memory, no load, and not the letter C (continued) of the stamps."""
    varying = ("_s", "peaks", "_peak_bytes", "started", "ended", "load_average", "stamps", "folder")
    return {
        key: steady(value) if isinstance(value, dict) else value
        for key, value in plain.items()
        if not any(part.endswith(varying) for part in key.split("."))
    }
