"""Runs the jobs of one command: says which of them run together as a group, and hands each group to
one of Hydra's launchers as one job.

Nothing is remembered between commands except the run folders: a job whose folder is complete ends
at once, and a job whose folder another process is writing waits for it.
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
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock, Timeout
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from harness.config import plugins
from harness.config.catalogue import CONF
from harness.config.compose import LAUNCHER, Composed, built, search_path, words_of
from harness.config.entry import READ
from harness.config.errors import is_memory, one_sentence
from harness.config.plugins import suggestion
from harness.config.settings import ENTRIES, Settings, SettingsError
from harness.results.files import canonical
from harness.sweeps import begun
from harness.terminal.notices import lasting_output, say_once
from harness.terminal.progress import numbered
from harness.terminal.stopping import Stoppable

if TYPE_CHECKING:
    from evals.base import Task
    from harness.jobs.dry_run import Forecasts
    from harness.jobs.examples import Prompts
    from harness.jobs.job import Job

OF_A_BUDGET = [key for key, entry in ENTRIES.items() if entry.section == READ and "." not in key]
AFTER_PREFILL = {key for key, entry in ENTRIES.items() if entry.after_prefill}
QUIET = (
    "hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null", "hydra.sweep.subdir=.",
    "hydra.job.chdir=false", "hydra.job.name=kv-harness",
)  # fmt: skip
INSTALL = "joblib, ray and submitit_* come with pip install 'kv-harness[launchers]'"
RAY_STORE_BYTES = 78_643_200  # the least that Ray takes: nothing of ours is stored there
LOOK_S = 1.0  # between two looks whether the command is still there
# jobs that run together, by their numbers among all of the command
JobGroup = Mapping[int, Composed]
Complain = Callable[[int, str], None]  # the number of a job, and a sentence on what went wrong
# of the latest job, by what they were asked for, with the task that made them and knows their data
KnownPrompts = dict[str, tuple["Task", "Prompts"]]
_taken: list[FileLock] = []  # the GPU of this worker
_prompts: KnownPrompts = {}  # of this worker


# Which jobs there are


def with_own_settings(jobs: Sequence[Composed]) -> list[Composed]:
    """Return the jobs of a sweep with settings reset that do not concern them, and drop duplicates
    that this leaves: budgets for methods without a budget, settings of the store for jobs without
    one. If no job of the sweep uses such a setting, it stays, and a note says that it changes
    nothing."""
    if len(jobs) == 1:
        return list(jobs)
    usual, kept = asdict(Settings()), dict[str, Composed]()
    budgets = [_uses_budget(job) for job in jobs]
    stores = [job.config.get("history") == "store" for job in jobs]
    for job, has_budget, has_store in zip(jobs, budgets, stores, strict=True):
        config, words = dict(job.config), job.words
        if any(budgets) and not has_budget:
            config |= {key: usual[key] for key in OF_A_BUDGET}
            words = [
                word for word in words if re.split(r"[.=]", word.lstrip("+"))[0] not in OF_A_BUDGET
            ]
        if any(stores) and not has_store:
            config["store"] = usual["store"]
        kept.setdefault(canonical(config), Composed(config, job.presets, words))
    return list(kept.values())


def _uses_budget(job: Composed) -> bool:
    try:
        return bool(plugins.build(job.config["method"], "method").uses_budget)
    except Exception:  # it is refused when its job runs
        return True


def groups(jobs: Sequence[Composed]) -> list[dict[int, Composed]]:
    """Return the jobs in groups that run together, each job with its number in the sweep: under
    `shared_prefill=true` the jobs that can share a prefill, otherwise each job by itself."""
    by_group: dict[str, dict[int, Composed]] = {}
    for number, job in enumerate(jobs):
        common = {
            key: value for key, value in job.config.items() if key not in AFTER_PREFILL | {"method"}
        }
        key = canonical(common) if job.config.get("shared_prefill") else str(number)
        by_group.setdefault(key, {})[number] = job
    return list(by_group.values())


def labels(jobs: Sequence[Composed]) -> list[str]:
    """Return a name for each job: its overrides without those that all jobs have in common. A
    single job has an empty name."""
    words = [set(job.words) for job in jobs]
    common = set.intersection(*words) if words else set[str]()
    return [" ".join(word.lstrip("+") for word in job.words if word not in common) for job in jobs]


# One group, in whichever process


class GroupOutcome(NamedTuple):
    """The finished runs and the errors of a group of jobs."""

    folders: list[Path]  # of finished runs, Full before what is held against it
    failures: list[tuple[int, str]]  # the number of a job, and a sentence on what went wrong


def run_jobs(
    group: JobGroup,
    prompts: KnownPrompts,
    jobs: int,
    complain: Complain | None = None,
    forecasts: Forecasts | None = None,
) -> GroupOutcome:
    """Run the jobs of a group; with dry_run=true, print what they would do. An error ends only its
    own job. `prompts`: a cache of the latest job's prompts, which the next job may reuse. `jobs`:
    the number of jobs of the whole command. `complain`: prints an error when it happens.
    `forecasts`: collects what a dry run finds out about each job.
    """
    planned: dict[int, Job] = {}
    failures, errors = list[tuple[int, str]](), list[Exception]()

    def failed(error: Exception, number: int | None = None) -> None:
        # which name the folder of the run that failed
        notes = " ".join(getattr(error, "__notes__", ()))
        of_folder = [number for number, job in planned.items() if f"{job.folder}/" in notes]
        at_fault = number if number is not None else [*of_folder, *group][0]
        failures.append((at_fault, one_sentence(error)))
        begun.begin(group[failures[-1][0]].config)
        errors.append(error)
        if complain:
            complain(*failures[-1])

    with numbered(min(group) + 1, jobs if len(group) == 1 else 1, complain is not None):
        for number, composed in group.items():
            try:
                job = _planned(composed, prompts)
                if job.settings.dry_run:
                    from harness.jobs.dry_run import show

                    show(job, {} if forecasts is None else forecasts, alone=jobs == 1)
                    continue
                _ = job.full  # which is refused before anything runs, too
                job.require_known()
                planned[number] = job
            except Exception as error:
                failed(error, number)
        runs = []
        if planned:
            from harness.jobs.evaluate import evaluate_together

            for number in planned:
                begun.begin(group[number].config)
            runs = evaluate_together(list(planned.values()), failed)
    if any(map(is_memory, errors)):
        _give_back_memory(errors)
    pairs = [(run.full_folder, run.folder) for run in runs]
    return GroupOutcome(
        list(dict.fromkeys(folder for pair in pairs for folder in pair if folder)), failures
    )


def _planned(composed: Composed, prompts: KnownPrompts) -> Job:
    """Plan a job. If it asks the same of the same model as the job before it, it reuses the prompts
    in `prompts`, because those of a large task take minutes to make."""
    method, task, model, settings = built(composed.config)
    # and torch, which a wrong word on the command line does not wait for
    from harness.jobs.job import Job

    common = {name: value for name, value in asdict(settings).items() if name not in AFTER_PREFILL}
    key = str((task, model, common))
    if key not in prompts:
        prompts.clear()  # two sets of prompts are never there at once
    task, known = prompts.get(key, (task, None))
    job = Job.plan(method, task, model, settings, known, composed.presets)
    prompts[key] = job.task, job.prompts
    return job


def _give_back_memory(errors: Sequence[Exception]) -> None:
    """Free the tensors that the tracebacks of out-of-memory errors keep alive, for the next
    jobs."""
    import torch

    for error in errors:
        traceback.clear_frames(error.__traceback__)
    gc.collect()
    torch.cuda.empty_cache()


# Workers


class CommandProcess(NamedTuple):
    """The process that started the sweep: its id, its working directory and its `sys.path`."""

    process: int
    folder: str
    path: list[str]


def launch(
    groups: Sequence[JobGroup], words: Sequence[str], root: Path, config_dirs: Sequence[Path] = ()
) -> list[GroupOutcome]:
    """Run the groups with one of Hydra's launchers, and return what became of each. `words`: the
    overrides that choose and configure the launcher; `root`: results.root, below which submitit
    keeps the output of its jobs."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if threads := os.environ.get("OMP_NUM_THREADS"):  # else joblib gives each worker's MKL a share
        os.environ.setdefault("MKL_NUM_THREADS", threads)
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        hydra: Any = GlobalHydra.instance().hydra
        name = words_of(words).get(LAUNCHER, "basic")
        known = hydra.config_loader.get_group_options(LAUNCHER)
        if name not in known:
            raise SettingsError(
                f"There is no launcher {name!r}{suggestion(name, known)} {INSTALL}."
            )
        folder = (root / "sweeps").resolve()
        numbers = ",".join(map(str, range(len(groups))))
        common = [*QUIET, f"hydra.sweep.dir='{folder}'", *search_path(config_dirs), *words]
        target = hydra.compose_config(
            None, common, run_mode=RunMode.MULTIRUN
        ).hydra.launcher._target_.lower()
        devices = {job.config["device"] for group in groups for job in group.values()}
        gpus = [] if devices == {"cpu"} else visible_gpus()
        own = usual_words(
            target, gpus, len(groups), "hydra.launcher.ray.init.address" in words_of(words)
        )
        # these hand them out themselves
        given = [] if "ray" in target or "slurm" in target else gpus
        command = CommandProcess(os.getpid(), os.getcwd(), list(sys.path))
        task = functools.partial(_work, groups, command, given, folder)
        say_once(
            f"{sum(map(len, groups))} jobs go to {name}; see `python -m harness.status {root}`"
        )
        try:
            [returns] = hydra.multirun(None, task, [*own, *common, f"+group={numbers}"])
        finally:
            if "ray" in sys.modules:  # a local cluster ends with its sweep, not with this process
                with suppress(Exception):
                    sys.modules["ray"].shutdown()
        return [returned.return_value for returned in returns]


def usual_words(target: str, gpus: Sequence[str], groups: int, is_joined: bool) -> list[str]:
    """Return overrides with our defaults for the launcher's workers: one per GPU, else two.
    `target`: the launcher's class; `gpus`: the GPUs to share out; `is_joined`: the sweep uses a Ray
    cluster that is running already."""
    workers = min(groups, len(gpus) or min(2, len(os.sched_getaffinity(0))))
    if "joblib" in target:
        return [f"hydra.launcher.n_jobs={workers}", "hydra.launcher.batch_size=1"]
    if "ray" not in target:
        return []
    words = [f"remote.num_gpus={int(bool(gpus))}", "remote.max_calls=0"]  # a worker keeps its model
    if not is_joined:
        # Ray then listens on the loopback alone
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        words += [
            f"init.num_cpus={workers}",
            f"init.num_gpus={len(gpus)}",
            "init.include_dashboard=false",
        ]
        words.append(f"init.object_store_memory={RAY_STORE_BYTES}")
    return [f"++hydra.launcher.ray.{word}" for word in words]


def lost(error: Exception) -> str:
    """Return one line on a worker process that died: the first sentence of the launcher's error,
    and the signal that ended the process."""
    text = " ".join(str(error).split())
    first = re.split(r"(?<=\.) ", text)[0].rstrip(".")
    signals = sorted(set(re.findall(r"\bSIG[A-Z]+\b", text)))
    memory = ["SIGKILL comes from the system where memory runs out"] if "SIGKILL" in signals else []
    return "; ".join(
        [f"{type(error).__name__}: {shorten(first, 200, placeholder=' ...')}", *signals, *memory]
    )


def visible_gpus() -> list[str]:
    """Return the names of the GPUs in CUDA_VISIBLE_DEVICES, or their numbers if it is not set."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name.strip() not in ("", "-1")]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


@lasting_output()
def _work(
    groups: Sequence[JobGroup],
    command: CommandProcess,
    gpus: Sequence[str],
    folder: Path,
    _: DictConfig,
) -> GroupOutcome:
    """Run one group in a worker process that a launcher started; Hydra's job number says which."""
    os.chdir(command.folder)
    sys.path += [path for path in command.path if path not in sys.path]
    _end_with(command.process)
    if gpus and not _taken:
        _take_gpu(gpus, folder)
    with Stoppable() as stop:
        outcome = run_jobs(groups[HydraConfig.get().job.num], _prompts, sum(map(len, groups)))
    if stop.code:  # a signal: joblib would hand this process the next group
        gc.collect()  # the files of what was under way
        os._exit(stop.code)
    return outcome


@functools.cache
def _end_with(command: int) -> None:
    """Make this worker end soon after the process `command`, which started it. Without this, a
    worker of joblib would keep its memory for minutes. Nothing happens in workers of other
    launchers, which are not children of the command."""

    def watch() -> None:
        while os.getppid() == command:
            time.sleep(LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    if os.getppid() == command:
        threading.Thread(target=watch, daemon=True).start()


def _take_gpu(gpus: Sequence[str], folder: Path) -> None:
    """Reserve a GPU for this worker until it ends, by a lock file in `folder`, and make it the only
    visible one. If there are more workers than GPUs, some share one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[os.getpid() % len(gpus)]
    for gpu in gpus:
        lock = FileLock(folder / f"gpu-{gpu}.lock", thread_local=False)
        with suppress(Timeout):
            lock.acquire(timeout=0)
            _taken.append(lock)
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
            return
