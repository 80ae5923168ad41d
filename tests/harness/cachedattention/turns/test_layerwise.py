"""A turn begins while the layers of its history are on their way: each is waited for when it is used."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from harness.cachedattention.store.block import BlockFile
from harness.engine.cache import KVCache
from methods.base import AttnInput
from methods.full import Full
from methods.tiers.rows import Place
from tests.harness.cachedattention.turns.test_caches import LENGTHS, MB, NEW, Talk, lasting, stored
from tests.methods.test_contract import attach
from tests.tiny import prompt


@pytest.mark.tokens
def test_the_prefill_begins_before_the_last_layer_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(Full(), None) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, tmp_path, disk=9 * MB))
        histories: Any = talk.caches
        talk.turns(LENGTHS[:1])
        histories.store.flush()
        read, go = BlockFile.read, Event()

        def last_waits(file: BlockFile, names: list[str], place: Place) -> Any:
            assert not names[0].startswith(f"{len(kv.model_specs) - 1}.") or go.wait(600)
            return read(file, names, place)

        prefill = KVCache.attend

        def first_lets_go(cache: KVCache, layer: int, x: AttnInput) -> torch.Tensor:
            out = prefill(cache, layer, x)
            go.set()
            return out

        monkeypatch.setattr(BlockFile, "read", last_waits)
        monkeypatch.setattr(KVCache, "attend", first_lets_go)
        talk.turns(LENGTHS[1:])
        assert talk.said == wanted.said
        assert [found.tier for found in talk.found] == [None, "disk", "disk", "disk"]
        told = histories.store.statistics
        assert told.load_s >= told.hidden_s >= 0
        assert sum(found.hidden_s for found in talk.found) == pytest.approx(told.hidden_s)
        assert sum(found.load_s for found in talk.found) > told.exposed_s > 0
        histories.close()


@pytest.mark.tokens
def test_what_was_loaded_ahead_is_what_the_next_turn_takes() -> None:
    with attach(Full(), None) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, host=9 * MB))
        histories: Any = talk.caches
        for number, length in enumerate(LENGTHS):
            ids = prompt(length, seed=number)[0].tolist()
            text = [*talk.fed, *talk.said[-1:], *ids]
            histories.ahead("alice", text[:-1] if number != 2 else text[:5])  # the third time it guesses wrong
            histories.ahead("alice", text[:-1])
            talk.turn(ids)
        assert talk.said == wanted.said
        assert histories.store.statistics.lookups == len(LENGTHS) + 1
        assert [found.reused for found in talk.found][1:] == [
            LENGTHS[0] + NEW - 1,
            *[f.reused for f in wanted.found][2:],
        ]
        assert not histories._ahead
