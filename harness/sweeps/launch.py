"""Starts the workers of a sweep by one of Hydra's launchers; again where some were killed, until nothing is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from harness.config.catalogue import CONF
from harness.config.launchers import PACKAGES
from harness.sweeps.ledger import Claim, Sweep
from harness.sweeps.remote import work_on
from harness.sweeps.session import PATIENCE, Session
from harness.terminal.notices import say_once

SETTLE_S = 20.0  # that workers get to write down that they were stopped
KILLED = (
    "Its process was killed {times} times before it had finished another example, as happens where memory runs out: "
    "use shorter lengths, a smaller batch, prefill_chunk=2048, dtype=bf16 or fewer workers, and run the same command "
    "again."
)


class Plan(NamedTuple):
    """How many workers, on what. `gpus`: one each in turn; empty where the launcher hands them out, or there are none.
    `threads`: of each; None leaves them alone. `is_remote`: they may run elsewhere, and outlive this process."""

    launcher: str
    workers: int
    gpus: list[str]
    threads: int | None
    is_remote: bool


def launch(sweep: Sweep, command: str, words: Sequence[str], config_dirs: Sequence[Path] = ()) -> Session:
    """The session, with every job ended. `words`: the overrides that choose the launcher and set it up.

    Ctrl-C, or an error of the launcher, stops the workers; what they have made is kept.
    """
    path = ",".join(f"file://{folder.resolve()}" for folder in config_dirs)
    words = [f"hydra.searchpath=[{path}]", *words] if path else list(words)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        plan, own = planned(sweep, words)
        session = Session.begin(sweep, command, **plan._asdict(), cwd=os.getcwd(), path=sys.path)
        jobs, groups = len(sweep.jobs), len(sweep.groups)
        say_once(
            f"{jobs} jobs{f' in {groups} groups' if groups < jobs else ''}, {plan.workers} workers ({plan.launcher}); "
            f"see `python -m harness.status {sweep.root}`"
        )
        with session:
            try:
                _run(session, [*own, *words], plan.workers)
            except BaseException:
                session.stop()
                _settle(session)
                raise
            finally:
                _end_ray()
    return session


def _run(session: Session, words: Sequence[str], workers: int) -> None:
    """All workers; then, one after the other, what nobody survived; what is killed alone, too, has failed."""
    for patience, together in ((PATIENCE, workers), (PATIENCE + 1, 1)):
        while open_groups := session.open_groups(patience):
            before, crash = session.events(), None
            try:
                _round(session, words, min(together, len(open_groups)), patience)
            except Exception as error:
                crash = error
                lines = str(error).strip().splitlines() or [""]
                say_once(f"a worker was lost ({type(error).__name__}: {lines[0]:.200})")
            if session.events() == before:
                if crash:
                    raise crash
                if claim := session.wait(patience):
                    claim.release()
    for group in session.open_groups():
        with Claim(session.sweep, group) as claim:
            for job in claim.log.open_jobs(session.before(group)):
                reason = KILLED.format(times=claim.log.kills(session.before(group)))
                claim.note("ended", job=job, status="failed", reason=reason, memory=True, seconds=None)


def _round(session: Session, words: Sequence[str], workers: int, patience: int) -> None:
    numbers = ",".join(map(str, range(workers)))
    place = {"sweep": session.sweep.folder.resolve(), "session": session.folder.resolve(), "patience": patience}
    given = [f"{key}='{value}'" for key, value in place.items()]
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    hydra.multirun("worker", work_on, [*given, *words, f"worker={numbers}"])


def _settle(session: Session) -> None:
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


def planned(sweep: Sweep, words: Sequence[str]) -> tuple[Plan, list[str]]:
    """The workers, and the words that make a launcher start them, which `words` may overrule."""
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    given = ["sweep=''", "session=''", "patience=0", "worker=0"]
    config = hydra.compose_config("worker", [*given, *words], run_mode=RunMode.MULTIRUN).hydra.launcher
    launcher = _kind(config._target_)
    settings = sweep.jobs[0].config
    gpus = [] if all(job.config["device"] == "cpu" for job in sweep.jobs) else visible_gpus()
    is_remote = launcher == "submitit_slurm" or (launcher == "ray" and bool(config.ray.init.get("address")))
    asked = settings["workers"] or (config.n_jobs if launcher == "joblib" and config.n_jobs > 0 else None)
    default = len(sweep.groups) if is_remote else len(gpus) or min(2, cpus())
    workers = min(asked or default, len(sweep.groups))
    threads = None if is_remote or settings["threads"] else max(1, cpus() // workers)
    own = _words(launcher, workers, len(gpus), is_remote)
    return Plan(launcher, workers, [] if is_remote or launcher == "ray" else gpus, threads, is_remote), own


def _kind(target: str) -> str:
    """The launcher by its class, for a yaml of the user's may name it otherwise."""
    package = target.split(".")[1].removeprefix("hydra_").removesuffix("_launcher")
    names = [name for name in PACKAGES if name.startswith(package)]
    return next((name for name in names if name.split("_")[-1] in target.rpartition(".")[2].lower()), names[0])


def _words(launcher: str, workers: int, gpus: int, is_remote: bool) -> list[str]:
    if launcher == "joblib":
        return [f"hydra.launcher.n_jobs={workers}", "hydra.launcher.batch_size=1"]
    if launcher == "ray":
        local = [] if is_remote else [f"init.num_cpus={workers}", "init.include_dashboard=false"]
        gpu = [f"remote.num_gpus={min(1, gpus / workers):g}"] if gpus else []
        return [f"++hydra.launcher.ray.{word}" for word in (*local, *gpu)]
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
