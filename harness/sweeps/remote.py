"""A worker in a process that a launcher started: its GPU, its threads, and when it has to stop."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harness.sweeps.ledger import Sweep
from harness.sweeps.session import SweepSession
from harness.terminal.lasting_output import lasting_output
from harness.terminal.stopping import Stoppable, interrupt

if TYPE_CHECKING:
    from omegaconf import DictConfig

LOOK_S = 1.0  # between two looks whether to stop


@lasting_output()
def work_on(config: DictConfig) -> None:
    """What a launcher calls, with conf/worker.yaml filled in."""
    session = SweepSession(Sweep.load(Path(config.sweep)), Path(config.session))
    settle_in(session, int(config.worker))
    from harness.sweeps.worker import work

    with _stopping(session) as stop:
        work(session, patience=int(config.patience), wait=False, aloud=False)
    if stop.code and not session.is_held:  # nobody is left to answer: joblib's processes would wait, with their memory
        gc.collect()  # the files of what was under way
        os._exit(stop.code)


def settle_in(session: SweepSession, worker: int) -> None:
    """Before torch is imported: the folder and modules of the command, one GPU, a share of the CPUs."""
    facts = session.facts
    os.chdir(facts["cwd"])
    sys.path += [path for path in facts["path"] if path not in sys.path]
    if gpus := facts["gpus"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
    if threads := facts["threads"]:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@contextmanager
def _stopping(session: SweepSession) -> Iterator[Stoppable]:
    """Ctrl-C for this worker as soon as its command asks for it, or is gone from this machine. The ledger says of it,
    and of a signal that came to this process alone."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            if session.is_stopped or not (session.is_held or session.facts["is_remote"]):
                interrupt()
                return

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray blocks it in its workers
    threading.Thread(target=watch, daemon=True).start()
    with Stoppable() as stop:
        try:
            yield stop
        finally:
            over.set()
