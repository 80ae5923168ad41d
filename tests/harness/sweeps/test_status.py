"""`python -m harness.status`: how far runs are, and what a script learns from the exit code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.commands.status import main as status
from harness.results.lock import FolderLock
from tests.fake_records import record, rewrite, write_run

Cli = Callable[..., tuple[int, str, str]]


def test_runs_are_counted_by_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"num_expected": 4}
    done = write_run(tmp_path, [record(name) for name in "abcd"], "full", facts=facts)
    assert status([str(tmp_path)]) == 0
    write_run(tmp_path, [record("a")], "quest", "interrupted", facts=facts)
    assert status([str(tmp_path)]) == 3
    failed = write_run(tmp_path, [], "h2o", "failed", facts=facts)
    rewrite(failed, error="KeyError: 'no such head'")
    assert status([str(tmp_path)]) == 1
    killed = write_run(tmp_path, [record("a"), record("b")], "sparq", "interrupted", facts=facts)
    rewrite(killed, status="running")
    capsys.readouterr()
    lock = FolderLock(write_run(tmp_path, [record("a")], "snapkv", "interrupted", facts=facts))
    try:
        assert status([str(tmp_path)]) == 3
    finally:
        lock.release()
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "1 done, 1 running, 1 failed, 2 interrupted"
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.startswith("niah-")}
    assert rows[done.name] == "done 4/4"
    assert rows[killed.name] == "interrupted 2/4"
    assert rows[failed.name] == "failed 0/4 KeyError: 'no such head'"
    assert f"running 1/4 process {os.getpid()} on " in str(rows)


def test_jobs_of_a_sweep_that_never_began_are_counted_until_they_begin(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def told() -> list[str]:
        return capfd.readouterr().out.splitlines()

    root, sweep = tmp_path / "runs", ("-m", "method=streaming,tova", "budget=0.2,1,-1", "baseline=off")
    with monkeypatch.context() as patch:
        patch.setattr("harness.jobs.job.Job.plan", stop)
        assert cli(*sweep)[0] == 130
    assert status([str(root)]) == 3
    first, *_, last = told()
    assert first == "4 not begun"
    assert last.split() == ["method=tova", "budget=1", "not", "begun", "0/?", "the", "same", "command", "runs", "it"]
    assert cli(*sweep)[0] == 1  # one token is too few for both methods
    with monkeypatch.context() as patch:
        patch.setattr("harness.jobs.job.Job.plan", stop)
        assert cli(*sweep)[0] == 130
    assert status([str(root)]) == 0
    assert told()[0] == "2 done"


def test_what_cannot_be_read_has_failed_and_no_runs_are_an_error(tmp_path: Path) -> None:
    (write_run(tmp_path / "runs", [record("a")]) / "run.json").write_text("{")
    assert status([str(tmp_path / "runs")]) == 1
    (tmp_path / "empty").mkdir()
    assert status([str(tmp_path / "empty")]) == status([str(tmp_path / "none")]) == 2
