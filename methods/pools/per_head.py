"""Holds keys and values of KV heads that keep different numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from methods.base import CacheState, LayerSpec
from methods.pools.device_store import KVStore


class PerHeadStore(KVStore):
    """Give every KV head of every sequence a store of its own, so that what a head does not keep
    takes no memory.

    `length` is the mean over the heads, a whole number because the tokens of all heads are a
    multiple of the heads."""

    def __init__(self, spec: LayerSpec, cache: CacheState, k: Sequence[Tensor], v: Sequence[Tensor], room: int) -> None:
        """Fill the stores. k, v: [S D] of every head, one sequence after the other. `room`: tokens
        that may follow in each."""
        self.cache, self._heads = cache, spec.num_kv_heads
        alone = CacheState(replace(cache.request, batch=1), counters=cache.counters)
        self.stores = [KVStore(replace(spec, num_kv_heads=1), alone, len(keys) + room) for keys in k]
        for store, keys, values in zip(self.stores, k, v, strict=True):
            store.append(keys[None, None], values[None, None])
        self.length = sum(store.length for store in self.stores) // len(self.stores)

    @property
    def heads(self) -> int:
        return self._heads

    @property
    def k(self) -> Tensor:
        raise TypeError("Heads that hold different numbers of tokens have no common tensor of keys.")

    @property
    def v(self) -> Tensor:
        raise TypeError("Heads that hold different numbers of tokens have no common tensor of values.")

    def per_head(self) -> list[tuple[Tensor, Tensor]]:
        return [(store.k[0, 0], store.v[0, 0]) for store in self.stores]

    def append(self, k: Tensor, v: Tensor) -> None:
        for store, keys, values in zip(self.stores, k.flatten(0, 1), v.flatten(0, 1), strict=True):
            store.append(keys[None, None], values[None, None])
        self.length += k.shape[2]

    def next_row(self) -> None:
        """Return None: heads may hold different numbers of tokens, so there is no common row."""

    def keep_of_last(self, count: int, rows: Tensor) -> None:
        for store, kept in zip(self.stores, rows.flatten(0, 1), strict=True):
            store.keep_of_last(count, kept[None, None])
        self.length -= count - rows.shape[2]

    def resize(self, room: int) -> None:
        for store in self.stores:
            store.resize(room)

    def advance(self, steps: int) -> None:
        for store in self.stores:
            store.advance(steps)
        self.length += steps

    def each(self, q: Tensor, attend: Callable[[Tensor, KVStore, int], Tensor]) -> Tensor:
        """Call `attend` for every KV head, with its own queries [1 g T D], its store and its
        number. q [B H T D] -> [B H T D]"""
        queries = q.unflatten(1, (self.heads, -1)).flatten(0, 1).split(1)
        heads = cycle(range(self.heads))
        return torch.cat([attend(*head) for head in zip(queries, self.stores, heads, strict=False)]).view(q.shape)
