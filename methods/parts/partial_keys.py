"""Computes InfiniGen's partial keys (arXiv 2406.19707): a skew turns queries and keys so that few columns hold
most of a query, and the rows of partial keys grow with the tokens of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from kernels import ops
from kernels.lowrank import directions, gram
from kernels.partial import BESIDE, NewPartial
from kernels.per_sequence import PerSequence, per_sequence
from kernels.ragged import Ragged, filled, with_free_slots
from methods.base import CacheState
from methods.base.pieces import pieces, tokens_at_once
from methods.base.state import queues


def skewing(q: Tensor, groups: int) -> Tensor:
    """Return an orthogonal matrix A for each KV head, [G D D] fp32: the directions in which its
    queries are largest, the strongest first. q [1 H T D]: rotated queries of a calibration text;
    `groups`: G."""
    stacked = q[0].unflatten(0, (groups, -1)).flatten(1, 2)
    return directions(gram(stacked)).float()


def skewed(x: Tensor, skew: Tensor | None) -> Tensor:
    """Return x A, the rows of x [B G T D] in the directions `skew` [G D D] of their KV head;
    without a skew, x itself."""
    return x if skew is None else x @ skew


def column_mass(x: Tensor, groups: int, skew: Tensor | None) -> Tensor:
    """Return for each KV head and column how much weight it has: the sum of |x A| over all rows, of
    the KV head itself (keys) or of its query heads. x [B G T D] or [B H T D]; `groups`: G; `skew`:
    A [G D D]. Return [B G D] fp32."""
    mass = torch.zeros(x.shape[0], groups, x.shape[3], device=x.device)
    for part in pieces(x.shape[2], at_once=tokens_at_once(x.device)):
        grouped = x[:, :, part].float().unflatten(1, (groups, -1)).flatten(2, 3)  # [B G g*t D]
        mass += skewed(grouped, skew).abs().sum(2)
    return mass


def largest(x: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` largest entries in each row, [B G D] -> bool [B G D]."""
    return torch.zeros_like(x, dtype=torch.bool).scatter(-1, x.topk(count).indices, True)


def narrowed(columns: Tensor, chosen: Tensor) -> Tensor:
    """Return the chosen columns of each head's matrix next to one another, [B G D d']. Heads with
    fewer chosen columns than others are filled up with columns of zeros.

    columns [B G D D]: the matrix A of each head; chosen [B G D]: bool"""
    at = chosen.int().topk(int(chosen.sum(-1).max())).indices
    return (columns * chosen.unsqueeze(2)).gather(
        3, at.unsqueeze(2).expand(-1, -1, columns.shape[2], -1)
    )


class GrowingRows:
    """Hold an index with a row per token, [B G rows W], to which decode steps append. The memory is
    allocated beforehand, so that such a step can be captured in a CUDA graph.

    On a GPU it lies in memory channel by channel, `BESIDE` rows or a multiple of them, which kernels
    read many at a time whatever W is. On a CPU it lies row by row, and the row after each head's
    last one is zero: when several sequences step together, some may have shorter rows than others,
    and are read and written up to the longest row (`row_scores`)."""

    def __init__(self, cache: CacheState, rows: Tensor, room: int) -> None:
        """Begin with rows [B G T W]. `room`: how many rows there will be at most, these
        included."""
        self.cache, self.length = cache, 0
        self.stored = _empty(rows, room)
        self.append(rows)

    def batched(
        self,
        indices: Sequence[GrowingRows],
        cache: CacheState,
        seen: int | PerSequence,
        dead: int | None,
    ) -> GrowingRows:
        """Return an index that reads and writes the rows of all `indices`, one per cache, for steps
        that their sequences take together. `cache`: the state of the joint step; `seen`: how many
        tokens each sequence has; `dead`: how many free slots follow the sequences."""
        return BatchedRows(indices, cache, dead)

    @property
    def filled(self) -> Tensor:
        """Return a view [B G length W] of the rows stored so far."""
        return self.stored[:, :, : self.length]

    def scores(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the products of queries with all stored rows, q [B G g W] -> [B G g length], and
        numbers whose largest is the largest product of a head, [B G g n], where they are known."""
        if not self.cache.counters.running:
            return ops.row_scores(q, self.filled), None
        scores, tops = ops.live_scores(q, self.stored, self.count())
        return filled(scores), tops

    def take_in(self, k: Tensor, basis: Tensor) -> NewPartial | None:
        """Append the key k [B G 1 D] of a new token, reduced to the columns of `basis` [B G D W].
        In a step that is captured, only return what is to be written: the caller does it, by
        `partial_products`, before the step ends."""
        if not self.cache.counters.running:
            self.append(k @ basis)
            return None
        new = NewPartial(k, basis, self.stored, self.count())
        self.length += 1
        return new

    def count(self) -> Tensor:
        """Return the number of stored rows as a tensor, [1] int64, or [B] if sequences differ."""
        return self.cache.counters.tensor(self.length, self.stored.device)

    def append(self, rows: Tensor) -> None:
        self.cache.counters.write(rows, self.stored, 2, self.length)
        self.length += rows.shape[2]

    def grow(self, more: int) -> None:
        """Make room for `more` rows. The tensor moves, so captured steps must not be replayed any
        more."""
        held = self.filled
        self.stored = _empty(held, self.stored.shape[2] + more)
        self.stored[:, :, : self.length] = held

    def keep_of_last(self, count: int, rows: Tensor) -> None:
        """Drop the last `count` rows except those that rows [B G K] name, numbered from the first
        of these `count`."""
        start = self.length - count
        kept = ops.gather_rows(self.filled[:, :, start:], rows)
        self.length = start + rows.shape[2]
        self.stored[:, :, start : self.length] = kept


class BatchedRows(GrowingRows):
    """Read and write the rows of several indices with a row per token, which may differ in length,
    in place: for steps that their sequences take together. The lengths of the single indices are
    updated later, by `count_replayed`."""

    def __init__(self, indices: Sequence[GrowingRows], cache: CacheState, dead: int | None) -> None:
        parts = [(part, rows.length) for rows in indices for part in rows.stored.split(1)]
        self.cache, self.length = cache, 0
        if parts[0][0].stride(3) == 1:
            self._rows = with_free_slots([part for part, _ in parts], dead=dead, wider=1)
        else:
            free = [_empty(parts[0][0], 1) for _ in range(dead or 0)]
            self._rows = Ragged([*(part for part, _ in parts), *free], dead=dead)
            self._rows.mT.alignment = BESIDE * parts[0][0].element_size()
        self._lengths = per_sequence([length for _, length in parts], dead)
        self.stored = cast(Tensor, self._rows)

    def count(self) -> Tensor:
        return self.cache.counters.first(self._lengths, self._rows.device)


def _empty(like: Tensor, room: int) -> Tensor:
    """Return zeros [B G room W] for rows like those of `like` [B G T W], by channel on a GPU, where
    `room` is rounded up, else by row (see `GrowingRows`)."""
    (batch, groups, _, width), beside = like.shape, -(-room // BESIDE) * BESIDE
    if queues(like.device):
        return like.new_zeros(batch, groups, width, beside).transpose(2, 3)
    return like.new_zeros(batch, groups, room + 1, width)[:, :, :room]
