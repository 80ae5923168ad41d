"""A folder is refused to the second who would write it, and to nobody because somebody looks whether it is written."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from harness.results.lock import FolderInUse, FolderLock, is_locked


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    assert is_locked(tmp_path)
    with pytest.raises(FolderInUse, match=f"is being written by process {os.getpid()} on"):
        FolderLock(tmp_path)
    first.release()
    assert not is_locked(tmp_path)
    FolderLock(tmp_path).release()


def test_who_looks_keeps_no_writer_out(tmp_path: Path) -> None:
    FolderLock(tmp_path).release()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_locked(tmp_path)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(20):
            FolderLock(tmp_path).release()
    finally:
        over.set()
        looking.join()


def test_a_folder_that_was_never_written_is_not_locked(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    assert list(tmp_path.iterdir()) == []
