"""A sweep runs each run once, skips what is complete, and ends with the jobs that failed and why."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig

from harness.commands.status import main as status
from harness.config.compose import Composed, read
from harness.results.lock import FolderLock
from harness.results.run_folder import find, load
from harness.sweeps import sweep as launch
from harness.sweeps.sweep import groups, labels
from tests.fake_records import record, rewrite, write_run
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


def test_a_dry_run_shows_prompts_once_and_what_all_runs_take(cli: Cli, tmp_path: Path) -> None:
    sweep = ["-m", "method=streaming,h2o", "budget=0.3,0.5", "task.depths=2"]
    out = cli(*sweep, "dry_run=true")[1]
    assert out.count("--- magic_city/400/0/0: 400 tokens") == 1
    assert [line for line in out.splitlines() if line.startswith("===")] == [
        f"=== niah {method} {share}%" for method in ("streaming", "h2o") for share in (30, 50)
    ]
    asked = r"5 runs with those of Full, 4,000 tokens of prompts and at most 60 of answers; the largest needs \S+ MiB"
    assert re.fullmatch(f"in all    {asked}", out.splitlines()[-1])
    assert cli(*sweep, "method=h2o", "budget=0.3", "seed=0,1")[0] == 0  # which the sweep has the half of
    out = cli(*sweep, "dry_run=true", "seed=0")[1]
    assert re.match(r"in all    3 runs .* 2,400 tokens .*; 2 more finished already", out.splitlines()[-1])


def test_each_job_records_the_data_that_its_sweep_read_once(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"context": "Ada keeps bees.", "question": "Who?", "answers": "Ada"}\n')
    words = ["task=rows", f"task.source={file}", "task.max_new_tokens=2", "baseline=off"]
    assert cli("-m", *words, "method=streaming", "budget=0.8,0.9")[0] == 0
    runs = [load(folder) for folder in find([tmp_path / "runs"])]
    assert [run.info["task_info"]["sha256"] for run in runs] == [sha256(file.read_bytes()).hexdigest()] * 2


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


# Hydra's launchers get the groups of a sweep, and leave what one process leaves.


TIMES = {
    "token_s", "share_s", "decode_share_s", "seal_s", "question_s", "device_peak_bytes", "host_peak_bytes", "peaks",
}  # fmt: skip


def runs(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of complete runs by folder, without their times."""
    complete = [stored for stored in map(load, find([root])) if stored.status == "complete"]
    return {
        stored.folder.name: [
            {key: value for key, value in json.loads(record.to_json()).items() if key not in TIMES}
            for record in stored.records
        ]
        for stored in complete
    }


@pytest.mark.parametrize("launcher", mostly_slow(["joblib", "ray", "submitit_local"], "joblib"))
def test_a_launchers_sweep_equals_that_of_one_process(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mortal: str, launcher: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    grid = ("-m", f"--config-dir={mortal}", "method=mortal", "method.grief=memory,none", "budget=0.2,0.4")
    assert cli(f"results.root={tmp_path / 'here'}", *grid)[0] == 1
    code, out, err = cli(f"results.root={tmp_path / 'there'}", *grid, f"hydra/launcher={launcher}")
    assert (code, "4 jobs go to " in err) == (1, True)
    assert err.count("error: ") == err.count("error: method.grief=memory budget=0.2: Out of memory") == 1
    assert out.splitlines()[-1].startswith("  method.grief=memory budget=0.2; ")
    complete = runs(tmp_path / "there")
    assert complete == runs(tmp_path / "here")
    assert len(complete) == 3  # two budgets, and Full once


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_command_and_the_same_command_goes_on(cli: Cli, mortal: str) -> None:
    grid = ("-m", f"--config-dir={mortal}", "method=mortal", "method.grief=once", "budget=0.2,0.4", "baseline=off")
    code, _, err = cli(*grid, "hydra/launcher=joblib")
    assert code == 1
    assert "SIGKILL" in err
    code, out, err = cli(*grid, "hydra/launcher=joblib")
    assert code == 0, err
    assert any(line.startswith("mortal") for line in out.splitlines())


@pytest.mark.parametrize(
    ("target", "gpus", "groups", "says"),
    [
        ("joblib", ["0", "1", "2"], 5, {"hydra.launcher.n_jobs": "3"}),
        ("joblib", ["0", "1", "2"], 2, {"hydra.launcher.n_jobs": "2"}),
        ("joblib", [], 5, {"hydra.launcher.n_jobs": "2"}),
        ("ray", ["0"], 5, {"hydra.launcher.ray.init.num_cpus": "1", "hydra.launcher.ray.remote.num_gpus": "1"}),
        ("ray", [], 5, {"hydra.launcher.ray.init.num_cpus": "2", "hydra.launcher.ray.remote.num_gpus": "0"}),
        ("submitit", [], 5, {}),
    ],
)
def test_there_is_a_worker_per_gpu_and_otherwise_two(
    monkeypatch: pytest.MonkeyPatch, target: str, gpus: list[str], groups: int, says: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    assert says.items() <= launch.words_of(launch.usual_words(target, gpus, groups, False)).items()


def test_each_worker_takes_a_gpu_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_taken", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with FileLock(tmp_path / "gpu-4.lock"):
        launch._take_gpu(["4", "6"], tmp_path)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
        launch._take_gpu(["4", "6"], tmp_path)  # where there are more workers than GPUs
        assert os.environ["CUDA_VISIBLE_DEVICES"] in ("4", "6")
    assert len(launch._taken) == 1
    launch._taken[0].release()


def test_the_words_of_a_launcher_stay_apart() -> None:
    flags, words, launcher = read(["-m", "method=full", "hydra/launcher=joblib", "++hydra.launcher.n_jobs=2"])
    assert (flags, words) == (["-m"], ["method=full"])
    assert launcher == ["hydra/launcher=joblib", "++hydra.launcher.n_jobs=2"]
    assert read(["-m", "hydra/launcher=basic", "method=full"])[2] == []


# `python -m harness.status`: how far runs are, and what a script learns from the exit code.


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
