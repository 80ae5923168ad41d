"""PQCache's cache of blocks: it must change what is moved and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.checks.trial import turn
from harness.engine.attach import attached
from kernels.reference import Segment
from methods.base import CacheState, Request
from methods.parts.block_cache import BlockCache
from methods.pools import Pool
from methods.pqcache import PQCache
from tests.fast import PQ
from tests.methods.test_contract import assert_same
from tests.tiny import prompt, tiny

BATCH, GROUPS, LENGTH, DIM, SIZE = 2, 2, 61, 16, 8  # the eighth block holds 5 tokens
ROW = 2 * DIM * 4  # bytes of K and V of a token
CACHED = replace(PQ, cache_tokens=40, cache_block=8, cache_offered=2)


def cache_of(slots: int, offered: int) -> tuple[BlockCache, Pool, Segment]:
    with attached(tiny("llama"), PQ, budget=0.4) as kv:
        spec, device = kv.specs[0], torch.device("cpu")
    request = Request(batch=BATCH, capacity=LENGTH, dtype=torch.float32, device=device, placement="host")
    store = Pool(spec, CacheState(request), LENGTH)
    tokens = Segment(torch.randn(BATCH, GROUPS, LENGTH, DIM), torch.randn(BATCH, GROUPS, LENGTH, DIM))
    store.append(tokens.k, tokens.v)
    return BlockCache(store, tokens, size=SIZE, slots=slots, offered=offered), store, tokens


class Lfu:
    """The rule in words: one sequence."""

    def __init__(self, blocks: int, slots: int, offered: int) -> None:
        self.offered, self.step = offered, 0
        self.held = {block: (0, 0) for block in range(blocks - slots, blocks)}  # uses, last use

    def look_up(self, chosen: list[int]) -> tuple[int, int]:
        """-> chosen tokens that are held, blocks brought in"""
        found = sum(block in self.held for block in chosen)
        self.step += 1
        offers = [block for block, _ in Counter(chosen).most_common(self.offered)]
        new = [block for block in offers if block not in self.held]
        for block in set(offers) - set(new):
            self.held[block] = (self.held[block][0] + 1, self.step)
        for _ in new:
            del self.held[min(self.held, key=lambda block: (*self.held[block], block))]
        self.held |= dict.fromkeys(new, (1, self.step))
        return found, len(new)


def skewed(step: int) -> Tensor:
    """Rows [B G 12] without repeats, more of some blocks than of others, and no two blocks with equal counts."""
    draw = torch.Generator().manual_seed(step)
    made = torch.empty(BATCH, GROUPS, 12, dtype=torch.int64)
    for b in range(BATCH):
        first, second, third = torch.randperm(8, generator=draw)[:3].tolist()
        for g in range(GROUPS):
            in_blocks = [(first, 5), (second, 4), (third, 3)]
            rows = [block * SIZE + i for block, count in in_blocks for i in range(count)]
            made[b, g] = torch.tensor(rows)
    return made


@pytest.mark.parametrize(("slots", "offered"), [(3, 1), (3, 2), (5, 3), (8, 8)])
def test_it_holds_what_the_rule_says_and_every_row_is_the_hosts(slots: int, offered: int) -> None:
    cache, store, tokens = cache_of(slots, offered)
    rules = [Lfu(8, slots, offered) for _ in range(BATCH)]
    traffic, coming = store.cache.traffic, 0
    for step in range(40):
        rows, before = skewed(step), traffic.copy()
        held = [set(rule.held) for rule in rules]
        made = cache.read(rows)
        assert [set(cache.blocks[b].tolist()) for b in range(BATCH)] == held
        for mine, host in zip(made[:2], tokens[:2], strict=True):
            assert torch.equal(mine, host.gather(2, rows.unsqueeze(-1).expand(-1, -1, -1, DIM)))
        replayed = [rule.look_up((rows[b] // SIZE).flatten().tolist()) for b, rule in enumerate(rules)]
        found = sum(one for one, _ in replayed)
        traffic.settle()
        assert traffic.found - before.found == found
        assert traffic.to_device_bytes - before.to_device_bytes == (rows.numel() - found + coming) * ROW
        coming = sum(new for _, new in replayed) * GROUPS * SIZE  # for the next step
    assert traffic.looked_up == 40 * rows.numel()


def run(method: PQCache, ids: Tensor, **how: Any) -> tuple[list[Any], Any]:
    with attached(tiny("llama"), method, budget=0.4, placement="host", **how) as kv:
        cache = kv.cache(capacity=200, batch=len(ids))
        steps = turn(kv, cache, ids, steps=12) + turn(kv, cache, prompt(20, batch=len(ids), seed=3))
        return steps, cache.layers


@pytest.mark.parametrize("changes", [{}, {"cache_tokens": 1000}, {"cache_block": 40}, {"cache_offered": 1}], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_are_those_without_it(changes: dict[str, Any], batch: int) -> None:
    ids = torch.cat([prompt(95, seed=seed) for seed in range(batch)])
    plain, _ = run(PQ, ids)
    cached, layers = run(replace(CACHED, **changes), ids)
    assert_same(cached, plain)
    traffic = layers[0].cache.traffic.settle()
    assert 0 < traffic.found <= traffic.looked_up
