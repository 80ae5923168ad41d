"""Holds rows of one tensor that grow with the tokens of a layer, for an index that generated tokens enter too."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from kernels import ops
from methods.base import CacheState


class GrowingRows:
    """Holds rows in memory that is allocated beforehand, so that a step that appends can be captured."""

    def __init__(self, cache: CacheState, rows: Tensor, room: int) -> None:
        """Begin with rows [B G T W]; `room` counts all that there will be."""
        self.cache, self.length = cache, 0
        self.stored = rows.new_empty(*rows.shape[:2], room, rows.shape[3])
        self.append(rows)

    @property
    def filled(self) -> Tensor:
        """Return a view [B G length W] of the rows so far."""
        return self.stored[:, :, : self.length]

    def append(self, rows: Tensor) -> None:
        self.cache.counters.write(rows, self.stored, 2, self.length)
        self.length += rows.shape[2]

    def grow(self, more: int) -> None:
        """Make room for `more` rows. The tensor moves, so no step that was captured may go on."""
        self.stored = pad(self.stored, (0, 0, 0, more))

    def keep_of_last(self, count: int, rows: Tensor) -> None:
        """Let all of the last `count` rows go except `rows` [B G K]."""
        start = self.length - count
        kept = ops.gather_rows(self.filled[:, :, start:], rows)
        self.length = start + rows.shape[2]
        self.stored[:, :, start : self.length] = kept
