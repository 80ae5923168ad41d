"""Holds rows of K and V on the device, as decode steps read and write them: in one tensor, or per head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment
from methods.base import CacheState, LayerSpec, NextRow
from methods.tiers.rows import DeviceRows, Place
from methods.tiers.tier import DEVICE


def misfit(given: tuple[int, int], held: tuple[int, int]) -> ValueError:
    """Return the error for tokens that do not fit into a cache. `given` and `held` are pairs of
    numbers, sequences and tokens: those that were to be stored, and those for which the cache was
    made."""
    if given[0] != held[0]:
        return ValueError(f"The KV cache is for {held[0]} sequences but was given {given[0]}.")
    return ValueError(
        f"The KV cache holds {held[1]} tokens but was given {given[1]}: start it with a capacity for the prompt and "
        "all new tokens together."
    )


Attend = Callable[[Tensor, "KVStore", int | None], Tensor]


class KVStore:
    """Hold keys and values in token order on the device, in memory that is allocated beforehand.
    The tensors do not move until `resize`, so a decode step that reads them can be captured in a
    CUDA graph. If values are channels of keys (`LayerSpec.values_in_keys`), keys alone are stored,
    and what holds values is a view of them."""

    tier = DEVICE
    # [B], where the next token is written over another one; None: after all others
    row: Tensor | None = None
    # steps append to them, and have changed no existing row
    steady: tuple[str, ...] = ("k_rows", "v_rows")
    k_rows: Tensor
    v_rows: Tensor

    def __init__(self, spec: LayerSpec, cache: CacheState, capacity: int) -> None:
        request = cache.request
        shape, place = (request.batch, spec.num_kv_heads, capacity), Place(request.device)
        self.cache, self.heads = cache, spec.num_kv_heads  # a token has so many rows of K and V
        # the first channel of a key that belongs to its value; None: values have rows of their own
        self.values_from = spec.head_dim - spec.value_channels if spec.values_in_keys else None
        self._hold("k_rows", DeviceRows.room((*shape, spec.head_dim), request.dtype, place))
        if self.values_from is None:
            values = DeviceRows.room((*shape, spec.value_channels), request.dtype, place)
            self._hold("v_rows", values)
        self.length = 0

    def _hold(self, name: str, rows: Tensor) -> None:
        """Hold `rows` as those of keys ("k_rows", [B G C D]) or of values ("v_rows", [B G C Dv])."""
        setattr(self, name, rows)
        if self.values_from is not None:
            self.v_rows = self.k_rows[..., self.values_from :]

    @property
    def _own(self) -> tuple[str, ...]:
        """Return the names of the tensors that have memory of their own."""
        return ("k_rows", "v_rows") if self.values_from is None else ("k_rows",)

    @classmethod
    def holding(
        cls, spec: LayerSpec, cache: CacheState, room: int, *parts: tuple[Tensor, Tensor]
    ) -> KVStore:
        """Return a store of the keys and values [B heads T D] of `parts`, one after the other, with
        room for `room` further tokens."""
        tokens = sum(k.shape[2] for k, _ in parts)
        store = cls(replace(spec, num_kv_heads=parts[0][0].shape[1]), cache, tokens + room)
        for k, v in parts:
            store.append(k, v)
        return store

    @property
    def k(self) -> Tensor:
        """Return a view [B G S D] of the stored keys."""
        return self.k_rows[:, :, : self.length]

    @property
    def v(self) -> Tensor:
        """Return a view [B G S Dv] of the stored values."""
        return self.v_rows[:, :, : self.length]

    @property
    def free(self) -> int:
        """Return for how many further tokens there is room."""
        return self.k_rows.shape[2] - self.length

    @property
    def unused_bytes(self) -> int:
        """Return the bytes that are reserved for tokens to come."""
        return sum(getattr(self, name)[:, :, self.length :].nbytes for name in self._own)

    def per_head(self) -> list[tuple[Tensor, Tensor]]:
        """Return a pair of keys and values [S D] for every KV head, one sequence after the
        other."""
        return list(zip(self.k.flatten(0, 1), self.v.flatten(0, 1), strict=True))

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store k, v [B G T D] of new tokens after the others. Raises `ValueError` if there is no
        room. With a `row`, a single token is written there."""
        if self.row is not None:
            rows = self.row.view(-1, 1, 1).expand(*k.shape[:3])
            ops.put_rows(self.k_rows, rows, k)
            if self.values_from is None:
                ops.put_rows(self.v_rows, rows, v)
            return
        end = self.length + k.shape[2]
        batch, room = self.cache.request.batch, self.k_rows.shape[2]
        if k.shape[0] != batch or end > room:
            raise misfit((k.shape[0], end), (batch, room))
        self.cache.counters.write(k, self.k_rows, 2, self.length)
        if self.values_from is None:
            self.cache.counters.write(v, self.v_rows, 2, self.length)
        self.length = end

    def next_row(self) -> NextRow | None:
        """Return where `append` would write one more token of each sequence, as a row number on the
        device; None if it is known only in Python, or if there is no room."""
        counters = self.cache.counters
        if counters.running and self.row is not None:
            return NextRow(self.k_rows, self.v_rows, self.row)
        if not counters.running or self.length == self.k_rows.shape[2]:
            return None
        return NextRow(self.k_rows, self.v_rows, counters.tensor(self.length, self.k_rows.device))

    def count_written(self) -> None:
        """Count one more token per sequence, which a kernel has written to `next_row` already."""
        self.advance(1)

    def write(self, rows: Tensor, k: Tensor | None, v: Tensor | None) -> None:
        """Write keys k, values v or both [B G K D] in place of those of the tokens rows [B G K]."""
        for name, x in (("k_rows", k), ("v_rows", v)):
            if x is not None:
                self._copy_once(name)
                held = getattr(self, name)
                ops.put_rows(held, rows, x.to(held.dtype))

    def _copy_once(self, *names: str) -> None:
        """Replace the tensors `names` by copies before their rows change in place for the first
        time, so that a cache that goes back to an earlier state has its rows in the old tensors.
        States that are saved from then on include the contents of the copies, which are no longer
        `steady`."""
        for name in names:
            if name in self.steady:
                self._hold(name, getattr(self, name).clone())
        if self.values_from is not None:
            names = (*names, "v_rows")  # a view of the keys
        self.steady = tuple(name for name in self.steady if name not in names)

    def overwrite(self, row: Tensor) -> None:
        """Let each further token take the row `row` [B], which steps change; the first takes the
        next free one. A cache that goes back to an earlier state finds its tokens again."""
        self._copy_once(*self._own)
        self.row, self.length = row, self.length + 1

    def keep_of_last(self, count: int, rows: Tensor) -> None:
        """Drop the last `count` tokens except those that rows [B G K] name, ascending and numbered
        from the first of these `count`. A cache that goes back to an earlier state finds its tokens
        again: if these are all, what stays moves to new tensors."""
        start = self.length - count
        if not start:
            self._move(self.k_rows.shape[2], lambda whole: ops.gather_rows(whole, rows))
            return
        self._copy_once(*self._own)
        end, self.length = self.length, start + rows.shape[2]
        for x in (getattr(self, name) for name in self._own):
            x[:, :, start : self.length] = ops.gather_rows(x[:, :, start:end], rows)

    def resize(self, room: int) -> None:
        """Change the memory so that exactly `room` more tokens have room. The tensors move, so
        captured steps must not be replayed any more."""
        self._move(self.length + room, lambda stored: stored)

    def _move(self, capacity: int, of_stored: Callable[[Tensor], Tensor]) -> None:
        """Move what `of_stored` returns of the stored keys, and then of the values, [B G S D], to new
        memory for `capacity` tokens."""
        length = self.length
        for name in self._own:
            kept = of_stored(getattr(self, name)[:, :, :length])
            shape = (*kept.shape[:2], capacity, kept.shape[3])
            moved = DeviceRows.room(shape, kept.dtype, Place(self.cache.request.device))
            moved[:, :, : kept.shape[2]] = kept
            self._hold(name, moved)
            self.length = kept.shape[2]

    def count(self, more: int) -> Tensor:
        """Return the number of stored tokens plus `more` as a tensor on the device, [1] int64, or
        [B] if sequences differ. In captured steps it grows with each replay."""
        return self.cache.counters.tensor(self.length + more, self.cache.request.device)

    def advance(self, steps: int) -> None:
        """Add `steps` to the length: so many steps were replayed from a captured one and have each
        stored a token."""
        if self.row is None:
            self.length += steps

    def each(self, q: Tensor, attend: Attend) -> Tensor:
        """Return attend(q, this store, None): attention for all KV heads at once. `PerHeadStore`
        calls `attend` for each head instead, with the head's number."""
        return attend(q, self, None)

    def between(self, start: int, end: int) -> Segment:
        """Return keys and values of the tokens from number `start` up to `end`. They must be
        complete: no later step writes there."""
        return Segment(self.k_rows[:, :, start:end], self.v_rows[:, :, start:end])

    def since(self, start: int) -> Segment:
        """Return keys and values of all tokens from number `start` on. While steps are captured,
        this includes the empty rows for later tokens, and `live` says on the device how many are
        valid."""
        if not self.cache.counters.running or self.row is not None:
            stored = slice(start, self.length)
            return Segment(self.k_rows[:, :, stored], self.v_rows[:, :, stored])
        live = self.cache.counters.tensor(self.length - start, self.cache.request.device)
        return Segment(self.k_rows[:, :, start:], self.v_rows[:, :, start:], live=live)


class PerHeadStore(KVStore):
    """Hold keys and values of every KV head of every sequence in a store of its own, so that heads
    may keep different numbers of tokens, and what a head drops takes no memory.

    `length` is the mean over the heads: a whole number for one sequence, whose tokens are a multiple
    of its heads, and rounded down where sequences of a batch hold different numbers (KVzip)."""

    def __init__(
        self,
        spec: LayerSpec,
        cache: CacheState,
        k: Sequence[Tensor],
        v: Sequence[Tensor],
        room: int,
    ) -> None:
        """Fill the stores. k, v: a tensor [S D] for every head, one sequence after the other.
        `room`: for how many later tokens each has room."""
        self.cache, self.heads = cache, spec.num_kv_heads
        alone = CacheState(replace(cache.request, batch=1), counters=cache.counters)
        self.stores = [
            KVStore.holding(spec, alone, room, (keys[None, None], values[None, None]))
            for keys, values in zip(k, v, strict=True)
        ]
        self.length = sum(store.length for store in self.stores) // len(self.stores)

    @property
    def free(self) -> int:
        return self.stores[0].free

    @property
    def unused_bytes(self) -> int:
        return sum(store.unused_bytes for store in self.stores)

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

    def each(self, q: Tensor, attend: Attend) -> Tensor:
        """Call `attend` for every KV head of every sequence, with its own queries [1 g T D], its
        store and the number of the KV head. Return the results as one tensor, q [B H T D] ->
        [B H T Dv]."""
        queries = q.unflatten(1, (self.heads, -1)).flatten(0, 1).split(1)
        heads = cycle(range(self.heads))
        return torch.cat(
            [attend(*head) for head in zip(queries, self.stores, heads, strict=False)]
        ).view(*q.shape[:3], -1)
