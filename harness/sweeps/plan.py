"""How many workers a launcher starts, on which GPUs and with how many threads."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from harness.config.launchers import PACKAGES
from harness.sweeps.ledger import Sweep

RAY_STORE_BYTES = 78_643_200  # the least that Ray takes, as the launcher would set it: nothing of ours is stored there


class Plan(NamedTuple):
    """`gpus`: one for each worker in turn; empty where the launcher hands them out, or there are none. `threads`: of
    each; None leaves them alone. `is_remote`: workers may run on other machines, and outlive the command."""

    launcher: str
    workers: int
    gpus: list[str]
    threads: int | None
    is_remote: bool


def plan_for(sweep: Sweep, config: Any) -> tuple[Plan, list[str]]:
    """The workers, and the words that make the launcher start them. `config`: hydra.launcher, as composed."""
    launcher = _kind(config._target_)
    settings = sweep.jobs[0].config
    gpus = [] if all(job.config["device"] == "cpu" for job in sweep.jobs) else visible_gpus()
    is_remote = launcher == "submitit_slurm" or (launcher == "ray" and bool(config.ray.init.get("address")))
    asked = settings["workers"] or (config.n_jobs if launcher == "joblib" and config.n_jobs > 0 else None)
    usual = len(sweep.groups) if is_remote else len(gpus) or min(2, cpus())
    workers = min(asked or usual, len(sweep.groups))
    threads = None if is_remote or settings["threads"] else max(1, cpus() // workers)
    words = _words(launcher, workers, len(gpus), is_remote)
    return Plan(launcher, workers, [] if is_remote or launcher == "ray" else gpus, threads, is_remote), words


def _kind(target: str) -> str:
    """The launcher by its class, for a yaml of the user's may name it otherwise."""
    package = target.split(".")[1].removeprefix("hydra_").removesuffix("_launcher")
    names = [name for name in PACKAGES if name.startswith(package)]
    return next((name for name in names if name.split("_")[-1] in target.rpartition(".")[2].lower()), names[0])


def _words(launcher: str, workers: int, gpus: int, is_remote: bool) -> list[str]:
    if launcher == "joblib":
        return [f"hydra.launcher.n_jobs={workers}", "hydra.launcher.batch_size=1"]
    if launcher == "ray":
        # as many GPUs as are named: one that Ray does not find would be waited for without end
        here = [f"init.num_cpus={workers}", f"init.num_gpus={gpus}", "init.include_dashboard=false"]
        here.append(f"init.object_store_memory={RAY_STORE_BYTES}")
        gpu = [f"remote.num_gpus={min(1, gpus / workers):g}"] if gpus else []
        return [f"++hydra.launcher.ray.{word}" for word in (*([] if is_remote else here), *gpu)]
    return []


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them, or else by number."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def cpus() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))
