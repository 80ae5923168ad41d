"""Chooses how rows get from host memory to the device, by the size and the number of the pieces in which they lie."""

from __future__ import annotations

from enum import Enum, auto

BLOCK_BYTES = 64 * 1024  # from such pieces on a PCIe 5 link is full (vLLM PR 42212)


class CopyStrategy(Enum):
    """Names the three ways."""

    BLOCKS = auto()  # one copy for each piece
    KERNEL = auto()  # the device reads the pieces where they lie, in pinned memory
    COLLECTED = auto()  # the host gathers the pieces, and they go as one copy


def copy_strategy(pieces: int, piece_bytes: int, block_bytes: int, *, in_place: bool) -> CopyStrategy:
    """Return how `pieces` of so many bytes travel. `in_place`: a kernel can read them, since they lie in pinned memory
    and their numbers on the device, or are known without looking.

    A copy of its own fills the link if its piece is large, and leaves the device alone; of small pieces each copy takes
    longer to begin than to move. A kernel asks for all of them at once, but takes the device's time. The host gathers
    what neither can."""
    if pieces == 1 or piece_bytes >= block_bytes:
        return CopyStrategy.BLOCKS
    return CopyStrategy.KERNEL if in_place else CopyStrategy.COLLECTED
