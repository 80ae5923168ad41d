"""A sweep runs each run once, skips what is complete, and ends with the jobs that failed and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.sweeps.jobs import JobConfig, groups, labels
from tests.quick import mostly_slow

Cli = Callable[..., tuple[int, str, str]]


def job(number: int, **changes: object) -> JobConfig:
    words = ["task=niah", f"budget={number}"]
    return JobConfig({"budget": number, "method": {"sinks": 4}, "task": {}, "model": {}} | changes, {}, words)


def test_jobs_that_share_a_prefill_are_one_group() -> None:
    shared = [job(number, shared_prefill=True, task={"name": number % 2}) for number in range(4)]
    assert [list(group) for group in groups(shared)] == [[0, 2], [1, 3]]
    assert [list(group) for group in groups([job(number) for number in range(3)])] == [[0], [1], [2]]


def test_a_job_is_called_by_what_tells_it_from_the_others() -> None:
    assert labels([job(1), job(2)]) == ["budget=1", "budget=2"]


def test_a_method_without_a_budget_is_one_job_whatever_the_budgets(cli: Cli) -> None:
    """Nothing is said of it either: the budgets are for the others."""
    code, _, err = cli("-m", "method=full,streaming", "budget=0.2,0.4")
    assert code == 0, err
    assert "changes nothing" not in err
    news = [line for line in err.splitlines() if ": new: " in line]
    assert [line.partition(" niah ")[0] for line in news] == ["job 1/3", "job 2/3", "job 3/3"]


def test_a_budget_that_no_job_has_a_use_for_is_said_to_change_nothing(cli: Cli) -> None:
    code, _, err = cli("-m", "method=full", "seed=1,2", "budget=0.3")
    assert code == 0, err
    assert "budget changes nothing" in err


def test_a_job_that_runs_out_of_memory_leaves_the_others_alone(cli: Cli, mortal: str) -> None:
    sweep = ("-m", f"--config-dir={mortal}", "method=mortal", "method.grief=memory,none", "baseline=off")
    code, out, err = cli(*sweep)
    assert code == 1
    assert "error: Out of memory (CUDA out of memory" in err
    assert any(line.startswith("mortal") for line in out.splitlines())  # the other one's row
    assert out.splitlines()[-2] == "1 of 2 jobs failed:"
    assert out.splitlines()[-1].startswith("  method.grief=memory: Out of memory")
    assert "prefill_chunk=2048" in out.splitlines()[-1]


@pytest.mark.slow
def test_jobs_whose_full_failed_have_failed(cli: Cli) -> None:
    from methods.full import Full

    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA out of memory.")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(Full, "start", refuse)
        code, _, err = cli("-m", "method=streaming", "budget=0.2,0.4")
    assert code == 1
    assert err.count("error: Out of memory") == 1  # of both jobs
    assert cli("-m", "method=streaming", "budget=0.2,0.4")[0] == 0


@pytest.mark.parametrize("shared", mostly_slow(["false", "true"], "true"))
def test_the_same_command_runs_what_is_missing(cli: Cli, tmp_path: Path, shared: str) -> None:
    sweep = ("-m", "method=streaming", "budget=0.2,0.4", "baseline=off", f"shared_prefill={shared}")
    assert cli(*sweep)[0] == 0
    first, second = sorted((tmp_path / "runs").glob("niah-streaming-*"))
    kept = (second / "examples.jsonl").read_bytes()
    for file in first.iterdir():
        file.unlink()
    first.rmdir()
    code, _, err = cli(*sweep)
    assert code == 0, err
    assert (second / "examples.jsonl").read_bytes() == kept
    assert f"finished, reused: {second}" in err
    assert f"new: {first}" in err
