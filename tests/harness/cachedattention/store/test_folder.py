"""Folders that a store cannot use."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from harness.cachedattention.store.disk import HistoryError, check_folder
from harness.cachedattention.store.fingerprint import Fingerprint
from harness.cachedattention.store.history_store import HistoryStore

WHO = Fingerprint(model="toy", weights="1", tokenizer="bytes", rotary="none", dtype="float32")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(HistoryError, match=str(file)):
        HistoryStore(WHO, disk=1000, folder=file)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"host": -1}, "host=-1"),
        ({"host": "8GB"}, "host='8GB'"),
        ({"host": 1, "block_tokens": 0}, "block_tokens=0"),
        ({"host": 1, "ttl_s": float("nan")}, "ttl_s=nan"),
        ({"host": 1, "policy": "lru"}, "policy='lru'"),
        ({"disk": 1000}, "disk"),
        ({"host": 1, "tape": 5}, "tape"),
    ],
    ids=str,
)
def test_what_no_store_can_be_made_of_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(HistoryError, match=re.escape(said)):
        HistoryStore(WHO, **given)


def test_a_folder_is_checked_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    check_folder(tmp_path / "new" / "newer")
    for bad in (file, file / "in it"):
        with pytest.raises(HistoryError, match=re.escape(str(file))):
            check_folder(bad)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    with pytest.raises(HistoryError, match=re.escape(str(tmp_path))):
        check_folder(tmp_path / "new")
    assert not (tmp_path / "new").exists()
