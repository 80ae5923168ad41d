"""A sweep of runs that is killed at random, three times, for tests/harness/sweeps/test_killed.py.

Each kill is a fork that ends with `os._exit` at a random write, sync or rename, in a run folder or in the ledger. Then
the same command runs to its end, and what it left is printed as JSON, beside what an undisturbed sweep left.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness.commands import run as command
from harness.config.compose import tell_hydra_the_schema
from harness.config.overrides import read
from harness.results.run_folder import load
from harness.sweeps.jobs import JobConfig
from harness.sweeps.ledger import sweeps_in
from tests.crash_points import TIMES, killed
from tests.fast import MODEL_ARGS, TASK_ARGS

GRID = ["-m", "method=streaming,h2o", "task.depths=2", "task.max_new_tokens=3", "warmup=0"]
KILLS = 3
WORDS: list[str] = []  # the command line
JOBS: list[JobConfig] = []


def at_root(jobs: Sequence[JobConfig], root: Path) -> list[JobConfig]:
    return [replace(job, config=job.config | {"results": job.config["results"] | {"root": str(root)}}) for job in jobs]


def sweep(root: Path) -> None:
    """Hydra's part touches no disk, and takes longer than the runs: it is done once."""
    sys.argv[1:] = WORDS
    command.compose = lambda words: at_root(JOBS, root)
    assert command.main() == 0


def left(root: Path) -> dict[str, Any]:
    """Records without their times, and how often each was written."""
    runs = {}
    for file in sorted(root.glob("*/run.json")):
        stored = load(file.parent)
        plain = [json.loads(record.to_json()) for record in stored.records]
        records = [{key: value for key, value in one.items() if key not in TIMES} for one in plain]
        lines = (file.parent / "examples.jsonl").read_bytes().count(b"\n")
        runs[file.parent.name] = {"status": stored.status, "lines": lines, "records": records}
    (ledger,) = sweeps_in(root)
    logs = [ledger.log(group) for group in range(len(ledger.groups))]
    ends = [event["status"] for log in logs for job in log.jobs if (event := log.last("ended", job))]
    return {
        "runs": runs,
        "ends": ends,
        "killed": sum(event["event"] == "killed" for log in logs for event in log.events),
    }


def kill_and_go_on(folder: Path, runs: int, seed: int) -> None:
    """In a process of its own, for torch must not have run in it. `runs`: an even number."""
    torch.set_num_threads(1)
    tell_hydra_the_schema()
    budgets = ",".join(f"{0.1 + 0.05 * place:.2f}" for place in range(runs // 2))
    WORDS.extend([*MODEL_ARGS, *TASK_ARGS, *GRID, f"budget={budgets}"])
    JOBS.extend(command.compose(read(WORDS).words))
    sweep(folder / "whole")  # loads the model, for all forks
    draw = random.Random(seed)
    root = folder / "killed"
    for number in range(1, KILLS + 1):
        at = number * draw.randrange(3 * runs, 13 * runs)  # a later kill has to come after what is there already
        while not killed(root, at, partial(sweep, root)):
            at //= 2
    sweep(root)
    print("\n" + json.dumps([left(folder / "whole"), left(root)]))
