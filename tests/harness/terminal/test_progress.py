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

from harness.terminal.notices import BUILDING, say_once, tell_of_builds
from harness.terminal.progress import EVERY_S, numbered, progress
from kernels.cpu.ffi import library

Cli = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[3]


def told(err: str) -> list[str]:
    return [line for line in err.splitlines() if ": new: " in line or "reused" in line or "resumed" in line]


def test_a_run_names_its_folder_and_a_repetition_says_that_it_is_reused(cli: Cli, tmp_path: Path) -> None:
    first = told(cli("method=streaming")[2])
    (folder,) = (tmp_path / "runs").glob("niah-streaming-*")
    assert [line.split(": ")[:2] for line in first] == [["niah full", "new"], ["niah streaming 20%", "new"]]
    assert first[1].endswith(str(folder))
    again = told(cli("method=streaming")[2])
    assert [line.split(": ")[1] for line in again] == ["finished, reused"] * 2


def test_a_run_that_goes_on_says_from_where(cli: Cli, tmp_path: Path) -> None:
    cli("method=streaming", "baseline=off")
    (folder,) = (tmp_path / "runs").glob("niah-streaming-*")
    lines = (folder / "examples.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "examples.jsonl").write_bytes(b"".join(lines[:3]))
    (line,) = told(cli("method=streaming", "baseline=off")[2])
    assert "resumed, 3 of 4" in line


def test_in_a_sweep_jobs_are_counted_and_each_label_is_its_own(cli: Cli) -> None:
    lines = told(cli("-m", "method=streaming", "method.sinks=4,8", "budget=0.2,0.4", "baseline=off")[2])
    labels = ["streaming 20%", "streaming 40%", "streaming sinks=8 20%", "streaming sinks=8 40%"]
    told_of = [line.partition(": ")[0] for line in lines]
    assert told_of == [f"job {number}/4 niah {label}" for number, label in enumerate(labels, 1)]


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


def test_a_log_has_no_carriage_returns(cli: Cli) -> None:
    code, out, err = cli("method=streaming", "baseline=off")
    assert code == 0
    assert "\r" not in out + err
    assert "4/4 examples" in err


def test_version_is_ours(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli("--version")
    assert code == 0
    assert out.startswith("kv-harness 0.")


def test_tab_completion_in_bash(tmp_path: Path) -> None:
    """As pip installs the command: `eval "$(kv-harness -sc install=bash)"`, then tabs."""
    command = tmp_path / "kv-harness"
    command.write_text(f"#!{sys.executable}\nimport sys\nfrom harness.__main__ import main\nsys.exit(main())\n")
    command.chmod(0o755)
    script = """
        eval "$(kv-harness -sc install=bash)"
        for word in meth method=sh method=pqcache\\ task=niah_s; do
            COMP_LINE="kv-harness $word"; COMP_POINT=${#COMP_LINE}; words=($COMP_LINE); COMP_CWORD=$((${#words[@]} - 1))
            hydra_bash_completion; echo "${COMPREPLY[@]}"
        done
    """
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, cwd=ROOT)
    groups, methods, tasks = (line.split() for line in done.stdout.splitlines())
    assert groups == ["method.", "method="], done.stderr
    assert "method=shadowkv" in methods
    assert tasks == ["task=niah_shadowkv"]


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


GONE = [  # after so many writes
    (BrokenPipeError(errno.EPIPE, "Broken pipe"), 3),
    (OSError(errno.EIO, "Input/output error"), 5),
    (ValueError("I/O operation on closed file."), 0),
]


@pytest.mark.parametrize(("error", "lines"), GONE, ids=["a pipe", "a terminal", "closed"])
def test_a_run_is_complete_whoever_reads_along(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, lines: int
) -> None:
    with monkeypatch.context() as patched:
        for name in ("stdout", "stderr"):
            patched.setattr(sys, name, _Gone(error, lines))
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


def test_kernels_that_are_built_are_announced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        compiler = library._compiler()
    except ImportError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path))
    say_once.cache_clear()
    tell_of_builds()
    tell_of_builds()
    for name in ("one", "two"):
        built = library._build(library.SOURCES / "team.cpp", "", name, compiler)
        assert built.is_file()
    assert capfd.readouterr().err == f"note: {BUILDING}.\n"
    built.write_bytes(b"")
    assert library._cached("two") is None
    assert f"{built} is damaged" in capfd.readouterr().err


def test_a_command_without_streams_runs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        for name in ("stdout", "stderr"):
            patched.setattr(sys, name, None)
        code, *_ = cli("method=streaming", "task.depths=1", "baseline=off")
    assert code == 0
