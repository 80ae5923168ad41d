"""Temporary files and folders outlive no process: killed at any step, it leaves what the next one removes."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest

from kernels import temporary
from kernels.temporary import TemporaryFolder, remove_abandoned, replacing
from tests.abandoned import abandoned


def a_folder(parent: Path) -> None:
    with TemporaryFolder("kv-history-", parent) as folder:
        (folder / "blocks").mkdir()
        for path in (folder / "rows", folder / "blocks" / "a"):
            path.write_bytes(b"x")


def a_file(parent: Path) -> None:
    with replacing(parent / "run.json") as file:
        file.write(b"new")


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


def test_what_others_have_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in (".run.json.0123456789ab", ".run.json.4711", "kv-x.rows")]
    for file in files:
        file.touch()
    gone, target = abandoned(tmp_path), tmp_path / "target"
    gone.rename(target)
    gone.symlink_to(target)
    there = {*tmp_path.rglob("*")}
    remove_abandoned(tmp_path)
    assert {*tmp_path.rglob("*")} == there
    left = abandoned(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    remove_abandoned(tmp_path)
    assert left.exists()


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
