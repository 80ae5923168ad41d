"""Keeps what the last step fetched: what the next one chooses again is neither moved nor rebuilt (ShadowKV)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment
from methods.base import Case
from methods.parts import costs

Load = Callable[[Tensor], Segment]  # chunks [B G K] -> their K*size tokens


class HitCache:
    """Holds keys and values of K chunks per KV head, `size` tokens each.

    New chunks take the places of those that left. Heads with fewer new ones than others load some of theirs again, so
    that one rectangular block is moved and counted.
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
        if self.held is None:
            self.missed = chunks.numel()
            return self._start(chunks, load)
        none = torch.zeros(*chunks.shape[:2], self.total, dtype=torch.bool, device=chunks.device)
        new = ~none.scatter(2, self.held, True).gather(2, chunks)
        free = ~none.scatter(2, chunks, True).gather(2, self.held)
        per_head = new.sum(2)
        count, self.missed = torch.stack([per_head.max(), per_head.sum()]).tolist()
        if count == chunks.shape[2]:
            return self._start(chunks, load)
        if count:
            places = free.int().topk(count).indices  # the free ones first, then places that stay as they are
            incoming = chunks.gather(2, new.int().topk(count).indices)
            self._fill(places, torch.where(free.gather(2, places), incoming, self.held.gather(2, places)), load)
        return self.kv

    def _start(self, chunks: Tensor, load: Load) -> Segment:
        self.held, self.kv = chunks.clone(), load(chunks)
        return self.kv

    def _fill(self, places: Tensor, chunks: Tensor, load: Load) -> None:
        assert self.held is not None
        self.held.scatter_(2, places, chunks)
        loaded = load(chunks)
        for kept, fresh in ((self.kv.k, loaded.k), (self.kv.v, loaded.v)):
            ops.put_rows(_by_chunk(kept, self.held), places, _by_chunk(fresh, chunks))


def _by_chunk(x: Tensor, chunks: Tensor) -> Tensor:
    """View rows by chunk. [B G K*size D] -> [B G K size*D]"""
    return x.view(*chunks.shape, -1)


def token_rows(chunks: Tensor, size: int) -> Tensor:
    """Return the tokens of chunks, pages or blocks. [B heads K] -> [B heads K*size]"""
    return (chunks.unsqueeze(-1) * size + torch.arange(size, device=chunks.device)).flatten(2)


def held_bytes(case: Case, chunks: int, size: int) -> int:
    """Return what a cache takes from the first step on: `chunks` of `size` tokens per KV head, and their numbers."""
    return chunks * (size * case.row_bytes + costs.INT64 * case.spec.num_kv_heads)
