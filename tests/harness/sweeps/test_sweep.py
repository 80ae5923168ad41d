"""A sweep runs each run once, skips what is complete, and ends with the jobs that failed and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig

from harness.config.compose import Composed
from harness.sweeps.sweep import groups, labels
from tests.quick import mostly_slow

Cli = Callable[..., tuple[int, str, str]]


def job(number: int, **changes: object) -> Composed:
    words = ["task=niah", f"budget={number}"]
    return Composed({"budget": number, "method": {"sinks": 4}, "task": {}, "model": {}} | changes, {}, words)


def test_jobs_that_share_a_prefill_are_one_group() -> None:
    shared = [job(number, shared_prefill=True, task={"name": number % 2}) for number in range(4)]
    assert [list(group) for group in groups(shared)] == [[0, 2], [1, 3]]
    assert [list(group) for group in groups([job(number) for number in range(3)])] == [[0], [1], [2]]
    assert labels([job(1), job(2)]) == ["budget=1", "budget=2"]


def test_budgets_and_parameters_are_for_the_methods_that_have_them(cli: Cli, tmp_path: Path) -> None:
    """The others run once, and nothing is said of it."""
    code, _, err = cli("-m", "method=shadowkv,full", "method.rank=8,16", "budget=0.4")
    assert (code, "changes nothing" in err) == (0, False), err
    assert "job 1/3 " in err
    ran = sorted(folder.name.split("-")[1] for folder in (tmp_path / "runs").glob("niah-*"))
    assert ran == ["full", "shadowkv", "shadowkv"]


def test_each_job_of_a_sweep_is_composed_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's own sweeper composes all jobs before it starts them, and each again."""
    really, points = ConfigLoaderImpl.load_sweep_config, list[list[str]]()

    def load(loader: ConfigLoaderImpl, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        points.append(sweep_overrides)
        return really(loader, master_config, sweep_overrides)

    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", load)
    assert cli("-m", "method=streaming", "dry_run=true", "seed=1,2,3")[0] == 0
    assert sorted(word for point in points for word in point if "seed" in word) == ["seed=1", "seed=2", "seed=3"]


def test_a_job_that_runs_out_of_memory_leaves_the_others_alone(cli: Cli, mortal: str) -> None:
    sweep = (
        "-m",
        f"--config-dir={mortal}",
        "method=mortal",
        "method.grief=memory,none",
        "budget=0.5,0.6",
        "baseline=off",
    )
    code, out, err = cli(*sweep)
    failed = [f"method.grief=memory budget={budget}" for budget in (0.5, 0.6)]
    told = [line.partition(": Out of memory")[0] for line in err.splitlines() if line.startswith("error: ")]
    assert (code, told) == (1, [f"error: {failed[0]}"])
    assert sum(line.startswith("mortal") for line in out.splitlines()) == 2  # the others' rows
    assert out.splitlines()[-1].startswith(f"  {'; '.join(failed)}: Out of memory")


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
    assert f"reused: {second}" in err
    assert f"new: {first}" in err
