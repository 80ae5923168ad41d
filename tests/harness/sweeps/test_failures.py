"""What goes wrong in one job of a sweep: it is written down, and the others go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.commands.status import main as status
from tests.quick import mostly_slow

Cli = Callable[..., tuple[int, str, str]]


def test_out_of_memory_is_written_down_with_what_helps(
    cli: Cli, tmp_path: Path, mortal: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = ("-m", f"--config-dir={mortal}", "method=mortal", "method.grief=memory,none", "baseline=off")
    code, out, err = cli(*sweep)
    assert code == 1
    assert "error: Out of memory (CUDA out of memory" in err
    assert "mortal" in out  # the other one's row
    assert status([str(tmp_path / "runs"), "--json"]) == 1
    (part,) = json.loads(capfd.readouterr().out)
    failed, done = part["jobs"]
    assert (failed["label"], failed["status"], done["status"]) == ("method.grief=memory", "failed", "done")
    assert "prefill_chunk=2048" in failed["reason"]
    (log,) = (tmp_path / "runs" / "sweeps").glob("*/group-001/log.jsonl")
    assert json.loads(log.read_text().splitlines()[-1])["memory"] is True


def test_a_job_that_could_not_be_planned_has_no_folder_and_a_reason(
    cli: Cli, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cli("-m", "method=streaming", "budget=0.2,-1", "baseline=off")
    assert status([str(tmp_path / "runs")]) == 1
    out = capfd.readouterr().out
    assert "1 done, 1 failed" in out
    assert "2: budget=-1 is neither a share of the prompt" in out


@pytest.mark.slow
def test_a_job_whose_full_failed_is_not_done(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from methods.full import Full

    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA out of memory.")

    with monkeypatch.context() as broken:
        broken.setattr(Full, "start", refuse)
        code, _, err = cli("-m", "method=streaming", "budget=0.2,0.4")
    assert code == 1
    assert err.count("error: Out of memory") == 1  # of both jobs
    assert status([str(tmp_path / "runs")]) == 1
    assert cli("-m", "method=streaming", "budget=0.2,0.4")[0] == 0
    assert status([str(tmp_path / "runs")]) == 0


@pytest.mark.parametrize("shared", mostly_slow(["false", "true"], "true"))
def test_a_deleted_run_is_to_do_again(cli: Cli, tmp_path: Path, shared: str) -> None:
    sweep = ("-m", "method=streaming", "budget=0.2,0.4", "baseline=off", f"shared_prefill={shared}")
    assert cli(*sweep)[0] == 0
    folder = next((tmp_path / "runs").glob("niah-streaming-*"))
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert status([str(tmp_path / "runs")]) == 3
    assert cli(*sweep)[0] == 0
    assert status([str(tmp_path / "runs")]) == 0
