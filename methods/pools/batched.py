"""Combines the stores, pools and host rows of several sequences for steps that these take together.
Keys and values stay in the memory of each sequence's own cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import ops
from kernels.per_sequence import PerSequence, per_sequence
from kernels.ragged import Ragged, filled, with_free_slots
from kernels.reference import Segment
from methods.base import CacheState, NextRow
from methods.pools.device_store import Attend, KVStore, PerHeadStore
from methods.pools.per_head import PerHeadPool
from methods.pools.pool import Pool
from methods.tiers.codec import Encoded, Part
from methods.tiers.tier import DEVICE
from methods.tiers.traffic import Traffic
from methods.tiers.transfer import Arrival


class BatchedHostRows:
    """Read rows [B G C W] of several sequences in place, in host memory, as `HostRows` does for one
    cache. What moves is counted for each sequence by itself."""

    def __init__(
        self, rooms: Sequence[Tensor], device: torch.device, dim: int = 2, dead: int | None = None
    ) -> None:
        """Join `rooms`, a tensor [1 G C W] per sequence with all its rows, for reading by `device`.
        Their sizes differ in dimension `dim`. `dead`: how many free slots, places for sequences
        that join later, follow them; None: there are no slots."""
        self.rows = with_free_slots(rooms, dim, dead, reader=device)

    def gather(
        self,
        rows: Tensor | Ragged,
        traffic: Traffic,
        slots: Tensor | None = None,
        held: Tensor | None = None,
    ) -> Tensor:
        """Return chosen rows on the device, as `HostRows.gather` does, rows [B G K] -> [B G K W].
        If sequences choose different numbers of rows, `rows` is `Ragged` (a tensor per sequence),
        and what follows the shorter ones is arbitrary. With `slots`, it is filled up to one number,
        and the padding must have a slot of 0 or more, so that it does not move."""
        row_bytes, chosen = self.rows.shape[3] * self.rows.dtype.itemsize, filled(rows)
        if slots is not None and held is None:
            nothing = (*chosen.shape[:2], 1, self.rows.shape[3])
            held = torch.zeros(nothing, dtype=self.rows.dtype, device=chosen.device)
            slots = slots.clamp(max=0)
        moved: Tensor | Ragged = ops.gather_tiers(
            self.rows, rows if slots is None else chosen, held, slots
        )
        if slots is not None:
            count = (slots < 0).sum((1, 2))
        elif isinstance(rows, Ragged):
            count = rows.counts * chosen.shape[1]
        else:
            count = torch.full((len(chosen),), chosen[0].numel(), device=chosen.device)
        traffic.tally("to_device_bytes", count * row_bytes)
        whole, lacking = filled(moved), chosen.shape[2] - filled(moved).shape[2]
        # plain torch returns only existing rows
        return pad(whole, (0, 0, 0, lacking)) if lacking else whole

    def in_place(self, count: int, traffic: Traffic) -> Tensor:
        """Return all rows [B G C W], for an operation that reads `count` chosen rows of each head
        in place; only the bytes of these count as moved. Sequences differ in the width W of their
        rows."""
        entry_bytes = count * self.rows.shape[1] * self.rows.dtype.itemsize
        traffic.tally("to_device_bytes", self.rows.counts * entry_bytes)
        return cast(Tensor, self.rows)


class BatchedStore(KVStore):
    """Write to, and read from, the memory of several stores in one operation. The growing lengths
    are counted on the device, in `cache.counters`; the lengths in the stores themselves are updated
    later, by `KVStore.advance`."""

    def __init__(self, stores: Sequence[KVStore], cache: CacheState, dead: int | None) -> None:
        """Join `stores`, one per cache, each with one or more sequences. `dead`: how many free slots,
        places for sequences that join later, follow the sequences; None: there are no slots.

        If every KV head has a store of its own (`PerHeadStore`), the heads are treated as sequences
        with one head."""
        self.heads, self.cache = stores[0].heads, cache
        if isinstance(stores[0], PerHeadStore):
            stores = [
                head for store in stores if isinstance(store, PerHeadStore) for head in store.stores
            ]
            dead = dead and dead * self.heads
        self.values_from = stores[0].values_from
        rows = [
            (k, v)
            for store in stores
            for k, v in zip(store.k_rows.split(1), store.v_rows.split(1), strict=True)
        ]
        self._keys, self._values = (
            with_free_slots(side, dead=dead) for side in zip(*rows, strict=True)
        )
        self._lengths = per_sequence([store.length for store in stores for _ in store.k_rows], dead)
        self._segments: dict[tuple[int | PerSequence, int | PerSequence | None], Segment] = {}

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store one new token of each sequence in its own store, k, v [B G 1 D]."""
        held = self._keys.shape[:2]
        rows = self.next_row().row.view(-1, 1, 1).expand(*held, 1)
        ops.put_rows(self._keys, rows, k.reshape(*held, *k.shape[2:]))
        if self.values_from is None:
            ops.put_rows(self._values, rows, v.reshape(*held, *v.shape[2:]))

    def next_row(self) -> NextRow:
        row = self.row
        if row is None:
            row = self.cache.counters.first(self._lengths, self._keys.device)
        return NextRow(self._keys, self._values, row)

    def each(self, q: Tensor, attend: Attend) -> Tensor:
        """Return attend(q, this store, None), where the queries of KV heads with stores of their own
        are those of different sequences. q [B H 1 D] -> [B H 1 Dv]"""
        folded = q.reshape(len(self._keys.parts), -1, *q.shape[2:])
        return attend(folded, self, None).view(*q.shape[:3], -1)

    def count_written(self) -> None:
        """Do nothing: lengths are counted on the device, in `cache.counters`."""

    def count(self, more: int) -> Tensor:
        return self.cache.counters.first(self._lengths + 1 + more, self._keys.device)

    def since(self, start: int | PerSequence) -> Segment:
        """Return the tokens from number `start` on, in each sequence, including the one that this
        step has stored. `live` of the segment says on the device how many there are."""
        if self.row is not None:
            return self.between(start, self._keys.sizes)
        if (start, None) not in self._segments:
            live = self.cache.counters.first(self._lengths - start + 1, self._keys.device)
            self._segments[start, None] = self.between(start, self._keys.sizes)._replace(live=live)
        return self._segments[start, None]

    def between(self, start: int | PerSequence, end: int | PerSequence) -> Segment:
        if (start, end) not in self._segments:
            k, v = (cast(Tensor, side.slice(start, end)) for side in (self._keys, self._values))
            self._segments[start, end] = Segment(k, v)
        return self._segments[start, end]


class BatchedPool:
    """Read tokens from the pools of several sequences in one operation. The pools lie in one tier,
    on the device or on the host, and have one codec."""

    def __init__(self, pools: Sequence[Pool], cache: CacheState, dead: int | None) -> None:
        """Join `pools`, one per cache, each with one or more sequences. `dead`: how many free
        slots, places for sequences that join later, follow the sequences; None: there are no slots.
        KV heads with pools of their own (`PerHeadPool`) are treated as sequences with one head."""
        if isinstance(pools[0], PerHeadPool):
            dead = dead and dead * pools[0].spec.num_kv_heads
            pools = [head for pool in pools if isinstance(pool, PerHeadPool) for head in pool.pools]
        self.tier = pools[0].tier
        self.codec = pools[0].codec
        self.cache = cache
        device = cache.request.device
        rooms = [sequence for pool in pools for sequence in pool.rooms()]
        parts = [list(map(_readable, same)) for same in zip(*rooms, strict=True)]
        tokens = len(pools[0].layout.tokens)
        self._on_host = [
            BatchedHostRows(same, device, dead=dead)
            for same in parts[:tokens]
            if self.tier != DEVICE
        ]
        tensors = [rows.rows for rows in self._on_host]
        tensors += [with_free_slots(same, dead=dead) for same in parts[len(tensors) :]]
        *encoded, self._tail_k, self._tail_v = (cast(Tensor, x) for x in tensors)
        self._stored = Encoded(tuple(encoded[:tokens]), tuple(encoded[tokens:]))
        sequences = [pool for pool in pools for _ in range(pool.cache.request.batch)]
        self.length = PerSequence([pool.length for pool in sequences], dead)
        self.encoded = PerSequence([pool.encoded for pool in sequences], dead)
        self._tails, self._groups = tensors[-1].sizes, pools[0].spec.num_kv_heads

    def segments(self) -> Arrival[list[Part]]:
        """Ask for all tokens on the device, as `Pool.segments` does. Where one pool has encoded tokens,
        or plain ones after them, others may have none."""
        return self.cache.fetch(lambda traffic: self._parts)

    def by_store(self) -> list[list[Part]]:
        return [self.segments().wait()]

    def whole(self, *, early: bool = False) -> Arrival[Segment]:
        """Ask for all tokens of the pools, decoded, on the device, as `Pool.whole` does."""
        every = torch.arange(self.length.most, device=self.cache.request.device)
        rows = Ragged.filled_up(every.expand(len(self.length), self._groups, -1), self.length)
        return self.gather(rows, early=early)

    @cached_property
    def _parts(self) -> list[Part]:
        def first(tensors: Sequence[Tensor], count: PerSequence) -> tuple[Tensor, ...]:
            return tuple(cast(Tensor, cast(Ragged, x).slice(0, count)) for x in tensors)

        counts, plain = (self.encoded, self.encoded // self.codec.block), self.length - self.encoded
        parts: list[Part] = []
        if self.encoded.most:
            encoded = Encoded(*map(first, self._stored, counts))
            parts.append(self.codec.segment(encoded, self.cache.request.dtype))
        if plain.most:
            parts.append(Segment(*first((self._tail_k, self._tail_v), plain)))
        return parts

    def gather(
        self, rows: Tensor | Ragged, slots: Tensor | None = None, *, early: bool = False
    ) -> Arrival[Segment]:
        """Ask for chosen tokens, decoded, on the device, as `Pool.gather` does. If sequences choose
        different numbers of them, `rows` is `Ragged` (a tensor per sequence), the segment is filled
        up, and its `live` holds the numbers. Tokens whose `slots` entry is 0 or more do not move
        from the host; with `slots`, all sequences choose equally many."""
        return self.cache.fetch(lambda traffic: self._chosen(rows, slots, traffic), early=early)

    def _chosen(self, rows: Tensor | Ragged, slots: Tensor | None, traffic: Traffic) -> Segment:
        """Return chosen tokens, decoded. For each it reads both an encoded token and one of the
        plain tokens that follow the whole blocks, always rows that exist, and takes the one that
        was meant: so nothing depends on numbers that only the device knows."""
        chosen = filled(rows)
        by_group = chosen.reshape(len(chosen), self._groups, -1)
        encoded, tails = (
            numbers.on(chosen.device).view(-1, 1, 1) for numbers in (self.encoded, self._tails)
        )
        at = by_group.minimum(encoded - 1).clamp(min=0)
        stored, places = self._stored, cast(Tensor | None, at)
        if self._on_host:
            of_each = Ragged.filled_up(at, rows.sizes) if isinstance(rows, Ragged) else at
            unread = None if slots is None else slots.view_as(at)
            moved = (held.gather(of_each, traffic, unread) for held in self._on_host)
            stored, places = stored._replace(tokens=tuple(moved)), None
        k, v = self.codec.decode_rows(
            stored, places, at // self.codec.block, self.cache.request.dtype
        )
        if self.codec.block > 1:
            behind = (by_group - encoded).minimum(tails - 1).clamp(min=0)
            exact = (ops.gather_rows(side, behind) for side in (self._tail_k, self._tail_v))
            late = (by_group >= encoded).unsqueeze(-1)
            k, v = (torch.where(late, *both) for both in zip(exact, (k, v), strict=True))
        k, v = (x.view(*chosen.shape, -1) for x in (k, v))
        return Segment(k, v, live=rows.counts if isinstance(rows, Ragged) else None)


def _readable(room: Tensor) -> Tensor:
    """Return `room`, or one row of zeros if it has no rows, so that kernels may read there; the
    zeros are never used."""
    return room if room.shape[2] else room.new_zeros((*room.shape[:2], 1, room.shape[3]))
