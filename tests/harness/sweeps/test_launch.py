"""How workers are planned, started again and given up, with a launcher that starts nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.config.overrides import checked
from harness.config.settings import SettingsError
from harness.sweeps import launch, remote
from harness.sweeps.launch import launch as start
from harness.sweeps.ledger import Claim, Sweep
from harness.sweeps.session import SweepSession, sessions_of
from tests import signals
from tests.forks import Forked
from tests.harness.sweeps.test_ledger import PARTIAL, job

Play = Callable[[SweepSession, int, int], None]


def sweep(root: Path, jobs: int = 3, **changes: Any) -> Sweep:
    facts = {"device": "auto", "workers": None, "threads": None}
    return Sweep.create(root, [job(number, **facts | changes) for number in range(jobs)], PARTIAL)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Play], list[tuple[int, int]]]:
    """In place of the launcher's rounds; returns workers and patience of each."""

    def install(play: Play) -> list[tuple[int, int]]:
        rounds: list[tuple[int, int]] = []

        def one(session: SweepSession, words: Sequence[str], workers: int, patience: int) -> None:
            rounds.append((workers, patience))
            play(session, workers, patience)

        monkeypatch.setattr(launch, "_round", one)
        return rounds

    return install


def attempt(session: SweepSession, group: int, *, dies: bool) -> None:
    with Claim(session.sweep, group) as claim:
        claim.note("started", jobs=[group], host="here", pid=1, gpu=None)
        if not dies:
            claim.note("ended", job=group, status="done", seconds=0.1, folder="x", full=None)


def test_what_kills_every_worker_runs_alone_at_last_and_has_failed_then(tmp_path: Path, played: Any) -> None:
    def play(session: SweepSession, workers: int, patience: int) -> None:
        for group in session.open_groups(patience):
            attempt(session, group, dies=group == 1)
            if group == 1:
                raise RuntimeError("a worker was killed")

    rounds = played(play)
    session = start(sweep(tmp_path), "the command", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"])
    assert [workers for workers, _ in rounds] == [2, 2, 1, 1]
    ends = dict(session.ends())
    assert [ends[number]["status"] for number in range(3)] == ["done", "failed", "done"]
    assert "killed 3 times" in ends[1]["reason"]
    assert "prefill_chunk=2048" in ends[1]["reason"]
    assert ends[1]["memory"]


def test_a_launcher_that_cannot_start_is_not_started_for_ever(tmp_path: Path, played: Any) -> None:
    def play(*_: object) -> None:
        raise RuntimeError("sbatch: not found")

    rounds = played(play)
    with pytest.raises(RuntimeError, match="sbatch: not found"):
        start(sweep(tmp_path), "the command", ["hydra/launcher=submitit_slurm"])
    assert len(rounds) == 1


def test_an_interrupted_command_tells_its_workers_to_stop(tmp_path: Path, played: Any) -> None:
    seen = []

    def play(session: SweepSession, workers: int, patience: int) -> None:
        seen.append(session)
        assert not session.is_stopped
        raise KeyboardInterrupt

    played(play)
    with pytest.raises(KeyboardInterrupt):
        start(sweep(tmp_path), "the command", ["hydra/launcher=joblib"])
    assert seen[0].is_stopped
    assert not seen[0].is_held


@pytest.mark.parametrize("how", ["stopped", "gone"])
def test_a_worker_stops_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(remote, "LOOK_S", 0.01)
    before = signal.getsignal(signal.SIGINT)
    session = SweepSession.begin(sweep(tmp_path), "the command", is_remote=False)
    try:
        with session, remote._stopping(session) as stop:
            if how == "stopped":
                session.stop()
            else:
                session.__exit__()
            threading.Event().wait(600)
        assert stop.code == 130
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("launcher", "gpus", "workers", "says"),
    [
        ("joblib", "0,1,2", None, ("joblib", 3, ["0", "1", "2"])),
        ("joblib", "0,1,2", 2, ("joblib", 2, ["0", "1", "2"])),
        ("joblib", "", None, ("joblib", 2, [])),
        ("submitit_local", "4,6", None, ("submitit_local", 2, ["4", "6"])),
        ("ray", "0,1,2", None, ("ray", 3, [])),
        ("submitit_slurm", "", None, ("submitit_slurm", 5, [])),
        ("slurm", "", 4, ("submitit_slurm", 4, [])),
    ],
)
def test_workers_gpus_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, played: Any,
    launcher: str, gpus: str, workers: int | None, says: tuple[str, int, list[str]],
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setattr(launch, "cpus", lambda: 8)

    def play(session: SweepSession, *_: int) -> None:
        for group in session.open_groups():
            attempt(session, group, dies=False)

    played(play)
    session = start(sweep(tmp_path, 5, workers=workers), "the command", [f"hydra/launcher={launcher}"])
    facts = session.facts
    assert (facts["launcher"], facts["workers"], facts["gpus"]) == says
    assert facts["threads"] == (None if "slurm" in launcher else 8 // says[1])


@pytest.mark.parametrize(
    ("words", "cluster"),
    [
        (["hydra/launcher=ray"], "0"),
        (["hydra/launcher=ray", "hydra.launcher.ray.init.address=auto"], None),
        (["hydra/launcher=joblib"], None),
    ],
)
def test_ray_is_told_to_stay_on_this_machine_where_we_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, played: Any, words: list[str], cluster: str | None
) -> None:
    monkeypatch.setenv(launch.CLUSTER, "")  # for it to be as it was, afterwards
    monkeypatch.delenv(launch.CLUSTER)

    def play(session: SweepSession, *_: int) -> None:
        for group in session.open_groups():
            attempt(session, group, dies=False)

    played(play)
    start(sweep(tmp_path), "the command", words)
    assert os.environ.get(launch.CLUSTER) == cluster
    assert "ray" not in sys.modules  # which reads it once


def test_each_worker_gets_a_gpu_and_its_share_of_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # as in a process that has not imported it
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    facts = {"gpus": ["4", "6"], "threads": 3, "cwd": str(tmp_path), "path": ["/plug-ins"]}
    monkeypatch.chdir(tmp_path)
    with SweepSession.begin(sweep(tmp_path), "the command", **facts) as session:
        seen = []
        for worker in range(3):
            remote.settle_in(session, worker)
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == ["4", "6", "4"]
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert sys.path == ["/elsewhere", "/plug-ins"]


def test_a_launcher_that_is_not_installed_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.config.launchers.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"not installed: pip install hydra-ray-launcher\."):
        checked(["hydra/launcher=ray"], sweep=True)
    with pytest.raises(SettingsError, match=r"slurm needs .*: pip install hydra-submitit-launcher\."):
        checked(["hydra/launcher=slurm"], sweep=True)


def test_the_words_of_a_launcher_stay_apart() -> None:
    words = ["method=full,streaming", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.verbose=false"]
    found = checked(words, sweep=True)
    assert found.launcher == ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert found.words == ["method=full,streaming", "hydra.verbose=false"]
    assert checked(["hydra/launcher=basic", "method=full,streaming"], sweep=True).launcher == []


JOBLIB = """A worker process managed by the executor was unexpectedly terminated. This could be caused by a segmentation
fault while calling the function or by an excessive memory usage causing the Operating System to kill the worker.
The exit codes of the workers are {SIGKILL(-9)}
Detailed tracebacks of the workers should have been printed to stderr."""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            JOBLIB,
            "A worker process managed by the executor was unexpectedly terminated; "
            "SIGKILL, as the system sends where memory runs out",
        ),
        ("lost " * 100, f"{'lost ' * 39}..."),
    ],
    ids=["killed", "no end"],
)
def test_a_lost_worker_is_told_in_whole_words(said: str, told: str) -> None:
    assert launch.lost(RuntimeError(said)) == f"RuntimeError: {told}".strip()


STARTING = """
import signal, sys
from pathlib import Path
from harness.sweeps import launch
from harness.sweeps.session import SweepSession
from harness.terminal.stopping import Stoppable
from tests import signals
from tests.harness.sweeps.test_launch import sweep

def play(session, *_):
    try:
        signals.send(int(sys.argv[3]))
    except KeyboardInterrupt:
        print(session.is_stopped)  # before joblib, here, could kill anyone
        raise

signals.from_a_terminal()
launch._round = play
with Stoppable() as stop:
    launch.launch(sweep(Path(sys.argv[1])), "the command", [f"hydra/launcher={sys.argv[2]}"])
sys.exit(stop.code)
"""


@pytest.mark.parametrize(
    ("launcher", "number", "stops"),
    [("joblib", signal.SIGTERM, True), ("slurm", signal.SIGINT, True), ("slurm", signal.SIGHUP, False)],
)
def test_workers_are_stopped_before_the_launcher_hears_of_a_signal(
    tmp_path: Path, launcher: str, number: signal.Signals, stops: bool
) -> None:
    """Those in a cluster's queue outlive a terminal."""
    command = Forked(signals.script, STARTING, str(tmp_path), launcher, str(int(number)))
    assert command.wait() == 128 + number, command.err
    assert command.out == f"{stops}\n"
    [stopped] = [session.is_stopped for session in sessions_of(sweep(tmp_path))]
    assert stopped == stops


WORKING = """
import signal, sys
from pathlib import Path
from harness.sweeps import remote
from harness.sweeps.session import SweepSession
from tests import signals
from tests.harness.sweeps.test_launch import sweep

def bypass(*_):
    print("bypassed")

signals.from_a_terminal()
if sys.argv[2] == "submitit":
    signal.signal(signal.SIGTERM, bypass)
with SweepSession.begin(sweep(Path(sys.argv[1])), "the command", is_remote=False) as session:
    with remote._stopping(session) as stop:
        signals.send(signal.SIGTERM)
        print("goes on")
print(stop.code)
"""


@pytest.mark.parametrize(("who", "told"), [("joblib", "143\n"), ("submitit", "bypassed\ngoes on\n0\n")])
def test_a_worker_is_stopped_by_sigterm_unless_its_launcher_has_a_use_for_that(
    tmp_path: Path, who: str, told: str
) -> None:
    worker = Forked(signals.script, WORKING, str(tmp_path), who)
    assert worker.wait() == 0, worker.err
    assert worker.out == told
