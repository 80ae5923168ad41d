"""The ledger by itself: groups, claims, what a kill leaves, what the same command looks at again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.results.lock import FolderInUse
from harness.sweeps.jobs import JobConfig, distinct, groups
from harness.sweeps.ledger import Claim, Sweep
from harness.sweeps.session import PATIENCE, SweepSession
from harness.sweeps.state import states_of
from tests.abandoned import abandoned

ROOT = Path(__file__).parents[3]
PARTIAL: dict[str, frozenset[str]] = {"method": frozenset({"sinks"}), "task": frozenset(), "model": frozenset()}
HOLDER = """
import sys, time
from pathlib import Path
from harness.sweeps.ledger import Claim, Sweep
claim = Claim(Sweep.load(Path(sys.argv[1])), 0)
claim.note("started", jobs=[0], host="elsewhere", pid=7, gpu=None)
print("mine", flush=True)
time.sleep(600)
"""


def job(number: int, **changes: Any) -> JobConfig:
    words = ["task=niah", f"budget={number}"]
    return JobConfig({"budget": number, "method": {"sinks": 4}, "task": {}, "model": {}} | changes, {}, words)


def begin(root: Path, jobs: int = 2) -> SweepSession:
    return SweepSession.begin(Sweep.create(root, [job(number) for number in range(jobs)], PARTIAL), "the command")


def end(claim: Claim, **facts: Any) -> None:
    for number in claim.log.jobs:
        claim.note("ended", job=number, **({"status": "failed", "reason": "no reason", "seconds": 1.0} | facts))


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process at the first group."""
    with begin(tmp_path) as session:
        command = [sys.executable, "-c", HOLDER, str(session.sweep.folder)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"mine\n"
        yield process
        process.kill()
        process.communicate()


def test_the_same_jobs_find_the_same_ledger_whatever_has_no_effect(tmp_path: Path) -> None:
    first = Sweep.create(tmp_path, [job(1), job(2)], PARTIAL)
    again = Sweep.create(tmp_path, [job(1, progress=False, workers=3), job(2)], PARTIAL)
    assert first.folder == again.folder
    assert again.jobs[0].config["workers"] == 3
    assert again.partial == PARTIAL
    assert Sweep.create(tmp_path, [job(1), job(3)], PARTIAL).folder != first.folder


def test_jobs_that_share_a_prefill_are_one_group() -> None:
    shared = [job(number, shared_prefill=True, task={"name": number % 2}) for number in range(4)]
    assert groups(shared) == [[0, 2], [1, 3]]
    assert groups([job(number) for number in range(3)]) == [[0], [1], [2]]


def test_a_job_is_called_by_what_tells_it_from_the_others() -> None:
    assert distinct([job(1), job(2)]) == [["budget=1"], ["budget=2"]]


def test_what_one_process_runs_no_other_takes(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    with begin(tmp_path) as session:
        with pytest.raises(FolderInUse, match=rf"process {holder.pid} on"):
            Claim(session.sweep, 0)
        claim = session.take()
        assert claim is not None
        assert claim.group == 1
        assert session.take() is None
        assert [state.status for state in states_of(session.sweep)] == ["running", "to do"]
        claim.release()


def test_what_a_killed_process_had_is_taken_up(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    with begin(tmp_path) as session:
        holder.kill()
        holder.wait()
        first, _ = states_of(session.sweep)
        assert (first.status, first.host, first.pid) == ("interrupted", "elsewhere", 7)
        assert first.reason is not None
        assert "killed" in first.reason
        with session.take() or pytest.fail("nothing to take") as claim:
            assert claim.group == 0
            killed = claim.log.events[-1]
            assert (killed["event"], killed["made"], killed["pid"]) == ("killed", 0, 7)


def test_half_a_line_of_a_killed_write_is_no_event(tmp_path: Path) -> None:
    with begin(tmp_path) as session:
        with Claim(session.sweep, 0) as claim:
            end(claim)
        path = session.sweep.place(0) / "log.jsonl"
        path.write_bytes(path.read_bytes() + b'{"event": "st')
        assert [event["event"] for event in session.sweep.log(0).events] == ["ended"]
        with Claim(session.sweep, 0) as claim:
            claim.note("started", jobs=[0])
        assert [event["event"] for event in session.sweep.log(0).events] == ["ended", "started"]


def kill(session: SweepSession, group: int, folder: Path | None = None, examples: int = 0) -> None:
    """Leaves what a kill leaves, after so many examples."""
    with Claim(session.sweep, group) as claim:
        claim.note("started", jobs=[group], host="here", pid=1, gpu=None)
        if folder:
            claim.note("planned", job=group, folder=folder.name, full=None, examples=9, had=0)
            folder.mkdir(exist_ok=True)
            (folder / "examples.jsonl").write_text("{}\n" * examples)


def test_a_job_that_is_killed_again_and_again_waits_until_it_can_run_alone(tmp_path: Path) -> None:
    with begin(tmp_path) as session:
        for _ in range(PATIENCE):
            assert session.open_groups(PATIENCE) == [0, 1]
            kill(session, 0)
        assert session.open_groups(PATIENCE) == [1]
        assert session.open_groups(PATIENCE + 1) == [0, 1]
    with begin(tmp_path) as another:  # the same command, typed again, tries it again
        assert another.open_groups(1) == [0, 1]


def test_a_kill_after_new_examples_does_not_count(tmp_path: Path) -> None:
    with begin(tmp_path) as session:
        for examples in range(1, 4):
            kill(session, 0, tmp_path / "run", examples)
        assert session.sweep.log(0).kills() == 0
        assert session.open_groups(1) == [0, 1]


def test_the_same_command_looks_at_everything_again(tmp_path: Path) -> None:
    with begin(tmp_path) as session:
        with Claim(session.sweep, 0) as claim:
            end(claim)
        assert session.open_groups() == [1]
        assert [number for number, _ in session.ends()] == [0]
    with begin(tmp_path) as again:
        assert again.open_groups() == [0, 1]
        assert again.ends() == []


def test_an_interrupted_job_is_still_to_be_run(tmp_path: Path) -> None:
    with begin(tmp_path) as session:
        with Claim(session.sweep, 0) as claim:
            claim.note("started", jobs=[0], host="here", pid=1, gpu=None)
            end(claim, status="interrupted", reason="interrupted")
        assert session.open_groups() == [0, 1]
        assert [state.status for state in states_of(session.sweep)] == ["interrupted", "to do"]


def test_nothing_is_taken_for_a_command_that_was_stopped(tmp_path: Path) -> None:
    with begin(tmp_path) as session:
        session.stop()
        assert session.take() is None


def test_what_a_killed_command_left_in_the_ledger_goes_with_the_next_one(tmp_path: Path) -> None:
    """Its session's folder has a name of its own, and nobody comes there again."""
    with begin(tmp_path) as session:
        left = abandoned(session.folder)
    assert left.exists()
    with begin(tmp_path):
        assert not left.exists()
