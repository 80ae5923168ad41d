"""Keeps blocks of offloaded tokens on the device while many of their tokens are chosen (PQCache, arXiv 2407.12820).

All KV heads of a layer share the blocks. A chosen token whose block is held is read there; the others are moved one by
one. Then the blocks with the most chosen tokens over all KV heads are offered: one that is held counts a use more, one
that is not is moved whole and takes the place of the least used (LFU; of equals the least recent leaves). Such a block
comes behind the rest of the step, and is there for the next one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment
from methods.base import Case, Cost
from methods.parts.costs import INT64
from methods.parts.hit_cache import HitCache, Lacking
from methods.pools import Pool
from methods.tiers.transfer.engine import Arrival


class BlockCache:
    """Holds `slots` blocks of `size` tokens of `store`; each step may bring in up to `offered` of them."""

    def __init__(self, store: Pool, tokens: Segment, *, size: int, slots: int, offered: int) -> None:
        """Keep the last blocks from the start. tokens [B G M D]: those of `store`, still on the device."""
        self.store, self.size = store, size
        blocks = -(-store.length // size)
        self.slots = min(slots, blocks)
        self.offered = min(offered, self.slots)
        batch, groups = tokens.k.shape[:2]
        self.uses = torch.zeros(batch, blocks, dtype=torch.int64, device=tokens.k.device)
        self.last, self.step = self.uses.clone(), 0
        self.order = torch.arange(blocks, device=tokens.k.device)  # of equals the first leaves
        self.slot_of = torch.full((batch, groups, blocks), -1, device=tokens.k.device)
        self.held = HitCache(size, blocks)
        self.coming: tuple[Lacking, Arrival[Segment]] | None = None  # blocks that the next step will hold
        first = Lacking(None, self._of_heads(self.order[blocks - self.slots :].expand(batch, -1)))
        rows = self._rows(first.chunks)
        self._take_in(first, Segment(ops.gather_rows(tokens.k, rows), ops.gather_rows(tokens.v, rows)))

    def read(self, rows: Tensor) -> Segment:
        """Return the keys and values of chosen tokens on the device, [B G K D] each. rows [B G K]"""
        if self.coming is not None:
            (lacking, arrival), self.coming = self.coming, None
            self._take_in(lacking, arrival.wait())
        blocks = rows // self.size
        slots = self.slot_of.gather(2, blocks)
        at = (slots * self.size + rows % self.size).clamp(min=0)
        gathered = [ops.gather_rows(held, at) for held in (self.held.kv.k, self.held.kv.v)]
        missing = (slots < 0).flatten().nonzero().squeeze(1)
        for whole, fresh in zip(
            gathered, self.store.pick(missing // rows.shape[2], rows.flatten()[missing]).wait()[:2], strict=True
        ):
            whole.view(-1, whole.shape[3])[missing] = fresh
        self.store.cache.traffic.looked_up += rows.numel()
        self.store.cache.traffic.found += rows.numel() - len(missing)
        self._offer(blocks)
        return Segment(*gathered)

    def _offer(self, blocks: Tensor) -> None:
        """Offer the blocks with the most chosen tokens. blocks [B G K]: those of the chosen tokens"""
        self.step += 1
        chosen = torch.zeros_like(self.uses).scatter_add_(1, blocks.flatten(1), torch.ones_like(blocks).flatten(1))
        most = chosen.topk(self.offered)
        offered = torch.zeros_like(chosen, dtype=torch.bool).scatter(1, most.indices, most.values > 0)
        held = self.slot_of[:, 0] >= 0
        self.uses += offered
        self.last.masked_fill_(offered, self.step)
        worth = ((self.uses << 24) + self.last) * self.uses.shape[1] + self.order
        worth = worth.masked_fill(~held, -1)
        kept = worth.masked_fill(offered & ~held, torch.iinfo(torch.int64).max).topk(self.slots).indices
        self.uses *= torch.zeros_like(self.uses).scatter(1, kept, 1)
        if (lacking := self.held.lacking(self._of_heads(kept))) is not None:
            self.coming = lacking, self.store.gather(self._rows(lacking.chunks))

    def _of_heads(self, blocks: Tensor) -> Tensor:
        """Give every KV head the blocks [B slots]. -> [B G slots]"""
        return blocks.unsqueeze(1).expand(-1, self.slot_of.shape[1], -1)

    def _take_in(self, lacking: Lacking, loaded: Segment) -> None:
        self.held.take_in(lacking, loaded)
        assert self.held.held is not None
        order = torch.arange(self.slots, device=self.order.device).expand_as(self.held.held)
        self.slot_of = torch.full_like(self.slot_of, -1).scatter(2, self.held.held, order)

    def _rows(self, chunks: Tensor) -> Tensor:
        """Return the rows of blocks. The last block may be cut short: the last token stands in for those that are not
        there."""
        return ops.token_rows(chunks, self.size).clamp(max=self.store.length - 1)


def cost(case: Case, length: int, top: int, size: int, slots: int, offered: int) -> Cost:
    """Return what the cache adds, over `length` offloaded tokens of which `top` are chosen; it is the most that a step
    can move."""
    blocks = -(-length // size)
    slots = min(slots, blocks)
    tables = INT64 * (case.spec.num_kv_heads * (slots + blocks) + 3 * blocks)
    new = min(offered, slots, blocks - slots) * size if slots < blocks else -top
    return Cost(slots * size * case.row_bytes + tables, new * case.row_bytes)
