"""Keeps what the last step fetched, so that what the next step chooses again is neither moved nor
rebuilt (ShadowKV)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.per_sequence import PerSequence, most_of
from kernels.ragged import Ragged, filled
from kernels.reference import Segment, without_missing
from methods.base import LayerWorkload
from methods.parts import costs
from methods.tiers.traffic import Traffic

# chunks [B G K], and their slots -> their K*size tokens
Load = Callable[[Tensor | Ragged, Tensor | None], Segment]
# chunks [B G K] that are written into the places of the cache, none where one is -1
LoadNew = Callable[[Tensor], None]


class HitCache:
    """Hold on the device the keys and values of the K chunks that each KV head read in the last
    step, so that chunks chosen again are not loaded. It is a base class for policies. A chunk has
    `size` tokens, and there are `total` to choose from.

    On a CPU, new chunks are written into the places of chunks that are no longer chosen. On a GPU,
    where the host must not wait to learn which are new, or if sequences choose different numbers,
    every head stores all its K chunks anew: those that are held are copied on the device, and only
    the new ones count as moved."""

    size: int
    total: int | PerSequence
    held: Tensor  # [B G K], `total` where nothing is held
    held_k: Tensor  # [B G K size*D]
    held_v: Tensor  # [B G K size*Dv]

    def begin(self, count: int, k: Tensor, v: Tensor) -> None:
        """Allocate memory for `count` chunks of each KV head, and mark all places as empty. k and v
        [B G S D] give shapes, dtype and device."""
        self.held = torch.full((*k.shape[:2], count), self._none, device=k.device)
        self.held_k, self.held_v = (
            like.new_zeros(*self.held.shape, self.size * like.shape[3]) for like in (k, v)
        )

    @property
    def _none(self) -> int:
        """Return the number that marks an empty place in `held`, which is one past the last
        chunk's."""
        return most_of(self.total)

    def read_through(
        self, chunks: Tensor | Ragged, load: Load, load_new: LoadNew | None, traffic: Traffic
    ) -> Segment:
        """Return keys and values of the chosen chunks [B G K], whose order may change, and hold
        these chunks from now on. `traffic` counts how many were asked for and how many were held
        already. `load_new` writes the others into `held_k` and `held_v`. Without it, as in captured
        steps, whose host must not wait to learn which these are, `load` is called for all chunks
        with the places of those that are held, which need not move."""
        if load_new is not None and not isinstance(chunks, Ragged):
            traffic.looked_up += chunks.numel()
            traffic.found += chunks.numel() - self._load_missing(chunks, load_new)
            return self._tokens(chunks)
        if isinstance(chunks, Ragged):
            whole = without_missing(as_wide(chunks.whole, self.held.shape[2], 2), chunks.counts, 0)
            chunks = Ragged.filled_up(whole, chunks.sizes)
        slots, there = self._slots(chunks), _present(chunks)
        known = (
            torch.ones_like(slots, dtype=torch.bool) if there is None else there.expand_as(slots)
        )
        traffic.tally_each("looked_up", known.sum((1, 2)))
        traffic.tally_each("found", (known & (slots >= 0)).sum((1, 2)))
        loaded, tokens = load(chunks, slots), self.held.shape[2] * self.size
        self._hold_all(chunks, *(as_wide(x, tokens, 2) for x in loaded[:2]))
        return self._tokens(chunks)

    def _load_missing(self, chunks: Tensor, load_new: LoadNew) -> int:
        """Load the chunks [B G K] that are not held, and return how many these are."""
        seen = torch.zeros(*chunks.shape[:2], self._none + 1, dtype=torch.uint8)
        new = seen.scatter_(2, self.held, 1).gather(2, chunks) == 0
        free = seen.scatter_(2, chunks, 2).gather(2, self.held) == 1
        missing = chunks.masked_select(new)
        if len(missing):
            # each head frees as many places as it has new chunks
            incoming = torch.full_like(chunks, -1).masked_scatter_(free, missing)
            load_new(incoming)
            self.held.masked_scatter_(free, missing)
        return len(missing)

    def _slots(self, chunks: Tensor | Ragged) -> Tensor:
        """Return for each of chunks [B G K] in which place it is held, -1 if it is not. Chunks that
        a sequence does not have get 0. Nothing waits for the device."""
        chosen, held, there = filled(chunks), self.held, _present(chunks)
        if there is not None:
            chosen, held = (torch.where(there, x, self._none) for x in (chosen, held))
        places = torch.full((*held.shape[:2], self._none + 1), -1, device=held.device)
        places.scatter_(2, held, torch.arange(held.shape[2], device=held.device).expand_as(held))
        slots = places.gather(2, chosen)
        return slots if there is None else slots.masked_fill(~there, 0)

    def _hold_all(self, chunks: Tensor | Ragged, k: Tensor, v: Tensor) -> None:
        """Replace all that is held by chunks [B G K] in this order, with their k and v
        [B G K*size D]. The memory stays the same."""
        for mine, new in ((self.held, filled(chunks)), (self.held_k, k), (self.held_v, v)):
            mine.copy_(new.reshape(mine.shape))

    def _tokens(self, chunks: Tensor | Ragged) -> Segment:
        """Return all held keys and values as one segment [B G K*size D]. If sequences have
        different numbers of `chunks`, its `live` says how many tokens of each are valid."""
        live = (
            (chunks.sizes * self.size).on(self.held.device) if isinstance(chunks, Ragged) else None
        )
        held = (self.held_k, self.held_v)
        k, v = (x.view(*x.shape[:2], -1, x.shape[3] // self.size) for x in held)
        return Segment(k, v, live=live)


def _present(chunks: Tensor | Ragged) -> Tensor | None:
    """Return a mask [B 1 K] of the entries of chunks [B G K] that are chunks, where sequences have
    different numbers of them and the rest is padding; None if all have K."""
    if not isinstance(chunks, Ragged):
        return None
    return torch.arange(chunks.whole.shape[2], device=chunks.device) < chunks.counts.view(-1, 1, 1)


def held_bytes(case: LayerWorkload, chunks: int, size: int) -> int:
    """Return the bytes that a `HitCache` (the chunks that the last step read, kept on the device)
    takes: `chunks` chunks of `size` tokens for each KV head, and their numbers."""
    return chunks * (size * case.row_bytes + costs.INT64 * case.spec.num_kv_heads)


def as_wide(x: Tensor, size: int, dim: int) -> Tensor:
    """Return x with exactly `size` entries in dimension `dim`: zeros are added at the end, or the
    end, which then holds only padding, is cut off."""
    kept = x.narrow(dim, 0, min(size, x.shape[dim]))
    return pad(kept, (0, 0) * (x.dim() - 1 - dim) + (0, size - kept.shape[dim]))
