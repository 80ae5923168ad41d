"""Holds keys and values of several sequences, each in the store or the pool of its own cache, for steps that they take
together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, cast

import torch
from torch import Tensor

from kernels import ops
from kernels.coded import Coded
from kernels.each import Each, each
from kernels.ragged import Ragged, filled, with_free_slots
from kernels.reference import Segment
from methods.base import CacheState, NextRow
from methods.pools.near import KVStore
from methods.pools.pool import Pool
from methods.tiers.codec import Encoded
from methods.tiers.tier import DEVICE
from methods.tiers.transfer.engine import Arrival


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
        rows = self.next_row().row.view(-1, 1, 1).expand(*k.shape[:3])
        ops.put_rows(self._keys, rows, k)
        ops.put_rows(self._values, rows, v)

    def next_row(self) -> NextRow:
        return NextRow(self._keys, self._values, self.cache.counters.first(self._lengths, self._keys.device))

    def count_written(self) -> None:
        """Leave the count to `cache.counters`."""

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


class PoolOfSeveral:
    """Reads chosen tokens out of `pools`, which lie on the device and have one codec."""

    tier: ClassVar[str] = DEVICE

    def __init__(self, pools: Sequence[Pool], cache: CacheState, dead: int | None) -> None:
        """`dead`: as in `StoreOfSeveral`."""
        rooms = [sequence for pool in pools for sequence in pool.rooms()]
        tensors = [with_free_slots(list(map(_readable, same)), dead=dead) for same in zip(*rooms, strict=True)]
        *encoded, self._tail_k, self._tail_v = (cast(Tensor, x) for x in tensors)
        tokens = len(pools[0].layout.tokens)
        self._stored, self.codec = Encoded(tuple(encoded[:tokens]), tuple(encoded[tokens:])), pools[0].codec
        counted = [pool.encoded for pool in pools for _ in range(pool.cache.request.batch)]
        self._encoded, self._tails = Each(counted, dead), tensors[-1].sizes
        self._groups, self.cache = pools[0].spec.num_kv_heads, cache

    @property
    def length(self) -> Each:
        """Return how many tokens of each sequence are codes."""
        return self._encoded

    def segments(self) -> Arrival[list[Segment | Coded]]:
        """Ask for all codes, as `Pool.segments` does where no token stands behind them."""
        return self.cache.fetch(lambda traffic: [self._coded])

    @cached_property
    def _coded(self) -> Segment | Coded:
        tokens, blocks = (
            tuple(cast(Tensor, cast(Ragged, x).slice(0, count)) for x in tensors)
            for tensors, count in zip(self._stored, (self._encoded, self._encoded // self.codec.block), strict=True)
        )
        return self.codec.segment(Encoded(tokens, blocks), self.cache.request.dtype)

    def gather(self, rows: Tensor, slots: Tensor | None = None) -> Arrival[Segment]:
        """Ask for chosen tokens as `Pool.gather` does; here none of them moves, whatever `slots` says. Sequences may
        choose different numbers of them: the segment is filled up then, and its `live` says how many are there."""
        return self.cache.fetch(lambda traffic: self._decoded(rows))

    def _decoded(self, rows: Tensor) -> Segment:
        """Read every row as a code and as one behind the codes, each time one that is there, and take what it is."""
        chosen = filled(rows)
        by_group = chosen.reshape(len(chosen), self._groups, -1)
        encoded, tails = (numbers.on(chosen.device).view(-1, 1, 1) for numbers in (self._encoded, self._tails))
        at, behind = by_group.minimum(encoded - 1).clamp(min=0), (by_group - encoded).minimum(tails - 1).clamp(min=0)
        codes = self.codec.decode_rows(self._stored, at, at // self.codec.block, self.cache.request.dtype)
        exact = (ops.gather_rows(side, behind) for side in (self._tail_k, self._tail_v))
        late = (by_group >= encoded).unsqueeze(-1)
        k, v = (torch.where(late, *both).view(*chosen.shape, -1) for both in zip(exact, codes, strict=True))
        return Segment(k, v, live=rows.counts if isinstance(rows, Ragged) else None)


def _readable(room: Tensor) -> Tensor:
    """Return a tensor of at least one row, which may be read and is not used where there was none."""
    return room if room.shape[2] else room.new_zeros((*room.shape[:2], 1, room.shape[3]))
