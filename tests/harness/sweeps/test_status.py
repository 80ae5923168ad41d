"""`python -m harness.status`: what is done, running, failed or to do, when it ends, and what a script learns."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from harness.commands.status import main as status
from harness.results.lock import FolderLock
from harness.results.run_folder import write_info
from harness.sweeps.ledger import Claim, Sweep
from harness.sweeps.session import SweepSession
from harness.sweeps.state import JobState, duration, estimate
from tests.harness.sweeps.test_ledger import PARTIAL, end, job

ROOT = Path(__file__).parents[3]
BEGAN, ENDED = "2026-01-01T00:00:00+00:00", "2026-01-01T00:00:40+00:00"


def made(folder: Path, examples: int, **info: Any) -> Path:
    """A run folder at a glance: forty seconds for four new examples."""
    folder.mkdir(parents=True)
    facts = {"status": "complete", "started": BEGAN, "ended": ENDED, "began_with": 0, "num_expected": 4}
    write_info(folder, facts | info | {"files": {}, "config": {}})
    (folder / "examples.jsonl").write_text("{}\n" * examples)
    return folder


def planned(sweep: Sweep, number: int, run: Path, **ends: Any) -> None:
    with Claim(sweep, number) as claim:
        claim.note("started", jobs=[number], host="here", pid=1, gpu=None)
        claim.note("planned", job=number, folder=run.name, full=None, examples=4, had=0)
        if ends:
            end(claim, **ends)


def seen(root: Path, capsys: pytest.CaptureFixture[str], code: int) -> list[dict[str, Any]]:
    assert status([str(root), "--json"]) == code
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_sweep_half_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweep.create(tmp_path, [job(number) for number in range(5)], PARTIAL)
    with SweepSession.begin(sweep, "python -m harness -m budget=0,1,2,3,4"):
        planned(sweep, 0, made(tmp_path / "a", 4), status="done", folder="a", full=None)
        planned(
            sweep, 1, made(tmp_path / "b", 1, status="running", ended=None), status="failed", reason="Out of memory"
        )
        going = made(tmp_path / "c", 2, status="running", ended=None)
        planned(sweep, 2, going)
        lock = FolderLock(going)
        try:
            (part,) = seen(tmp_path, capsys, 3)
            assert status([str(tmp_path)]) == 3
        finally:
            lock.release()
    assert part["counts"] == {"done": 1, "running": 1, "failed": 1, "to do": 2}
    assert [one["label"] for one in part["jobs"]] == [f"budget={number}" for number in range(5)]
    assert [one["done"] for one in part["jobs"]] == [4, 1, 2, 0, 0]
    assert [one["total"] for one in part["jobs"]] == [4] * 5  # of the same task, planned or not
    assert part["jobs"][0]["rate"] == 10.0
    out = capsys.readouterr().out
    assert "1 done, 1 running, 1 failed, 2 to do; 7/20 examples; ends in about" in out
    assert "1 at a time" in out
    assert "python -m harness -m budget=0,1,2,3,4" in out
    assert "  2: Out of memory" in out


def test_a_run_that_two_jobs_share_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweep.create(tmp_path, [job(number) for number in range(3)], PARTIAL)
    full = made(tmp_path / "full", 2, status="interrupted")
    for number in (0, 1):
        planned(sweep, number, full, status="interrupted")
    (part,) = seen(tmp_path, capsys, 3)
    assert part["left"]["seconds"] == 20.0 * (2 + 4)
    assert status([str(tmp_path)]) == 3
    assert "2 interrupted, 1 to do; 2/8 examples;" in capsys.readouterr().out


def test_the_time_of_a_run_is_what_was_spent_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not what the same command took to find it done."""
    sweep = Sweep.create(tmp_path, [job(0)], PARTIAL)
    earlier = [{"status": "interrupted", "started": BEGAN, "ended": ENDED}, {"started": BEGAN, "ended": None}]
    run = made(tmp_path / "a", 4, began_with=2, earlier=earlier)
    for seconds in (61.0, 9.0):
        planned(sweep, 0, run, status="done", folder="a", full=None, seconds=seconds)
    [done] = seen(tmp_path, capsys, 0)[0]["jobs"]
    assert (done["seconds"], done["rate"]) == (80.0, 20.0)


def test_what_another_command_finished_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run folder has the last word."""
    sweep = Sweep.create(tmp_path, [job(0)], PARTIAL)
    planned(sweep, 0, tmp_path / "a", status="failed", reason="KeyError")
    assert seen(tmp_path, capsys, 1)[0]["counts"] == {"failed": 1}
    made(tmp_path / "a", 4)
    assert seen(tmp_path, capsys, 0)[0]["counts"] == {"done": 1}


def test_runs_without_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "whole", 4)
    made(tmp_path / "killed", 2, status="running", ended=None)
    made(tmp_path / "wrong", 0, status="failed", error="KeyError: 'no such head'")
    (part,) = seen(tmp_path, capsys, 1)
    assert (part["command"], part["counts"]) == (None, {"done": 1, "failed": 1, "interrupted": 1})
    killed = next(one for one in part["jobs"] if one["label"] == "killed")
    assert killed["seconds"] is not None, "up to its last example"
    assert {one["label"]: one["reason"] for one in part["jobs"]}["wrong"] == "KeyError: 'no such head'"


def test_a_run_that_goes_on_names_its_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = FolderLock(made(tmp_path / "going", 2, status="running", ended=None))
    try:
        [[one]] = [part["jobs"] for part in seen(tmp_path, capsys, 3)]
    finally:
        lock.release()
    assert (one["status"], one["pid"], one["host"]) == ("running", os.getpid(), socket.gethostname())


def test_a_reason_of_several_jobs_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweep.create(tmp_path, [job(number) for number in range(3)], PARTIAL)
    facts = {"status": "running", "ended": None}
    planned(sweep, 0, made(tmp_path / "a", 1, **facts), status="failed", reason="Out of memory")
    for number, name in ((1, "b"), (2, "c")):
        planned(sweep, number, made(tmp_path / name, 1, **facts))
    assert status([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "  1: Out of memory" in out
    assert "  2, 3: its process ended without a word" in out
    assert out.count("ended without a word") == 1


def test_nothing_to_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status([str(tmp_path / "none")]) == 2
    assert status([str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert (
        f"error: no such folder: {tmp_path / 'none'}; give the one that results.root named, such as results/runs" in err
    )
    assert "give the folder that results.root named" in err


def state(status: str, done: int, total: int | None = 4, rate: float | None = None, about: str = "a") -> JobState:
    folder = Path(f"{about}{status}{done}{rate}") if rate else None
    return JobState("", status, done, total, rate=rate, about=about, folder=folder)


@pytest.mark.parametrize(
    ("states", "seconds", "basis"),
    [
        ([state("to do", 0)], None, "no example has been timed yet"),
        ([state("done", 4, rate=2.0), state("to do", 0, None)], None, "no job on the same task has been planned yet"),
        ([state("done", 4, rate=2.0), state("to do", 0)], 8.0, "2 s per example, from 1 run; 1 at a time"),
        (
            [state("done", 4, rate=2.0), state("running", 2, rate=4.0), state("running", 0), state("failed", 1)],
            (2 * 4 + 4 * 3) / 2,
            "3.3 s per example, from 2 runs; 2 at a time",
        ),
        (  # the same task counts, and another one only where there is no other
            [state("done", 4, rate=2.0), state("done", 4, rate=9.0, about="b"), state("to do", 0)],
            8.0,
            "2 s per example, from 2 runs; 1 at a time",
        ),
    ],
)
def test_when_it_ends(states: list[JobState], seconds: float | None, basis: str) -> None:
    assert estimate(states) == (seconds, basis)


def test_durations() -> None:
    assert [duration(seconds) for seconds in (3, 89, 95, 3700, 200000)] == ["3 s", "89 s", "2 min", "1.0 h", "2.3 days"]
