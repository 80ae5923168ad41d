"""What a command says while it runs: where each run is, how far it is, what takes long."""

from __future__ import annotations

import errno
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from harness.terminal.progress import EVERY_S, numbered, progress

Cli = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[3]


def announced(err: str) -> list[str]:
    return [line for line in err.splitlines() if ": new: " in line or "reused" in line or "resumed" in line]


def test_a_run_names_its_folder_and_whether_it_is_new(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("method=streaming")
    assert code == 0
    assert "4/4 examples" in err
    assert "\r" not in out + err
    (folder,) = (tmp_path / "runs").glob("niah-streaming-*")
    first = announced(err)
    assert [line.split(": ")[:2] for line in first] == [["niah full", "new"], ["niah streaming 20%", "new"]]
    assert first[1].endswith(str(folder))
    again = announced(cli("method=streaming")[2])
    assert [line.split(": ")[1] for line in again] == ["finished, reused"] * 2
    lines = (folder / "examples.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "examples.jsonl").write_bytes(b"".join(lines[:3]))
    assert "resumed, 3 of 4" in announced(cli("method=streaming")[2])[-1]


def test_in_a_sweep_jobs_are_counted_and_each_label_is_its_own(cli: Cli) -> None:
    lines = announced(cli("-m", "method=streaming", "method.sinks=4,8", "budget=0.2,0.4", "baseline=off")[2])
    labels = ["streaming 20%", "streaming 40%", "streaming sinks=8 20%", "streaming sinks=8 40%"]
    heads = [line.partition(": ")[0] for line in lines]
    assert heads == [f"job {number}/4 niah {label}" for number, label in enumerate(labels, 1)]


def test_a_log_gets_a_line_now_and_then(capfd: pytest.CaptureFixture[str]) -> None:
    """An example takes ten seconds here; nothing of it is waited for."""
    now = [0.0]

    def records() -> Iterator[Any]:
        for _ in range(10):
            now[0] += 10
            yield SimpleNamespace(prompt_tokens=5)

    with numbered(3, 12):
        made = progress(records(), "niah full", [5] * 10, size=lambda one: one.prompt_tokens, clock=lambda: now[0])
        assert len(list(made)) == 10
    lines = capfd.readouterr().err.split("\n")
    assert EVERY_S == 30
    wanted = [f"job 3/12 niah full: {done}/10 examples, {10 * done} s" for done in (3, 6, 9, 10)]
    assert lines == [*wanted, ""]


class _Gone:
    """A stream whose reader is gone after `lines` writes, as `| head`, a dropped session and `2>&-` leave it."""

    closed = False

    def __init__(self, error: Exception, lines: int) -> None:
        self.error, self.lines = error, lines

    def write(self, text: str) -> int:
        self.lines -= 1
        if self.lines < 0:
            raise self.error
        return len(text)

    def flush(self) -> None:
        self.write("")

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("no file")


@pytest.mark.parametrize(
    "stream",
    [
        _Gone(BrokenPipeError(errno.EPIPE, "Broken pipe"), 3),
        _Gone(OSError(errno.EIO, "Input/output error"), 5),
        _Gone(ValueError("I/O operation on closed file."), 0),
        None,
    ],
    ids=["a pipe", "a terminal", "closed", "closed from the start"],
)
def test_a_run_is_complete_whoever_reads_along(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: _Gone | None
) -> None:
    with monkeypatch.context() as patched:
        for name in ("stdout", "stderr"):
            patched.setattr(sys, name, stream)
        code, *_ = cli("-m", "method=streaming,snapkv", "task.depths=1")
    assert code == 0
    status = [json.loads(file.read_text())["status"] for file in (tmp_path / "runs").glob("*/run.json")]
    assert status == ["complete"] * 3


def test_what_follows_a_reader_that_left_goes_nowhere_until_the_end() -> None:
    """Python itself would raise for its buffer on its way out."""
    script = """
        from harness.terminal.notices import lasting_output
        with lasting_output():
            for _ in range(10_000):
                print("a line of a table that nobody reads any more")
    """
    command = f"{sys.executable} -c {shlex.quote(dedent(script))} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
