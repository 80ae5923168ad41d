"""Hydra's launchers get the groups of a sweep, and leave what one process leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from harness.config.compose import read
from harness.results.run_folder import find, load
from harness.sweeps import sweep as launch
from tests.quick import mostly_slow

Cli = Callable[..., tuple[int, str, str]]
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
