"""Kills a run at points where it touches the disk, for tests/harness/results/test_crash.py.

Each kill is a fork that ends with `os._exit` at its n-th write, sync, rename or the like, writes torn in two. Then the
same run goes on to its end, and what it left is printed as a line of JSON.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness.config.settings import Results, Settings
from harness.jobs.evaluate import evaluate, evaluate_together
from harness.jobs.job import Job
from harness.results.files import read_json
from harness.results.run_folder import load
from tests.fast import MODEL, STREAMING, niah
from tests.faults.steps import Steps, Torn

TIMES = {
    "token_s",
    "share_s",
    "decode_share_s",
    "seal_s",
    "question_s",
    "device_peak_bytes",
    "host_peak_bytes",
    "peaks",
}
KILLED = 137


def run(root: Path, shared: bool, batch: int) -> None:
    settings = Settings(
        results=Results(root=str(root)), progress=False, device="cpu", shared_prefill=shared, batch=batch, warmup=0
    )
    task = niah(lengths=[200, 240], depths=1, max_new_tokens=3, needle="passkey")
    if shared:
        evaluate_together([Job.plan(STREAMING, task, MODEL, settings)])
    else:
        evaluate(STREAMING, task, MODEL, settings)


def killed(root: Path, at: int, work: Callable[[], object]) -> bool:
    """Whether `work`, which writes below `root`, lived to see its `at`-th step."""
    child = os.fork()
    if not child:
        Steps(re.escape(str(root)), at, _die).install()
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def _die(torn: Torn) -> None:
    torn()
    os._exit(KILLED)


def left(root: Path) -> dict[str, Any]:
    """What a reader finds, without clocks."""
    found = {}
    for folder in sorted(root.iterdir()):
        stored = load(folder)
        records = [
            {name: value for name, value in json.loads(record.to_json()).items() if name not in TIMES}
            for record in stored.records
        ]
        origin = stored.info["provenance"]
        found[folder.name] = {
            "status": stored.status,
            "records": records,
            "info": sorted(set(stored.info) - {"earlier"}),
            "continued": len(stored.info.get("earlier", [])),
            "says": [
                stored.info["backends"],
                origin["git"],
                origin["machine"]["cpu"],
                len(origin["machine"]["load_average"]),
            ],
            "config": stored.config | {"results": None},
            "summary": sorted(read_json(folder / "summary.json")),
            "files": sorted(path.name for path in folder.iterdir()),
        }
    return found


def kill_and_go_on(folder: Path, shared: bool, batch: int, first: int, step: int) -> None:
    """At the `first` point and every `step` behind it; a process of its own, for torch must not have run in it."""
    torch.set_num_threads(1)
    run(folder / "whole", shared, batch)  # loads the model, for all forks
    print(json.dumps(left(folder / "whole")), flush=True)
    at = first
    while killed(root := folder / f"killed-{at}", at, go := partial(run, root, shared, batch)):
        go()
        print(json.dumps(left(root)), flush=True)
        at += step
