"""Keeps blocks of offloaded tokens on the device while many of their tokens are chosen (PQCache,
arXiv 2407.12820).

All KV heads of a layer share the blocks. A chosen token whose block is held is read there; the
others are moved one by one. Then the blocks with the most chosen tokens over all KV heads are
offered: for a held one a further use is counted, another one is moved whole and replaces the least
used (LFU; among equals the least recently used). Such a block arrives while the model goes on, and
can be read in the next step."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from kernels import ops
from kernels.reference import Segment
from methods.base import Cost, LayerWorkload
from methods.base.state import queues
from methods.parts.costs import INT64
from methods.pools import Pool
from methods.tiers.transfer import Arrival


class BlockCache:
    """Keep `slots` of the blocks of `size` consecutive tokens that a pool (`store`) holds, copied
    to the device. Each step may bring in up to `offered` new blocks in place of others. How many it
    brings in only the device knows, and nothing waits for that number."""

    def __init__(
        self, store: Pool, tokens: Segment, *, size: int, slots: int, offered: int
    ) -> None:
        """Begin with the last blocks of tokens of the pool `store`. tokens [B G M D]: all tokens
        that were just sent to it, still on the device. `size`: tokens of a block; `slots`: how many
        blocks are held; `offered`: the most new ones per step."""
        self.store, self.size = store, size
        count, device = -(-store.length // size), tokens.k.device
        self.slots = min(slots, count)
        self.offered = min(offered, self.slots)
        self.uses = torch.zeros(len(tokens.k), count, dtype=torch.int64, device=device)
        self.last, self.step = self.uses.clone(), 0
        self.order = torch.arange(count, device=device)  # of equals the first leaves
        # [B slots], what each place holds
        self.blocks = self.order[count - self.slots :].repeat(len(tokens.k), 1)
        rows = self._rows(self.blocks).clamp(max=store.length - 1)
        keys, inside = ops.gather_rows(tokens.k, rows), store.spec.values_in_keys
        values = keys[..., -tokens.v.shape[3] :] if inside else ops.gather_rows(tokens.v, rows)
        self.kv = Segment(keys, values)
        self.own = 1 if inside else 2  # tensors of `kv` that have memory of their own
        # what the next step will hold: places [B N], the blocks for them [B N], which are new, and their tokens
        self.coming: tuple[Tensor, Tensor, Tensor, Arrival[Segment]] | None = None

    def read(self, rows: Tensor) -> Segment:
        """Return keys and values of chosen tokens on the device, [B G K D] each: from a held block,
        or else moved from the pool. rows [B G K] are token numbers in the pool. Then ask for the
        blocks that the next step shall hold."""
        self.take_in()
        blocks, traffic = rows // self.size, self.store.cache.traffic
        places = self._places().unsqueeze(1).expand(-1, rows.shape[1], -1).gather(2, blocks)
        held = places >= 0
        slots = torch.where(held, places * self.size + rows % self.size, -1)
        coming = self.store.gather(rows, slots, early=True)  # what follows hides it
        kept = [ops.gather_rows(x, slots.clamp(min=0)) for x in self.kv[:2]]
        traffic.looked_up += rows.numel()
        traffic.tally("found", held.sum())
        self._offer(blocks)
        k, v = (
            torch.where(held.unsqueeze(-1), *both)
            for both in zip(kept, coming.wait()[:2], strict=True)
        )
        return Segment(k, v)

    def take_in(self) -> None:
        """Put the blocks of tokens that were asked for last into their places on the device, once
        they have arrived. `read` calls it first. On a GPU, and in a captured step, it is also
        called before the step ends, so that no transfer outlasts the step."""
        if self.coming is None:
            return
        (places, blocks, new, arrival), self.coming = self.coming, None
        groups = self.kv.k.shape[1]
        at, fresh = self._rows(places), new.repeat_interleave(self.size, 1)[:, None, :, None]
        to = places.unsqueeze(1).expand(-1, groups, -1)
        both = zip(self.kv[:2], arrival.wait()[:2], strict=True)
        for kept, loaded in islice(both, self.own):
            tokens = torch.where(fresh, loaded, ops.gather_rows(kept, at))
            by_block = kept.view(*kept.shape[:2], self.slots, -1)
            ops.put_rows(by_block, to, tokens.view(*to.shape, -1))
        self.blocks.scatter_(1, places, blocks)

    def _offer(self, blocks: Tensor) -> None:
        """Count the use of the blocks with the most chosen tokens, and ask for those of them that
        are not held; the least used ones leave. blocks [B G K]: the block of each chosen token."""
        self.step += 1
        chosen = torch.zeros_like(self.uses).scatter_add_(
            1, blocks.flatten(1), torch.ones_like(blocks).flatten(1)
        )
        most = chosen.topk(self.offered)
        offered = torch.zeros_like(chosen, dtype=torch.bool).scatter(
            1, most.indices, most.values > 0
        )
        held = self._places() >= 0
        self.uses += offered
        now = self.store.cache.counters.tensor(self.step, self.last.device)
        self.last.copy_(torch.where(offered, now, self.last))
        worth = ((self.uses << 24) + self.last) * self.uses.shape[1] + self.order
        worth = worth.masked_fill(~held, -1)
        kept = (
            worth.masked_fill(offered & ~held, torch.iinfo(torch.int64).max)
            .topk(self.slots)
            .indices
        )
        kept = torch.zeros_like(held).scatter(1, kept, True)
        self.uses *= kept
        if self.slots < self.uses.shape[1]:
            self._ask_for(kept & ~held, held & ~kept)

    def _ask_for(self, new: Tensor, leaving: Tensor) -> None:
        """Ask the pool for blocks to hold from the next step on. `new` and `leaving`, bool
        [B blocks], mark equally many blocks, at most `offered`: those that come, and those whose
        places they get."""
        # these first, then some that stay
        places = leaving.gather(1, self.blocks).int().topk(self.offered).indices
        coming = new.int().topk(self.offered)
        fresh = coming.values > 0
        blocks = torch.where(fresh, coming.indices, self.blocks.gather(1, places))
        slots = torch.where(
            fresh.repeat_interleave(self.size, 1).unsqueeze(1), -1, self._rows(places)
        )
        # the last block may be cut short
        rows = self._rows(blocks).clamp(max=self.store.length - 1)
        self.coming = places, blocks, fresh, self.store.gather(rows, slots, early=True)
        cache = self.store.cache
        if cache.counters.running or queues(rows.device):
            cache.defer(self.take_in)

    def _places(self) -> Tensor:
        """Return for each block of tokens in the pool at which place on the device it is held,
        [B blocks]; -1 if it is not."""
        order = torch.arange(self.slots, device=self.order.device).expand_as(self.blocks)
        return torch.full_like(self.uses, -1).scatter(1, self.blocks, order)

    def _rows(self, blocks: Tensor) -> Tensor:
        """Return the numbers of all tokens in the given blocks, blocks [B N] -> [B G N*size], the
        same for every KV head. With places instead of blocks they are rows of the held tensors."""
        groups = self.store.spec.num_kv_heads
        return ops.token_rows(blocks.unsqueeze(1).expand(-1, groups, -1), self.size)


def cost(case: LayerWorkload, length: int, top: int, size: int, slots: int, offered: int) -> Cost:
    """Return the cost of a `BlockCache` on the device. The pool outside it holds `length` tokens,
    of which a step chooses `top`; a block has `size` tokens, and the cache holds `slots` blocks and
    gets `offered` new ones per step. Moved bytes are the most that a step can move."""
    blocks = -(-length // size)
    slots = min(slots, blocks)
    # blocks, by the numbers of their tokens, and where these go
    asked = min(offered, slots) if slots < blocks else 0
    tables = INT64 * (slots + 3 * blocks + 2 * asked * (1 + case.spec.num_kv_heads * size))
    new = min(offered, slots, blocks - slots) * size if slots < blocks else -top
    return Cost(slots * size * case.row_bytes + tables, new * case.row_bytes)
