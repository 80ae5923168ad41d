"""A store's rows lie in memory that was pinned before a clock ran: no prefill, seal, step or save pins any."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from harness.cachedattention.store.disk import HistoryWarning
from harness.cachedattention.turns.stored import StoredCaches
from harness.engine.attach import Attachment
from methods.full import Full
from methods.tiers.pinned_memory import PinnedMemory
from methods.tiers.transfer import TransferEngine
from tests.harness.cachedattention.turns.test_caches import CAPACITY, LENGTHS, MB, Talk, lasting, stored
from tests.harness.engine.test_pinned_reservations import Watched
from tests.methods.test_contract import attach, small

BYTES = 4 * 2 * 32 * 4  # of a token of the tiny model, more than enough


def watched(kv: Attachment, monkeypatch: pytest.MonkeyPatch) -> Watched:
    seen = Watched(monkeypatch)
    kv.engine = TransferEngine(threads=1, works=True, pinned_memory=PinnedMemory(seen.pin))
    return seen


def in_memory(histories: StoredCaches) -> list[Tensor]:
    blocks = [block for parts in histories.store.contents.blocks.values() for block in parts]
    return [x for block in blocks for x in (block.rows or {}).values()]


@pytest.mark.tokens
@pytest.mark.parametrize(("name", "tier", "threads"), [("full", "host", 0), ("full", "disk", 2), ("h2o", "disk", 2)])
def test_turns_pin_nothing(name: str, tier: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a thread reads from disk, and those of a method that stores its whole state, too."""
    with attach(small(name), None if name == "full" else 0.4) as kv:
        wanted, seen = lasting(kv), watched(kv, monkeypatch)
        how: dict[str, Any] = {"host": 9 * MB} if tier == "host" else {"disk": 9 * MB, "folder": tmp_path}
        histories = stored(kv, engine=kv.engine, threads=threads, **how)
        histories.expect(CAPACITY * BYTES)
        talk, [pinned] = Talk(kv, histories), list(seen.places)
        seen.within, seen.elsewhere = 0, []
        for _ in LENGTHS:
            talk.turns(LENGTHS[len(talk.found) : len(talk.found) + 1])
            assert seen.places == [pinned]
            assert all(x.data_ptr() in pinned for x in in_memory(histories) if x.nbytes)
        assert talk.said == wanted.said
        assert [found.tier for found in talk.found[1:]] == [tier] * 3
        assert seen.within > 0
        assert seen.elsewhere == []
        histories.close()
        gc.collect()
    assert not seen.places


@pytest.mark.tokens
def test_memory_that_cannot_be_pinned_is_said_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(memory: Tensor) -> Any:
        raise RuntimeError("out of lockable memory")

    with attach(Full(), None) as kv:
        kv.engine = TransferEngine(pinned_memory=PinnedMemory(refuses))
        wanted, histories = lasting(kv), stored(kv, engine=kv.engine, host=9 * MB)
        with pytest.warns(HistoryWarning, match="lockable"):
            histories.expect(MB)
        assert Talk(kv, histories).turns().said == wanted.said
        histories.close()
