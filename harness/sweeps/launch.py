"""Starts the workers of a sweep by one of Hydra's launchers; again where some were killed, until nothing is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from hydra import initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from harness.config.catalogue import CONF
from harness.config.compose import with_folders
from harness.config.launchers import PACKAGES
from harness.sweeps.ledger import Claim, Sweep
from harness.sweeps.remote import work_on
from harness.sweeps.session import PATIENCE, SweepSession
from harness.terminal.notices import say_once
from harness.terminal.stopping import Stopped, before_stopping, take_again

MEMORY = ", as the system sends where memory runs out"
CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: as Ray is there, it listens on the loopback address alone
RAY_STORE_BYTES = 78_643_200  # the least that Ray takes, as the launcher would set it: nothing of ours is stored there
SETTLE_S = 20.0  # that workers get to write down that they were stopped
KILLED = (
    "Its process was killed {times} times before it had finished another example, as happens where memory runs out: "
    "use shorter lengths, a smaller batch, prefill_chunk=2048, dtype=bf16 or fewer workers, and run the same command "
    "again."
)


def check(words: Sequence[str], config_dirs: Sequence[Path] = ()) -> None:
    """Raises what Hydra says of words that a launcher does not take."""
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        _composed(with_folders(words, config_dirs))


def launch(sweep: Sweep, command: str, words: Sequence[str], config_dirs: Sequence[Path] = ()) -> SweepSession:
    """The session, with every job ended. `words`: the overrides that choose the launcher and set it up.

    Ctrl-C, or an error of the launcher, stops the workers; what they have made is kept.
    """
    words = with_folders(words, config_dirs)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        how, own = workers_for(sweep, _composed(words))
        if how.launcher == "ray" and not how.is_remote:
            os.environ.setdefault(CLUSTER, "0")
        session = SweepSession.begin(sweep, command, **how._asdict(), cwd=os.getcwd(), path=sys.path)
        jobs, groups = len(sweep.jobs), len(sweep.groups)
        say_once(
            f"{jobs} jobs{f' in {groups} groups' if groups < jobs else ''}, {how.workers} workers ({how.launcher}); "
            f"see `python -m harness.status {sweep.root}`"
        )
        with session:
            stop = partial(_stop, session, how)
            try:
                with before_stopping(stop):
                    _run(session, [*own, *words], how.workers)
            except BaseException as error:
                stop(error.number if isinstance(error, Stopped) else signal.SIGINT)
                raise
            finally:
                _end_ray()
    return session


def _stop(session: SweepSession, how: Workers, number: int) -> None:
    """Ends the workers, and waits until they have let go. Those of a cluster's queue go on where their command is gone:
    Ctrl-C alone, or an error of the launcher, ends them."""
    if how.launcher != "submitit_slurm" or number == signal.SIGINT:
        session.stop()
        _settle(session)


def _run(session: SweepSession, words: Sequence[str], workers: int) -> None:
    """All workers; then, one after the other, what nobody survived; what is killed alone, too, has failed."""
    for patience, together in ((PATIENCE, workers), (PATIENCE + 1, 1)):
        while open_groups := session.open_groups(patience):
            before, crash = session.events(), None
            try:
                _round(session, words, min(together, len(open_groups)), patience)
            except Exception as error:
                crash = error
                say_once(f"a worker was lost ({lost(error)})")
            if session.events() == before:
                if crash:
                    raise crash
                if session.is_stopped:
                    raise KeyboardInterrupt
                if claim := session.wait(patience):  # another command has what is left
                    claim.release()
    for group in session.open_groups():
        with Claim(session.sweep, group) as claim:
            for job in claim.log.open_jobs(session.before(group)):
                reason = KILLED.format(times=claim.log.kills(session.before(group)))
                claim.note("ended", job=job, status="failed", reason=reason, memory=True, seconds=None)


def lost(error: Exception) -> str:
    """What a launcher says of a worker that is gone: its first sentence, and the signal that ended it."""
    text = " ".join(str(error).split())
    first, signals = re.split(r"(?<=\.) ", text)[0].rstrip("."), sorted(set(re.findall(r"\bSIG[A-Z]+\b", text)))
    told = f"{type(error).__name__}: {shorten(first, 200, placeholder=' ...')}".rstrip(": ")
    return "; ".join([told, *(f"{name}{MEMORY if name == 'SIGKILL' else ''}" for name in signals)])


def _hydra() -> Hydra:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    return hydra


def _composed(words: Sequence[str]) -> Any:
    """What Hydra makes of the launcher."""
    given = ["sweep=''", "session=''", "patience=0", "worker=0"]
    return _hydra().compose_config("worker", [*given, *words], run_mode=RunMode.MULTIRUN).hydra.launcher


def _round(session: SweepSession, words: Sequence[str], workers: int, patience: int) -> None:
    numbers = ",".join(map(str, range(workers)))
    place = {"sweep": session.sweep.folder.resolve(), "session": session.folder.resolve(), "patience": patience}
    given = [f"{key}='{value}'" for key, value in place.items()]
    if session.facts["launcher"] == "ray":
        _start_ray(words)
    _hydra().multirun("worker", work_on, [*given, *words, f"worker={numbers}"])


def _start_ray(words: Sequence[str]) -> None:
    """Starts or joins Ray before the launcher would, for Ray takes SIGTERM for itself and ends without a word."""
    import ray

    if not ray.is_initialized():
        settings: Any = OmegaConf.to_container(_composed(words).ray.init, resolve=True)
        ray.init(**settings)
        take_again()


def _settle(session: SweepSession) -> None:
    """Waits until the workers have let go, as long as that takes them."""
    end = time.monotonic() + SETTLE_S
    groups = range(len(session.sweep.groups))
    while any(session.sweep.is_running(group) for group in groups) and time.monotonic() < end:
        time.sleep(0.1)


def _end_ray() -> None:
    """A local cluster ends with its sweep, not with this process."""
    if "ray" in sys.modules:
        with suppress(Exception):
            sys.modules["ray"].shutdown()


class Workers(NamedTuple):
    """`gpus`: one for each worker in turn; empty where the launcher hands them out, or there are none. `threads`: of
    each; None leaves them alone. `is_remote`: workers may run on other machines, and outlive the command."""

    launcher: str
    workers: int
    gpus: list[str]
    threads: int | None
    is_remote: bool


def workers_for(sweep: Sweep, config: Any) -> tuple[Workers, list[str]]:
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
    return Workers(launcher, workers, [] if is_remote or launcher == "ray" else gpus, threads, is_remote), words


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
