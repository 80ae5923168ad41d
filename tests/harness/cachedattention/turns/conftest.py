"""Stores of histories are closed behind each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.cachedattention.store.history_store import HistoryStore


@pytest.fixture(autouse=True)
def _stores_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that stays open leaves its threads and files to the tests behind it, some of which count theirs."""
    opened, really = list[HistoryStore](), HistoryStore.__init__

    def noting(store: HistoryStore, *given: Any, **named: Any) -> None:
        really(store, *given, **named)
        opened.append(store)

    monkeypatch.setattr(HistoryStore, "__init__", noting)
    yield
    for store in opened:
        store.close()
