"""Keeps what the last step fetched, so that what the next step chooses again is neither moved nor
rebuilt (ShadowKV)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import ops
from kernels.per_sequence import PerSequence
from kernels.ragged import Ragged, filled
from kernels.reference import Segment, without_missing
from methods.base import CacheState, LayerWorkload
from methods.parts import costs
from methods.tiers.traffic import Traffic

Load = Callable[[Tensor | Ragged, Tensor | None], Segment]  # chunks [B G K], and their slots -> their K*size tokens


class Lacking(NamedTuple):
    """Name chunks to load, and the places to put them. Places None: all places, in any order."""

    places: Tensor | None  # [B G N]
    chunks: Tensor  # [B G N]


class HitCache:
    """Hold keys and values of K chunks per KV head, `size` tokens each.

    New chunks replace those that left. Heads with fewer new ones than others load some of theirs
    again, so that one rectangular block is moved and counted. Where nothing may wait for the number
    of new chunks, `slots` says what is held, and `exchange` stores all: exactly the new ones are
    moved and counted."""

    held: Tensor  # [B G K], `total` where nothing is held
    k: Tensor  # [B G K size*D]
    v: Tensor  # [B G K size*D]

    def __init__(self, size: int, total: int) -> None:
        """`size`: tokens of a chunk. `total`: how many chunks there are to choose from."""
        self.size, self.total = size, total
        self.missed = 0  # how many of the chunks last read, over all heads, were not held

    def begin(self, count: int, like: Tensor) -> None:
        """Make room for `count` chunks of each KV head, and hold none. like [B G S D]: has their
        shape and dtype"""
        heads = like.shape[:2]
        self.held = torch.full((*heads, count), self.total, device=like.device)
        self.k, self.v = (like.new_zeros(*heads, count, self.size * like.shape[3]) for _ in range(2))

    @property
    def begun(self) -> bool:
        return "held" in vars(self)

    def batched(
        self, caches: Sequence[HitCache], cache: CacheState, seen: int | PerSequence, dead: int | None
    ) -> HitCache:
        """Return a cache for the sequences of `caches`, whose tensors its policy sets (see
        `Policy`)."""
        return HitCache(
            self.size, PerSequence([one.total for one in caches], dead).most
        )  # of a step of a size: that of the size

    def read(self, chunks: Tensor | Ragged, load: Load, traffic: Traffic, *, may_wait: bool) -> Segment:
        """Return the tokens of chunks [B G K], in any order, and count in `traffic` how many were
        held. `load` loads the others, or all if nothing may wait for their number; even then only
        missing ones move."""
        if may_wait and not isinstance(chunks, Ragged):
            if (lacking := self.lacking(chunks)) is not None:
                self.take_in(lacking, load(lacking.chunks, None))
            traffic.looked_up += chunks.numel()
            traffic.found += chunks.numel() - self.missed
            return self._tokens(chunks)
        if isinstance(chunks, Ragged):
            whole = without_missing(_as_wide(chunks.whole, self.held.shape[2], 2), chunks.counts, 0)
            chunks = Ragged.filled_up(whole, chunks.sizes)
        slots, there = self.slots(chunks), present(chunks)
        known = torch.ones_like(slots, dtype=torch.bool) if there is None else there.expand_as(slots)
        traffic.tally_each("looked_up", known.sum((1, 2)))
        traffic.tally_each("found", (known & (slots >= 0)).sum((1, 2)))
        loaded, tokens = load(chunks, slots), self.held.shape[2] * self.size
        return self.exchange(chunks, Segment(*(_as_wide(x, tokens, 2) for x in loaded[:2])))

    def slots(self, chunks: Tensor | Ragged) -> Tensor:
        """Return the places of chunks [B G K], -1 for those not held; 0 for chunks that a sequence
        does not have. Waits for nothing, as `exchange` does."""
        chosen, held, there = filled(chunks), self.held, present(chunks)
        if there is not None:
            chosen, held = (torch.where(there, x, self.total) for x in (chosen, held))
        none = torch.full((*held.shape[:2], self.total + 1), -1, device=held.device)
        slots = none.scatter_(2, held, torch.arange(held.shape[2], device=held.device).expand_as(held)).gather(
            2, chosen
        )
        return slots if there is None else slots.masked_fill(~there, 0)

    def exchange(self, chunks: Tensor | Ragged, tokens: Segment) -> Segment:
        """Hold all of chunks [B G K] from now on, in their order, in the memory of what was held.
        tokens [B G K*size D]"""
        for mine, new in ((self.held, filled(chunks)), (self.k, tokens.k), (self.v, tokens.v)):
            mine.copy_(new.reshape(mine.shape))
        return self._tokens(chunks)

    def lacking(self, chunks: Tensor) -> Lacking | None:
        """Return which of chunks [B G K] must be loaded, None for none."""
        none = torch.zeros(*chunks.shape[:2], self.total + 1, dtype=torch.bool, device=chunks.device)
        new = ~none.scatter(2, self.held, True).gather(2, chunks)
        free = ~none.scatter(2, chunks, True).gather(2, self.held)
        per_head = new.sum(2)
        count, self.missed = torch.stack([per_head.max(), per_head.sum()]).tolist()
        if count == chunks.shape[2]:
            return Lacking(None, chunks)
        if not count:
            return None
        places = free.int().topk(count).indices  # the free ones first, then places that stay as they are
        incoming = chunks.gather(2, new.int().topk(count).indices)
        return Lacking(places, torch.where(free.gather(2, places), incoming, self.held.gather(2, places)))

    def take_in(self, lacking: Lacking, loaded: Segment) -> None:
        """Hold the loaded chunks from now on. loaded [B G N*size D]"""
        places, chunks = lacking
        if places is None:
            self.exchange(chunks, loaded)
            return
        self.held.scatter_(2, places, chunks)
        for kept, fresh in ((self.k, loaded.k), (self.v, loaded.v)):
            ops.put_rows(kept, places, fresh.view(*chunks.shape, -1))

    def _tokens(self, chunks: Tensor | Ragged) -> Segment:
        """Return all tokens that are held, and how many of them belong to `chunks`."""
        live = (chunks.sizes * self.size).on(self.held.device) if isinstance(chunks, Ragged) else None
        dim = self.k.shape[3] // self.size
        k, v = (x.view(*x.shape[:2], -1, dim) for x in (self.k, self.v))
        return Segment(k, v, live=live)


class OfHits:
    """Make a tensor of a policy's `hits` an attribute of the policy, so that it can be in
    `of_each`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, read: Any, owner: type | None = None) -> Tensor | None:
        return None if read is None or read.hits is None else getattr(read.hits, self.name)

    def __set__(self, read: Any, tensor: Tensor) -> None:
        setattr(read.hits, self.name, tensor)


def present(chunks: Tensor | Ragged) -> Tensor | None:
    """Return which of chunks [B G K] a sequence has, bool [B 1 K], or None if each has all."""
    if not isinstance(chunks, Ragged):
        return None
    return torch.arange(chunks.whole.shape[2], device=chunks.device) < chunks.counts.view(-1, 1, 1)


def held_bytes(case: LayerWorkload, chunks: int, size: int) -> int:
    """Return the bytes that a cache takes from the first step on: `chunks` of `size` tokens per KV
    head, and their numbers."""
    return chunks * (size * case.row_bytes + costs.INT64 * case.spec.num_kv_heads)


def _as_wide(x: Tensor, size: int, dim: int) -> Tensor:
    """Return x with `size` entries in a dimension, filled up with zeros or with some of its zeros
    cut."""
    kept = x.narrow(dim, 0, min(size, x.shape[dim]))
    return pad(kept, (0, 0) * (x.dim() - 1 - dim) + (0, size - kept.shape[dim]))
