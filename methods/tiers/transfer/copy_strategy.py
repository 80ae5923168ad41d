"""Chooses how rows get from host memory to the device, by the number and the size of the pieces in
which they lie."""

from __future__ import annotations

from enum import Enum, auto

BLOCK_BYTES = 64 * 1024  # from such pieces on a PCIe 5 link is full (vLLM PR 42212)


class CopyStrategy(Enum):
    """Name the three ways to copy rows from the host."""

    BLOCKS = auto()  # one copy for each piece
    KERNEL = auto()  # the device reads the pieces where they lie, in pinned memory
    COLLECTED = auto()  # the host gathers the pieces, and they go as one copy


def copy_strategy(pieces: int, piece_bytes: int, block_bytes: int, *, in_place: bool) -> CopyStrategy:
    """Return how `pieces` of `piece_bytes` each are copied. `in_place`: a kernel can read them,
    because they lie in pinned memory and their positions are on the device or known without
    waiting.

    A copy per piece fills the link if its piece is at least `block_bytes`, and leaves the device
    alone; with smaller pieces each copy takes longer to start than to move. A kernel reads all
    pieces at once but takes time of the device. Where neither is possible, the host gathers the
    pieces first."""
    if pieces == 1 or piece_bytes >= block_bytes:
        return CopyStrategy.BLOCKS
    return CopyStrategy.KERNEL if in_place else CopyStrategy.COLLECTED
