"""Holds keys and values of several sequences, each in the store of its own cache, for steps that they take together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from kernels import ops
from kernels.each import Each, each
from kernels.ragged import with_free_slots
from kernels.reference import Segment
from methods.base import CacheState
from methods.pools.near import KVStore


class StoreOfSeveral(KVStore):
    """Writes to, and reads from, the memory of `stores`. What grows is counted in `cache.counters`; the lengths of the
    stores themselves stay behind until `KVStore.advance`."""

    def __init__(self, stores: Sequence[KVStore], cache: CacheState, dead: int | None) -> None:
        """`dead`: how many slots are free, behind the sequences of the stores; None: there are no slots."""
        rows = [(k, v) for store in stores for k, v in zip(store.k_rows.split(1), store.v_rows.split(1), strict=True)]
        self._keys, self._values = (with_free_slots(side, dead=dead) for side in zip(*rows, strict=True))
        self._lengths = each([store.length for store in stores for _ in store.k_rows], dead)
        self._segments: dict[tuple[int | Each, int | Each | None], Segment] = {}
        self._heads, self.cache = stores[0].heads, cache

    @property
    def heads(self) -> int:
        return self._heads

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store one new token of each sequence. k, v [B G 1 D]"""
        rows = self.cache.counters.first(self._lengths, k.device).view(-1, 1, 1).expand(*k.shape[:3])
        ops.put_rows(self._keys, rows, k)
        ops.put_rows(self._values, rows, v)

    def count(self, more: int) -> Tensor:
        return self.cache.counters.first(self._lengths + 1 + more, self._keys.device)

    def since(self, start: int | Each) -> Segment:
        """Return the tokens from the `start`-th on, with the one that this step has stored."""
        if (start, None) not in self._segments:
            live = self.cache.counters.first(self._lengths - start + 1, self._keys.device)
            self._segments[start, None] = self.between(start, self._keys.sizes)._replace(live=live)
        return self._segments[start, None]

    def between(self, start: int | Each, end: int | Each) -> Segment:
        if (start, end) not in self._segments:
            k, v = (cast(Tensor, side.slice(start, end)) for side in (self._keys, self._values))
            self._segments[start, end] = Segment(k, v)
        return self._segments[start, end]
