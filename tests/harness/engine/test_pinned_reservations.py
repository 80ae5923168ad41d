"""Host memory is there before a prompt's clock starts: no prompt, seal or step takes more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.footprint import footprint
from methods.abilities.kept_codec import KeptCodec
from methods.base import Budget, Method
from methods.tiers.codec import IntCodec
from methods.tiers.pinned_memory import PinnedMemory
from methods.tiers.rows import HostRows
from methods.tiers.transfer import TransferEngine
from tests.methods.test_contract import small
from tests.tiny import prompt, tiny

NAMES = ["full_offloaded", "infinigen", "infllm", "pqcache", "quest", "rocketkv", "shadowkv", "sparq", "kivi"]


def method_of(name: str) -> Method:
    method = small(name)
    return replace(method, group=16, residual=32) if name == "kivi" else method  # type: ignore[call-arg]


class Watched:
    """Stands in for pinned memory, and counts the rows that have to take other memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.places = list[range]()
        self.within, self.elsewhere = 0, list[tuple[int, ...]]()
        room = HostRows.room

        def counted(shape: tuple[int, ...], *how: Any) -> Tensor:
            x = room(shape, *how)
            if x.nbytes and any(x.data_ptr() in place for place in self.places):
                self.within += 1
            elif x.nbytes:
                self.elsewhere.append(shape)
            return x

        patch.setattr(HostRows, "room", staticmethod(counted))

    def pin(self, memory: Tensor) -> Callable[[], None]:
        place = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        self.places.append(place)
        return lambda: self.places.remove(place)


@torch.inference_mode()
def turns(kv: Attachment, pinned_memory: PinnedMemory | None) -> list[int]:
    """Tokens of three turns, the prompts in two chunks, and then of another conversation."""
    kv.engine = TransferEngine(threads=1, works=True, pinned_memory=pinned_memory)
    engine, tokens = Engine(kv, prefill_chunk=40), []
    for lengths in ((61, 23, 30), (50,)):
        cache = kv.start(KVCache, capacity=140)
        for seed, length in enumerate(lengths):
            cache.open_turn()
            logits = engine.prefill(cache, prompt(length, seed=seed), whole=True)
            cache.seal()
            for _ in range(5):
                logits = engine.run(logits.argmax(-1, keepdim=True), cache)
                tokens.append(int(logits.argmax()))
        del cache
    return tokens


@pytest.mark.parametrize(
    ("name", "codec"),
    [(name, None) for name in NAMES]
    + [(name, IntCodec(bits=4, group=8)) for name in NAMES if not KeptCodec.refusal(small(name))],
)
def test_all_rows_lie_in_memory_that_was_there_before(
    name: str, codec: IntCodec | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = method_of(name)
    with attached(
        tiny("llama"), method, budget=0.4 if method.uses_budget else None, placement="host",
        calibration=prompt(64, seed=9), codec=codec,
    ) as kv:  # fmt: skip
        plain = turns(kv, None)
        watched = Watched(monkeypatch)
        pinned_memory = PinnedMemory(watched.pin)
        assert turns(kv, pinned_memory) == plain
        assert (watched.elsewhere, len(watched.places)) == ([], 1)
        assert watched.within > 0
    assert not watched.places


@pytest.mark.parametrize("budget", [0.4, Budget(1.0, mass=0.8)], ids=str)
def test_a_batch_shares_no_memory_and_a_cache_that_grows_takes_its_own(
    budget: float | Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    with attached(tiny("llama"), small("quest"), budget=budget, placement="host") as kv:
        kv.engine = TransferEngine(pinned_memory=PinnedMemory(watched.pin))
        caches = [kv.start(KVCache, capacity=100, batch=2) for _ in range(2)]
        assert len(watched.places) == 2
        Engine(kv).generate(prompt(80), max_new_tokens=3)
        assert len(watched.places) == 3
        assert kv.start(KVCache, capacity=100, grows=True).state.request.reservation is None
        held = [footprint(cache.layers)["host"] for cache in caches]
        assert held == [len(place) for place in watched.places[:2]]
        del caches
    assert not watched.places
