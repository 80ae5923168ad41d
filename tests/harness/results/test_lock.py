"""A folder is refused to the second who would write it, and to nobody because of who only looks."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.results import lock
from harness.results.lock import NAME, TRIES, FolderInUse, FolderLock, is_locked


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is done in each pause of who tries for a lock, one after the other."""
    coming = list[Callable[[], object]]()
    monkeypatch.setattr(lock.time, "sleep", lambda _: coming.pop(0)())
    return coming


def nothing() -> None:
    pass


def test_who_looks_for_long_is_waited_for(tmp_path: Path, pauses: list[Callable[[], object]]) -> None:
    """As a report does that a busy machine has stopped."""
    (tmp_path / NAME).touch()
    with open(tmp_path / NAME, "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        pauses += [*[nothing] * 10 * TRIES, looking.close]
        held = FolderLock(tmp_path)
    assert (pauses, is_locked(tmp_path)) == ([], True)
    held.release()


def test_who_looks_for_ever_is_not(
    tmp_path: Path, pauses: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).touch()
    monkeypatch.setattr(lock, "LOOKS_S", -1.0)
    with open(tmp_path / NAME, "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        with pytest.raises(FolderInUse):
            FolderLock(tmp_path)
    assert pauses == []
    FolderLock(tmp_path).release()


def test_who_writes_is_not_waited_for_but_for_its_end(tmp_path: Path, pauses: list[Callable[[], object]]) -> None:
    first = FolderLock(tmp_path)
    pauses += [nothing] * (TRIES - 1)
    with pytest.raises(FolderInUse, match="is being written by process"):
        FolderLock(tmp_path)
    assert pauses == []
    pauses += [nothing, first.release]
    FolderLock(tmp_path).release()
