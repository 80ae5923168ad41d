"""Whatever ends a command, it finishes its write, says how to go on, and leaves no file that nobody wants."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from harness.results.files import read_json
from harness.results.run_folder import load
from tests import forks, signals
from tests.fast import MODEL_ARGS, TASK_ARGS
from tests.forks import Forked
from tests.talks import configured

ROOT = Path(__file__).parents[3]
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped by SIGTERM", signal.SIGHUP: "stopped by SIGHUP"}
APPEND, CLOSE = signals.APPEND, "harness.results.run_folder:Run.close"
OF_RUNS = (*MODEL_ARGS, "baseline=off", "warmup=0")
STREAMING = ("method=streaming", *OF_RUNS, *TASK_ARGS)
ROWS = ("method=pqcache", "placement=disk", *TASK_ARGS)
STORE = ("method=full", "task=talks", "history=store", "store.disk=1GB")


def only_run(root: Path) -> Path:
    (found,) = (file.parent for file in root.glob("*/run.json"))
    return found


def leftovers(folder: Path) -> list[str]:
    """Names of temporary files and folders, wherever they lie in it."""
    found = [path.name for path in folder.rglob("*") if path.name.startswith((".", "kv-"))]
    return [name for name in found if name != ".lock"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGINT, STORE), (signal.SIGTERM, ROWS), (signal.SIGHUP, STORE)],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value[0],
)
def test_a_run_is_closed_says_how_to_go_on_and_goes_on(
    tmp_path: Path, number: signal.Signals, words: tuple[str, ...]
) -> None:
    words = (*OF_RUNS, *words, f"results.root={tmp_path / 'runs'}", f"--config-dir={configured(tmp_path / 'conf')}")
    stopped = Forked(signals.at, APPEND, 3, (number,), tmp_path / "temporary", "harness", *words)
    assert stopped.wait() == 128 + number, stopped.err
    assert stopped.err.endswith(f"-m harness {shlex.join(words)}\n")
    assert f"\n{WORDS[number]}; " in stopped.err
    run = only_run(tmp_path / "runs")
    assert read_json(run / "run.json")["status"] == "interrupted"
    before = (run / "examples.jsonl").read_bytes()
    assert before.count(b"\n") == 2
    assert leftovers(tmp_path) == []
    again = Forked(forks.module, "harness", *words)
    assert again.wait() == 0, again.err
    assert (run / "examples.jsonl").read_bytes().startswith(before)
    assert load(run).status == "complete"


@pytest.mark.parametrize(
    ("name", "place", "words", "go_on"),
    [
        ("harness.bench", "harness.bench.common.limits:measured", ["ops", "--out={out}"], "the rows so far are"),
        ("harness.report", "harness.results.run_folder:find", ["{out}"], "the same command begins anew"),
    ],
)
def test_every_long_command_says_how_to_go_on(
    tmp_path: Path, name: str, place: str, words: list[str], go_on: str
) -> None:
    words = [word.format(out=tmp_path / "out") for word in words]
    stopped = Forked(signals.at, place, 1, (signal.SIGTERM,), tmp_path / "temporary", name, *words)
    assert stopped.wait() == 143, stopped.err
    assert f"\nstopped by SIGTERM; {go_on}" in stopped.err
    assert "Traceback" not in stopped.err
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("call", [1, 2])
def test_a_write_is_finished_first(tmp_path: Path, call: int) -> None:
    """Ctrl-C at a sync, which lies in the middle of a write: of the config, of run.json."""
    words = (*STREAMING, f"results.root={tmp_path}")
    stopped = Forked(signals.at, "os:fsync", call, (signal.SIGINT,), tmp_path / "temporary", "harness", *words)
    assert stopped.wait() == 130, stopped.err
    assert leftovers(tmp_path) == []
    assert len([*tmp_path.glob("*/config.yaml"), *tmp_path.glob("*/run.json")]) == call


@pytest.mark.parametrize(("echo_s", "status"), [(0.0, "running"), (1e9, "interrupted")], ids=["second", "echo"])
def test_a_second_signal_ends_at_once_unless_it_is_an_echo_of_the_first(
    tmp_path: Path, echo_s: float, status: str
) -> None:
    words = (*STREAMING, f"results.root={tmp_path}")
    stopped = Forked(signals.twice, APPEND, CLOSE, echo_s, tmp_path / "temporary", "harness", *words)
    assert stopped.wait() == 143, stopped.err
    assert stopped.err.count("stopped by SIGTERM") == 1
    assert read_json(only_run(tmp_path) / "run.json")["status"] == status


def test_under_nohup_a_terminal_may_hang_up(tmp_path: Path) -> None:
    words = (*STREAMING, f"results.root={tmp_path / 'runs'}")
    going_on = Forked(signals.under_nohup, APPEND, tmp_path / "temporary", "harness", *words)
    assert going_on.wait() == 0, going_on.err
    assert load(only_run(tmp_path / "runs")).status == "complete"


OTHERS = """
import signal, sys
from harness.terminal.stopping import SIGNALS, Stoppable
from tests import signals

def bypass(*_): print("bypassed")

signals.from_a_terminal()
signal.signal(signal.SIGTERM, bypass)
signal.signal(signal.SIGUSR2, bypass)
with Stoppable("to go on: again") as stop:
    signals.send(signal.SIGTERM, signal.SIGUSR2)
assert stop.code == 0
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
with Stoppable("to go on: again") as stop:
    signals.send(signal.SIGHUP)
sys.exit(stop.code)
"""


def test_handlers_of_others_stay_and_all_are_given_back() -> None:
    """As submitit has one for SIGTERM and one for SIGUSR2, by which it queues its job again."""
    stopped = Forked(signals.script, OTHERS)
    assert stopped.wait() == 129, stopped.err
    assert stopped.out == "bypassed\nbypassed\n"


OF_OURS = (130, "", "\ninterrupted\n")


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (["-m", "harness", "method=full"], OF_OURS),
        (["-m", "harness.report", "runs"], OF_OURS),
        (["-m", "harness.bench", "ops"], OF_OURS),
        (["kv-harness", "method=full"], OF_OURS),  # the script that pip installs
        (["other.py"], (0, "mine\n", "")),
    ],
)
def test_a_command_that_still_imports_ends_in_one_line_and_a_program_of_others_as_it_likes(
    tmp_path: Path, words: list[str], ends: tuple[int, str, str]
) -> None:
    """All of them import yaml, here one that interrupts them."""
    (tmp_path / "yaml.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    (tmp_path / "kv-harness").write_text("import sys; from harness.__main__ import main; sys.exit(main())")
    (tmp_path / "other.py").write_text("try: import harness, yaml\nexcept KeyboardInterrupt: print('mine')")
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        preexec_fn=signals.from_a_terminal,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == ends


@pytest.mark.parametrize(
    ("words", "killed_at"),
    [
        (STORE, partial(signals.killed_behind, 4)),
        (
            ROWS,
            partial(signals.at, "harness.engine.batch.running_sequence:RunningSequence.finish", 2, (signal.SIGKILL,)),
        ),
    ],
    ids=["store", "rows"],
)
def test_the_next_start_removes_what_a_killed_run_left(
    tmp_path: Path, words: tuple[str, ...], killed_at: Callable[..., None]
) -> None:
    """Also where the run was complete, so that the next start makes no such files any more."""
    words = (*OF_RUNS, *words, f"results.root={tmp_path / 'runs'}", f"--config-dir={configured(tmp_path / 'conf')}")
    killed = Forked(killed_at, tmp_path / "temporary", "harness", *words)
    assert killed.wait() == -signal.SIGKILL
    assert any(name.startswith(("kv-history-", "kv-rows-")) for name in leftovers(tmp_path))
    again = Forked(signals.at, APPEND, 100, (), tmp_path / "temporary", "harness", *words)
    assert again.wait() == 0, again.err
    assert leftovers(tmp_path) == []
