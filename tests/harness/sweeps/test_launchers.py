"""Sweeps under Hydra's launchers leave what one process leaves, though workers are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.commands.status import main as status
from harness.results.files import read_json
from harness.results.run_folder import load
from harness.sweeps.ledger import Sweep, sweeps_in
from tests.fast import MODEL_ARGS, TASK_ARGS
from tests.harness.terminal.test_stopping import WORDS
from tests.signals import from_a_terminal

ROOT = Path(__file__).parents[3]
Cli = Callable[..., tuple[int, str, str]]
TIMES = {
    "token_s", "share_s", "decode_share_s", "seal_s", "question_s", "device_peak_bytes", "host_peak_bytes", "peaks",
}  # fmt: skip


def runs(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Records by folder, without their times; every run is complete and no line is there twice."""
    found = {}
    for file in root.glob("*/run.json"):
        stored = load(file.parent)
        assert stored.status == "complete"
        plain = [json.loads(record.to_json()) for record in stored.records]
        found[file.parent.name] = [{key: value for key, value in one.items() if key not in TIMES} for one in plain]
        assert (file.parent / "examples.jsonl").read_bytes().count(b"\n") == len(plain) == 2
    return found


def reachable(process: int) -> set[str]:
    """Addresses beyond the loopback at which it or a descendant listens, as the kernel writes them."""
    found, inodes = [process], set()
    for one in found:  # which grows
        found += [
            int(child) for file in Path(f"/proc/{one}/task").glob("*/children") for child in file.read_text().split()
        ]
        inodes |= {os.readlink(fd).removeprefix("socket:[").rstrip("]") for fd in Path(f"/proc/{one}/fd").iterdir()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = {line[1] for line in lines if line[3] == "0A" and line[9] in inodes}
    return {address for address in listening if not address.rpartition(":")[0].endswith(("0100007F", "00000001000000"))}


def ledger(root: Path) -> Sweep:
    (found,) = sweeps_in(root)
    return found


def events(sweep: Sweep, kind: str) -> list[dict[str, Any]]:
    logs = [sweep.log(group) for group in range(len(sweep.groups))]
    return [event for log in logs for event in log.events if event["event"] == kind]


@pytest.mark.parametrize(
    ("launcher", "jobs", "kills"),
    [
        pytest.param("joblib", 2, False, marks=pytest.mark.slow),
        *(pytest.param(one, 2, True, marks=pytest.mark.slow) for one in ("joblib", "submitit_local")),
        pytest.param("ray", 12, True, marks=pytest.mark.slow),
    ],
)
def test_a_launchers_sweep_equals_that_of_one_process_though_a_worker_is_killed(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mortal: str, launcher: str, jobs: int, kills: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # which are not there: the jobs run on the CPU
    here, there = (f"results.root={tmp_path / name}" for name in ("here", "there"))
    grid = ("-m", f"--config-dir={mortal}", "method=mortal", "method.grief=none,once", "task.depths=2")
    grid += (f"budget={','.join(f'0.{tenths}' for tenths in range(1, 1 + jobs // 2))}",)
    (tmp_path / "was-here").touch()  # nobody is killed here
    assert cli(here, *grid)[0] == 0
    if kills:
        (tmp_path / "was-here").unlink()
    code, out, err = cli(there, *grid, f"hydra/launcher={launcher}", "workers=2")
    assert code == 0, err
    assert f"{jobs} jobs, 2 workers" in err
    assert "mortal" in out  # the table
    assert runs(tmp_path / "here") == runs(tmp_path / "there")
    assert len(runs(tmp_path / "there")) == jobs + 1  # and Full, once
    sweep = ledger(tmp_path / "there")
    assert sorted(event["job"] for event in events(sweep, "ended")) == list(range(jobs))  # each once
    assert kills <= len(events(sweep, "killed")) <= 2 * kills  # joblib takes the other worker down, too
    started = events(sweep, "started")
    assert len({event["pid"] for event in started}) > kills
    assert launcher == "ray" or {event["gpu"] for event in started} <= {"5", "7"}
    assert status([str(tmp_path / "there")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "ray", "submitit_local"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda sent: sent.name)
def test_workers_stop_with_their_command_and_leave_what_they_had(
    tmp_path: Path, mortal: str, launcher: str, sent: signal.Signals
) -> None:
    arguments = [*MODEL_ARGS, *TASK_ARGS, f"results.root={tmp_path / 'runs'}", "-m", f"--config-dir={mortal}"]
    arguments += ["method=mortal", "budget=0.2,0.4", "task.depths=2", "baseline=off"]
    arguments += ["method.grief=waits", f"hydra/launcher={launcher}", "workers=2"]
    waiting = [sys.executable, "-m", "harness", *arguments]
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    environment = os.environ | {"PYTHONPATH": path}
    process = subprocess.Popen(
        waiting, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=from_a_terminal,
    )  # fmt: skip
    while not (tmp_path / "was-here").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.2)
    beyond = reachable(process.pid)
    process.send_signal(sent)
    _, err = process.communicate()
    assert beyond == set()
    sweep = ledger(tmp_path / "runs")
    while any(sweep.is_running(group) for group in range(len(sweep.groups))):
        time.sleep(0.2)
    if sent != signal.SIGKILL:
        assert process.returncode == 128 + sent, err
        assert f"{WORDS[sent]}; to go on: python -m harness" in err
        assert {event["reason"] for event in events(sweep, "ended")} == {"interrupted"}  # no worker was killed
        for file in tmp_path.glob("runs/*/run.json"):
            assert read_json(file)["status"] == "interrupted"
    assert status([str(tmp_path / "runs")]) == 3
