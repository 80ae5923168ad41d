"""Conversations whose caches are stored between turns say what they say with a cache that stays, for every method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cachedattention.store.fingerprint import Fingerprint
from harness.cachedattention.store.history_store import HistoryStore
from harness.cachedattention.turns.caches import CachesBetweenTurns, DevicePrefix, ResumedCache
from harness.cachedattention.turns.stored import StoredCaches
from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from methods.base import Budget
from methods.full import Full
from methods.tiers.codec import IntCodec
from methods.tiers.codecs import codec_of
from tests.methods.test_contract import attach, small, walked
from tests.tiny import prompt, tiny

PRINT = Fingerprint(model="tiny", weights="7", tokenizer="ids", rotary="default", dtype="fp32")
LENGTHS, NEW, CAPACITY = (61, 26, 3, 17), 6, 150
MB = 10**6
TIERS = {"host": {"host": 9 * MB}, "disk": {"disk": 9 * MB}}


class Talk:
    """A conversation of one session; each turn is as long as `LENGTHS` says, unless its ids are given."""

    def __init__(
        self,
        kv: Attachment,
        histories: CachesBetweenTurns,
        capacity: int = CAPACITY,
        new: int = NEW,
        session: str = "alice",
    ) -> None:
        self.engine, self.caches, self.capacity, self.new = Engine(kv), histories, capacity, new
        self.session = session
        self.device = self.engine.model.device
        self.fed: list[int] = []
        self.said: list[int] = []  # by all turns
        self.found: list[ResumedCache] = []

    def turn(self, ids: Sequence[int]) -> None:
        text = [*self.fed, *self.said[-1:], *ids]
        found = self.caches.resume(self.session, text[:-1], self.capacity)
        found, logits = self.caches.compute(found, text, self.prefill)
        self.caches.save_ahead(self.session, text, found.cache)
        nothing = torch.empty(1, 0, dtype=torch.long, device=self.device)
        [said] = self.engine.complete(found.cache, logits, nothing, began=0.0, max_new_tokens=self.new).tokens
        self.fed, self.said = [*text, *said[:-1]], [*self.said, *said]
        self.found.append(replace(found, cache=None))  # type: ignore[arg-type]
        self.caches.save(self.session, self.fed, found.cache)

    def prefill(self, cache: KVCache, ids: Sequence[int]) -> torch.Tensor:
        return self.engine.prefill(cache, torch.tensor([list(ids)], device=self.device))

    def turns(self, lengths: Sequence[int] = LENGTHS) -> Talk:
        for length in lengths:
            self.turn(prompt(length, seed=len(self.found))[0].tolist())
        return self


def stored(kv: Attachment, folder: Path | None = None, **settings: Any) -> StoredCaches:
    store = HistoryStore(PRINT, folder=folder, block_tokens=8, **settings)
    return StoredCaches(lambda capacity: kv.start(KVCache, capacity=capacity), kv, store)


@contextmanager
def plain(kv: Attachment, kind: type[CachesBetweenTurns]) -> Iterator[CachesBetweenTurns]:
    histories = kind(lambda capacity: kv.start(KVCache, capacity=capacity))
    yield histories
    histories.close()


def lasting(kv: Attachment) -> Talk:
    with plain(kv, DevicePrefix) as histories:
        return Talk(kv, histories).turns()


@pytest.mark.tokens
@walked
def test_a_stored_history_gives_the_tokens_of_a_cache_that_stayed(name: str) -> None:
    with attach(small(name), 0.4) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, host=9 * MB)).turns()
    assert talk.said == wanted.said
    assert [found.tier for found in talk.found] == [None, "host", "host", "host"]
    assert [found.reused for found in talk.found] == [found.reused for found in wanted.found]
    assert talk.found[1].reused == LENGTHS[0] + NEW - 1


@pytest.mark.tokens
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("pqcache", {"placement": "disk", "codec": IntCodec(bits=4, group=16)}),
        ("infinigen", {"placement": "host", "reuse_steps": 2}),
        ("snapkv", {"codec": IntCodec(bits=4, group=16)}),
        ("adakv", {"codec": codec_of("tq3")}),
        ("h2o", {"budget": Budget(0.4, generated=4)}),
        ("full", {"placement": "host"}),
    ],
)
def test_so_it_does_wherever_and_however_its_tokens_lie(name: str, how: dict[str, Any]) -> None:
    method = replace(small(name), offload=True) if name == "full" else small(name)  # type: ignore[call-arg]
    with attached(tiny("llama"), method, **{"budget": 0.4, "calibration": prompt(64, seed=9)} | how) as kv:
        wanted, talk = lasting(kv), Talk(kv, stored(kv, host=9 * MB)).turns()
    assert talk.said == wanted.said
    assert [found.tier for found in talk.found[1:]] == ["host"] * 3


@pytest.mark.tokens
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_full_says_what_it_says_over_the_whole_text(tier: str, architecture: str, tmp_path: Path) -> None:
    """Gemma's layers that slide are a rest beside the rows of the others."""
    with attach(Full(), None, architecture) as kv, plain(kv, CachesBetweenTurns) as recompute:
        folder = tmp_path if tier == "disk" else None
        wanted, talk = Talk(kv, recompute).turns(), Talk(kv, stored(kv, folder, **TIERS[tier])).turns()
    assert talk.said == wanted.said
    assert [found.reused for found in wanted.found] == [0] * 4
    assert [found.tier for found in talk.found] == [None, *[tier] * 3]
    assert talk.found[-1].reused == len(talk.fed) - LENGTHS[-1] - NEW


@pytest.mark.tokens
@pytest.mark.parametrize(("name", "reused"), [("full", 56), ("snapkv", 0)])
def test_a_text_that_goes_on_otherwise(name: str, reused: int) -> None:
    """Rows of its beginning, in whole blocks, serve Full; what was kept of the whole serves nothing but the whole."""
    with attach(small(name), 0.4) as kv, plain(kv, CachesBetweenTurns) as recompute:
        histories = stored(kv, host=9 * MB)
        Talk(kv, histories).turns(LENGTHS[:2])
        first = prompt(LENGTHS[0])[0].tolist()
        other = [*first[:60], 5, 6]
        talk, wanted = Talk(kv, histories), Talk(kv, recompute)
        for one in (talk, wanted):
            one.turn(other)
            one.turn(other[:9])
    assert [found.reused for found in talk.found] == [reused, len(other) + NEW - 1]
    if name == "full":
        assert talk.said == wanted.said
    else:
        assert talk.said[:NEW] == wanted.said[:NEW]
