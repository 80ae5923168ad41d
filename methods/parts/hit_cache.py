"""Keeps what the last step fetched: what the next one chooses again is neither moved nor rebuilt (ShadowKV)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment
from methods.base import Case
from methods.parts import costs

Load = Callable[[Tensor], Segment]  # chunks [B G K] -> their K*size tokens


class Lacking(NamedTuple):
    """Names chunks that are to be held, and where. Places None: all of them, in any order."""

    places: Tensor | None  # [B G N]
    chunks: Tensor  # [B G N]


class HitCache:
    """Holds keys and values of K chunks per KV head, `size` tokens each.

    New chunks take the places of those that left. Heads with fewer new ones than others load some of theirs again, so
    that one rectangular block is moved and counted. Where nobody may wait for how many are new, `slots` says what is
    held, and `exchange` takes all in: exactly the new ones are moved and counted.
    """

    def __init__(self, size: int, total: int) -> None:
        """Begin empty. total: how many chunks there are to choose from."""
        self.size, self.total = size, total
        self.held: Tensor | None = None  # [B G K]
        self.kv: Segment
        self.missed = 0  # how many of the chunks last read, over all heads, were not held

    def read(self, chunks: Tensor, load: Load) -> Segment:
        """Return the tokens of chunks [B G K], the same K every time, in any order. `load` makes those that are not
        held."""
        if (lacking := self.lacking(chunks)) is not None:
            self.take_in(lacking, load(lacking.chunks))
        return self.kv

    def slots(self, chunks: Tensor) -> Tensor:
        """Return where chunks [B G K] are held, -1 for nowhere. Waits for nothing, as `exchange` does."""
        none = torch.full((*chunks.shape[:2], self.total), -1, device=chunks.device)
        if self.held is None:
            return none.gather(2, chunks)
        order = torch.arange(chunks.shape[2], device=chunks.device).expand_as(self.held)
        return none.scatter_(2, self.held, order).gather(2, chunks)

    def exchange(self, chunks: Tensor, tokens: Segment) -> Segment:
        """Hold all of chunks [B G K] from now on, in their order, in the memory of what was held. tokens [B G K*size
        D]"""
        if self.held is None:
            self.take_in(Lacking(None, chunks), tokens)
        else:
            for mine, new in ((self.held, chunks), (self.kv.k, tokens.k), (self.kv.v, tokens.v)):
                mine.copy_(new)
        return self.kv

    def lacking(self, chunks: Tensor) -> Lacking | None:
        """Return what of chunks [B G K] must be loaded, None for nothing."""
        if self.held is None:
            self.missed = chunks.numel()
            return Lacking(None, chunks)
        none = torch.zeros(*chunks.shape[:2], self.total, dtype=torch.bool, device=chunks.device)
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
        """Hold what was lacking from now on. loaded [B G N*size D]"""
        places, chunks = lacking
        if places is None:
            self.held, self.kv = chunks.clone(), loaded
            return
        assert self.held is not None
        self.held.scatter_(2, places, chunks)
        for kept, fresh in ((self.kv.k, loaded.k), (self.kv.v, loaded.v)):
            ops.put_rows(_by_chunk(kept, self.held), places, _by_chunk(fresh, chunks))


def _by_chunk(x: Tensor, chunks: Tensor) -> Tensor:
    """View rows by chunk. [B G K*size D] -> [B G K size*D]"""
    return x.view(*chunks.shape, -1)


def held_bytes(case: Case, chunks: int, size: int) -> int:
    """Return what a cache takes from the first step on: `chunks` of `size` tokens per KV head, and their numbers."""
    return chunks * (size * case.row_bytes + costs.INT64 * case.spec.num_kv_heads)
