"""Processes that start at once: forked from one that has imported torch and the harness, each with an end of its own.

What such a process does to itself (a kill, a lock, an exit code) is as real as in an interpreter that a user starts. A
test of what is imported, and from where, starts a fresh interpreter in its place.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

import pytest

ROOT = Path(__file__).parents[1]
PRELOAD = [
    "harness.__main__", "harness.commands.run", "harness.jobs.evaluate", "harness.reports.document", "tests.fast",
    "tests.forks", "tests.warm",
]  # fmt: skip
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


class Forked:
    """`target(*arguments)`, a function of a module, in a process of its own; `path` comes first in its sys.path."""

    def __init__(
        self, target: Callable[..., object], *arguments: Any, cwd: Path = ROOT, path: Sequence[Path] = ()
    ) -> None:
        kept = Path(mkdtemp())
        finalize(self, rmtree, kept, ignore_errors=True)
        self._said = [kept / name for name in ("out", "err")]
        for file in self._said:
            file.touch()
        words = (target, arguments, cwd, [*map(str, path), *sys.path], self._said)
        self.process: ForkServerProcess = _context.Process(target=_run, args=words, daemon=True)
        with pytest.MonkeyPatch.context() as patch:  # the first one starts the server, which imports from here
            patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
            self.process.start()

    @property
    def out(self) -> str:
        return self._said[0].read_text()

    @property
    def err(self) -> str:
        return self._said[1].read_text()

    def wait(self) -> int:
        """Its exit code; negative for a signal."""
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode


def module(name: str, *words: str) -> None:
    """`python -m NAME WORDS`."""
    sys.argv = [name, *words]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def script(text: str) -> None:
    """`python -c TEXT`."""
    exec(compile(text, "<script>", "exec"), {"__name__": "__main__"})


def _run(
    target: Callable[..., object], arguments: tuple[Any, ...], cwd: Path, path: list[str], said: list[Path]
) -> None:
    os.chdir(cwd)
    sys.path[:] = path
    for stream, file in zip((1, 2), said, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream)
    os.fsync = lambda fd: None  # as in tests/conftest.py
    code: Any = 0
    try:
        target(*arguments)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the server's own cleaning up is not for its forks
