"""Folders that a store cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.history.disk import HistoryError
from harness.history.fingerprint import Fingerprint
from harness.history.store import HistoryStore

WHO = Fingerprint(model="toy", weights="1", tokenizer="bytes", rotary="none", dtype="float32")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(HistoryError, match=f"cannot use {file}.*name another folder"):
        HistoryStore(WHO, disk=1000, folder=file)
