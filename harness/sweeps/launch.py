"""Hands the groups of a sweep to one of Hydra's launchers, unmodified: each group is one Hydra job.

What is left of an earlier command lies in the run folders alone: a job whose folder is complete ends at once, and one
whose folder another process writes waits for it.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from harness.config.catalogue import CONF
from harness.config.compose import with_folders
from harness.config.overrides import LAUNCHER, Partial
from harness.config.plugins import suggestion
from harness.config.settings import SettingsError
from harness.sweeps.group import GroupOutcome, Planner, run_jobs
from harness.sweeps.jobs import JobConfig
from harness.terminal.notices import lasting_output, say_once
from harness.terminal.stopping import Stoppable

QUIET = (
    "hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null", "hydra.sweep.subdir=.",
    "hydra.job.chdir=false", "hydra.job.name=kv-harness",
)  # fmt: skip
INSTALL = "joblib, ray and submitit_* come with pip install 'kv-harness[launchers]'"
RAY_STORE_BYTES = 78_643_200  # the least that Ray takes: nothing of ours is stored there
_taken: list[FileLock] = []  # the GPU of this worker
Groups = Sequence[Mapping[int, JobConfig]]
LOOK_S = 1.0  # between two looks whether the command is still there


class CommandProcess(NamedTuple):
    """The process that asked for the sweep, its working directory and its search path."""

    process: int
    folder: str
    path: list[str]


def launch(
    groups: Groups, partial: Partial, words: Sequence[str], root: Path, config_dirs: Sequence[Path] = ()
) -> list[GroupOutcome]:
    """Run the groups with a launcher, and return what became of each. `words`: the overrides that choose the launcher
    and set it up; `partial`: parameters, by group, that only some of the chosen have; `root`: results.root, where
    submitit keeps what its jobs print."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        hydra: Any = GlobalHydra.instance().hydra
        name, known = words_of(words)[LAUNCHER], hydra.config_loader.get_group_options(LAUNCHER)
        if name not in known:
            raise SettingsError(f"There is no launcher {name!r}{suggestion(name, known)} {INSTALL}.")
        folder = (root / "sweeps").resolve()
        numbers = ",".join(map(str, range(len(groups))))
        common = [*QUIET, f"hydra.sweep.dir='{folder}'", *with_folders(words, config_dirs)]
        target = hydra.compose_config(None, common, run_mode=RunMode.MULTIRUN).hydra.launcher._target_.lower()
        devices = {job.config["device"] for group in groups for job in group.values()}
        gpus = [] if devices == {"cpu"} else visible_gpus()
        own = usual_words(target, gpus, len(groups), "hydra.launcher.ray.init.address" in words_of(words))
        given = [] if "ray" in target or "slurm" in target else gpus  # these hand them out themselves
        command = CommandProcess(os.getpid(), os.getcwd(), list(sys.path))
        task = functools.partial(_work, groups, partial, command, given, folder)
        say_once(f"{sum(map(len, groups))} jobs go to {name}; see `python -m harness.status {root}`")
        try:
            [returns] = hydra.multirun(None, task, [*own, *common, f"+group={numbers}"])
        finally:
            if "ray" in sys.modules:  # a local cluster ends with its sweep, not with this process
                with suppress(Exception):
                    sys.modules["ray"].shutdown()
        return [returned.return_value for returned in returns]


def usual_words(target: str, gpus: Sequence[str], groups: int, is_joined: bool) -> list[str]:
    """Return what we say of workers unless the user does: one per GPU, otherwise two. `target`: the launcher's class;
    `is_joined`: whether Ray runs already, elsewhere."""
    workers = min(groups, len(gpus) or min(2, len(os.sched_getaffinity(0))))
    if "joblib" in target:
        return [f"hydra.launcher.n_jobs={workers}", "hydra.launcher.batch_size=1"]
    if "ray" not in target:
        return []
    remote = [f"remote.num_gpus={int(bool(gpus))}", "remote.max_calls=0"]  # a worker keeps its model
    local = [f"init.num_cpus={workers}", f"init.num_gpus={len(gpus)}", "init.include_dashboard=false"]
    local.append(f"init.object_store_memory={RAY_STORE_BYTES}")
    if not is_joined:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray then listens on the loopback alone
    return [f"++hydra.launcher.ray.{word}" for word in [*remote, *([] if is_joined else local)]]


def words_of(words: Sequence[str]) -> dict[str, str]:
    """Return overrides by key, the last of each."""
    return {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in words)}


def lost(error: Exception) -> str:
    """Return what a launcher says of a worker that is gone: its first sentence, and the signal that ended it."""
    text = " ".join(str(error).split())
    first, signals = re.split(r"(?<=\.) ", text)[0].rstrip("."), sorted(set(re.findall(r"\bSIG[A-Z]+\b", text)))
    told = f"{type(error).__name__}: {shorten(first, 200, placeholder=' ...')}".rstrip(": ")
    memory = ", as the system sends where memory runs out"
    return "; ".join([told, *(f"{name}{memory if name == 'SIGKILL' else ''}" for name in signals)])


def visible_gpus() -> list[str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES names them, otherwise by number."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


@lasting_output()
def _work(
    groups: Groups, partial: Partial, command: CommandProcess, gpus: Sequence[str], folder: Path, _: DictConfig
) -> GroupOutcome:
    """Run one group, in a process that a launcher started."""
    os.chdir(command.folder)
    sys.path += [path for path in command.path if path not in sys.path]
    _end_with(command.process)
    if gpus and not _taken:
        _take_gpu(gpus, folder)
    with Stoppable() as stop:
        number = HydraConfig.get().job.num
        jobs = sum(map(len, groups))
        outcome = run_jobs(groups[number], partial, _planner(), jobs, aloud=False)
    if stop.code:  # a signal: joblib would hand this process the next group
        gc.collect()  # the files of what was under way
        os._exit(stop.code)
    return outcome


@functools.cache
def _end_with(command: int) -> None:
    """Have this worker stop soon after its command is gone: one of joblib's would wait for minutes, with its memory.
    Workers of the other launchers are no children of the command."""

    def watch() -> None:
        while os.getppid() == command:
            time.sleep(LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    if os.getppid() == command:
        threading.Thread(target=watch, daemon=True).start()


@functools.cache
def _planner() -> Planner:
    """Return the planner of this process, which keeps prompts from one group to the next."""
    return Planner()


def _take_gpu(gpus: Sequence[str], folder: Path) -> None:
    """Give this worker a GPU that no other worker has, for as long as it lives; where there are more workers than GPUs,
    some share one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[os.getpid() % len(gpus)]
    for gpu in gpus:
        lock = FileLock(folder / f"gpu-{gpu}.lock", thread_local=False)
        with suppress(Timeout):
            lock.acquire(timeout=0)
            _taken.append(lock)
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
            return
