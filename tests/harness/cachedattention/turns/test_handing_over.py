"""Rows that lie off the device go into a store and come back without crossing it, as they are written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.engine.attach import Attachment, attached
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.footprint import footprint
from methods.tiers.codec import IntCodec
from tests.harness.cachedattention.turns.test_caches import CAPACITY, LENGTHS, MB, NEW, stored
from tests.methods.test_contract import small
from tests.tiny import prompt, tiny

INT4 = IntCodec(bits=4, group=16)
# methods whose rows a store keeps token by token, and those whose whole state it keeps
BY_TOKEN = ("full", "pqcache", "quest", "sparq")
WHOLE = ("infinigen", "infllm", "kivi", "rocketkv", "shadowkv")
CODED = ("pqcache", "infllm")
CHANGES = {"full": {"offload": True}, "kivi": {"group": 8, "residual": 16}}  # so that something lies away


@dataclass
class Fed:
    """A conversation's first turn, answered and not yet saved."""

    cache: KVCache
    tokens: list[int]


def attach(name: str, placement: str = "host", **how: Any) -> Any:
    method: Any = replace(small(name), **CHANGES.get(name, {}))  # type: ignore[type-var]
    return attached(tiny("llama"), method, budget=0.4, placement=placement, calibration=prompt(64, seed=9), **how)


@torch.inference_mode()
def fed(kv: Attachment) -> Fed:
    engine, ids = Engine(kv), prompt(LENGTHS[0])
    cache = kv.start(KVCache, capacity=CAPACITY)
    made = engine.complete(cache, engine.prefill(cache, ids), ids[:, :0], began=0.0, max_new_tokens=NEW)
    return Fed(cache, [*ids[0].tolist(), *made.tokens[0][:-1]])


def crossed(cache: KVCache) -> int:
    """Bytes that went to the device or came from it so far."""
    return cache.traffic.total_bytes


@pytest.mark.parametrize("placement", ["host", "disk"])
@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, {}) for name in (*BY_TOKEN, *WHOLE)), *((name, {"codec": INT4}) for name in CODED)],
    ids=lambda value: value if isinstance(value, str) else "int4" if value else "plain",
)
def test_saving_moves_nothing_to_the_device(name: str, how: dict[str, Any], placement: str, tmp_path: Path) -> None:
    with attach(name, placement, disk=tmp_path, **how) as kv:
        histories, turn = stored(kv, host=9 * MB), fed(kv)
        before, held = crossed(turn.cache), footprint(turn.cache.layers)
        assert held[placement] > 0
        histories.save("alice", turn.tokens, turn.cache)
        histories.store.flush()
        assert crossed(turn.cache) == before
        assert footprint(turn.cache.layers) == held  # nothing came back to stay
        histories.close()
