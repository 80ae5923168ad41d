"""Computes InfiniGen's partial keys (arXiv 2406.19707): a skew turns queries and keys so that few columns hold
most of a query, and the rows of partial keys grow with the tokens of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import ops
from kernels.lowrank import directions, gram
from kernels.per_sequence import PerSequence, per_sequence
from kernels.ragged import with_free_slots
from methods.base import CacheState
from methods.base.pieces import pieces, tokens_at_once


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
    return (columns * chosen.unsqueeze(2)).gather(3, at.unsqueeze(2).expand(-1, -1, columns.shape[2], -1))


class GrowingRows:
    """Hold an index with a row per token, [B G rows W], to which decode steps append. The memory is
    allocated beforehand, so that such a step can be captured in a CUDA graph.

    The row after each head's last one is zero: when several sequences step together, some may have
    shorter rows than others, and are read and written up to the longest row (`row_scores`)."""

    def __init__(self, cache: CacheState, rows: Tensor, room: int) -> None:
        """Begin with rows [B G T W]. `room`: how many rows there will be at most, these
        included."""
        self.cache, self.length = cache, 0
        self.stored = rows.new_zeros(*rows.shape[:2], room + 1, rows.shape[3])[:, :, :room]
        self.append(rows)

    def batched(
        self, indices: Sequence[GrowingRows], cache: CacheState, seen: int | PerSequence, dead: int | None
    ) -> GrowingRows:
        """Return an index that reads and writes the rows of all `indices`, one per cache, for steps
        that their sequences take together. `cache`: the state of the joint step; `seen`: how many
        tokens each sequence has; `dead`: how many free slots follow the sequences."""
        return BatchedRows(indices, cache, dead)

    @property
    def filled(self) -> Tensor:
        """Return a view [B G length W] of the rows stored so far."""
        return self.stored[:, :, : self.length]

    def scores(self, q: Tensor) -> Tensor:
        """Return the products of queries with all stored rows, q [B G g W] -> [B G g length]."""
        if not self.cache.counters.running:
            return cast(Tensor, ops.row_scores(q, self.filled))
        return cast(Tensor, ops.live_scores(q, self.stored, self.count()))

    def count(self) -> Tensor:
        """Return the number of stored rows as a tensor, [1] int64, or [B] if sequences differ."""
        return self.cache.counters.tensor(self.length, self.stored.device)

    def append(self, rows: Tensor) -> None:
        self.cache.counters.write(rows, self.stored, 2, self.length)
        self.length += rows.shape[2]

    def grow(self, more: int) -> None:
        """Make room for `more` rows. The tensor moves, so captured steps must not be replayed any
        more."""
        self.stored = pad(self.stored, (0, 0, 0, more + 1))[:, :, :-1]

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
        self.cache, self._rows = cache, with_free_slots([part for part, _ in parts], dead=dead, wider=1)
        self._lengths = per_sequence([length for _, length in parts], dead)
        self.stored = cast(Tensor, self._rows)

    def count(self) -> Tensor:
        return self.cache.counters.first(self._lengths, self._rows.device)

    def append(self, rows: Tensor) -> None:
        """Store one new row of each sequence, [B G 1 W], after its last one."""
        at = self.count().view(-1, 1, 1).expand(*rows.shape[:3])
        ops.put_rows(self._rows, at, rows)
