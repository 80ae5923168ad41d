"""Temporary files and folders outlive no process: killed at any step, it leaves what the next one removes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kernels import temporary
from kernels.temporary import OWNER, TemporaryFolder, remove_abandoned, replacing
from tests.abandoned import abandoned
from tests.forks import Forked

STEPS = {os: ("open", "mkdir", "write", "scandir", "unlink", "rmdir", "replace", "stat", "close"), fcntl: ("flock",)}
Use = Callable[[Path], object]


def a_folder(parent: Path) -> None:
    with TemporaryFolder("kv-history-", parent) as folder:
        (folder / "blocks").mkdir()
        for path in (folder / "rows", folder / "blocks" / "a"):
            path.write_bytes(b"x")


def a_file(parent: Path) -> None:
    with replacing(parent / "run.json") as file:
        file.write(b"new")


class Step:
    """Does `act` before the `at`-th step that this process takes on the disk, once it is installed."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.at = act, 0
        for module, names in STEPS.items():
            for name in names:
                setattr(module, name, self._wrapped(getattr(module, name)))

    def _wrapped(self, really: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            self.at -= 1
            if not self.at:
                self.act()
            return really(*arguments, **named)

        return step


def killed(use: Use, parent: Path, at: int) -> bool:
    """Whether a fork is killed before its `at`-th step."""
    child = os.fork()
    if not child:
        temporary._seen.add(parent)
        Step(lambda: os.kill(os.getpid(), signal.SIGKILL)).at = at
        use(parent)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def killed_at_every_step(use: Use, parent: Path) -> None:
    leftovers = 0
    for at in count(1):
        if not killed(use, parent, at):
            break
        leftovers += bool(set(os.listdir(parent)) - {"kept", "run.json"})
        remove_abandoned(parent)
        assert set(os.listdir(parent)) <= {"kept", "run.json"}, at
    print(leftovers)


@pytest.mark.parametrize(("use", "least"), [(a_folder, 12), (a_file, 3)])
def test_what_a_kill_left_at_any_step_is_removed(tmp_path: Path, use: Use, least: int) -> None:
    (tmp_path / "kept").touch()
    process = Forked(killed_at_every_step, use, tmp_path)
    assert process.wait() == 0, process.err
    assert int(process.out) >= least
    assert (tmp_path / "kept").exists()


def held_by_another(parent: Path, said: int) -> None:
    """Two things of a process that lives until it is killed."""
    folder = TemporaryFolder("kv-history-", parent)
    with replacing(parent / "run.json") as file:
        file.write(b"half")
        os.write(said, folder.path.name.encode())
        signal.pause()


def test_another_process_keeps_what_it_holds_until_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hears, said = os.pipe()
    if not (child := os.fork()):
        held_by_another(tmp_path, said)
    os.close(said)
    name = os.read(hears, 100).decode()
    os.close(hears)
    there = set(os.listdir(tmp_path))
    assert len(there) == 2
    assert name in there
    remove_abandoned(tmp_path)
    assert set(os.listdir(tmp_path)) == there
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    monkeypatch.setattr(temporary, "_seen", set())  # as in a process that starts
    TemporaryFolder("other-", tmp_path).remove()  # whatever it makes there first
    assert os.listdir(tmp_path) == []


def test_what_others_have_made_stays_whatever_it_is_called(tmp_path: Path) -> None:
    with_rows = abandoned(tmp_path)
    (with_rows / OWNER).unlink()  # ours by its name, and yet full: nothing says that it is temporary
    another_mark = abandoned(tmp_path)
    (another_mark / OWNER).write_bytes(temporary.MARK[:-2] + b"!\n")
    another_sum = tmp_path / "kv-history-0123456789abcdef"
    abandoned(tmp_path).rename(another_sum)
    files = [tmp_path / name for name in (".run.json.0123456789abcdef", ".run.json.4711", "kv-x.rows")]
    for file in files:
        file.touch()
    target = tmp_path / "target"
    gone = abandoned(tmp_path)
    gone.rename(target)
    gone.symlink_to(target)
    there = {*tmp_path.rglob("*")}
    remove_abandoned(tmp_path)
    assert {*tmp_path.rglob("*")} == there


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    a_file(tmp_path)
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "run.json") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["run.json"]
    assert (tmp_path / "run.json").read_bytes() == b"new"


def test_without_locks_nothing_is_removed_and_all_else_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = abandoned(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refuse)
        remove_abandoned(tmp_path)
        assert left.exists()
        a_folder(tmp_path)
        a_file(tmp_path)
        assert set(os.listdir(tmp_path)) == {left.name, "run.json"}
    remove_abandoned(tmp_path)
    assert os.listdir(tmp_path) == ["run.json"]


def test_what_another_user_left_is_theirs_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = abandoned(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    remove_abandoned(tmp_path)
    assert left.exists()
