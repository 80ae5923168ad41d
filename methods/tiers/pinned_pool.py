"""Lends pinned host memory to tensors that come and go in any order, as blocks of conversations do
between turns.

As much as its owner expects to need is pinned before a clock starts, in a few large pieces. A
tensor that finds no room there lies in ordinary memory, from which it moves more slowly; nothing is
pinned when rows arrive."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from math import prod
from threading import Lock
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from methods.tiers.pinned_memory import ALIGNED, Lease, PinnedMemory

STEP_BYTES = 64 << 20  # pinned at a time, so that many small conversations do not pin a piece each


def pinned_bytes(expected: int, limit: int) -> int:
    """Return how many bytes a pool pins when `expected` bytes are needed and it may pin at most
    `limit`."""
    return min(limit, -(-expected // STEP_BYTES) * STEP_BYTES)


class PinnedPool:
    """Cut tensors out of pinned memory, at most `limit` bytes of it. Any thread may cut and release
    them; a released tensor makes room again. If `pinned_memory` is None, all tensors lie in
    ordinary memory."""

    def __init__(self, pinned_memory: PinnedMemory | None, limit: int) -> None:
        self._pinned_memory, self._limit, self._expected, self.bytes = pinned_memory, limit, 0, 0
        self._pieces, self._lock = list[_Piece](), Lock()

    def expect(self, size: int) -> None:
        """Pin memory for `size` more bytes. Raises `RuntimeError` if the system does not lock as
        much."""
        self._expected += size
        lacking = pinned_bytes(self._expected, self._limit) - self.bytes
        if self._pinned_memory is None or lacking <= 0:
            return
        piece = _Piece(*self._pinned_memory.lend(lacking))
        with self._lock:
            self._pieces.append(piece)
            self.bytes += lacking

    def cut(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor with a storage of its own."""
        size = prod(shape) * dtype.itemsize
        if not size or (part := self._part(size)) is None:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(part, dtype=dtype).view(tuple(shape))

    def close(self) -> None:
        """Give the memory back, each piece once no tensor lies in it. Tensors that are cut from now
        on lie in ordinary memory."""
        with self._lock:
            self._pieces, self._limit, self.bytes = [], 0, 0

    def _part(self, size: int) -> Any:
        with self._lock:
            parts = (piece.part(size) for piece in self._pieces)
            return next((part for part in parts if part is not None), None)


class _Piece:
    """Hold one piece of lent memory and the list of its free stretches, in order; no two of them
    touch."""

    def __init__(self, memory: Tensor, lease: Lease) -> None:
        self._memory: Any = memory.numpy()
        self._lease = lease
        self._free = [(0, memory.nbytes)]
        self._freed = deque[tuple[int, int]]()

    def part(self, size: int) -> Any:
        """Return `size` bytes, which keep this object alive; None if no free stretch is long
        enough."""
        while self._freed:
            self._put_back(*self._freed.popleft())
        room = -(-size // ALIGNED) * ALIGNED
        for at, (start, end) in enumerate(self._free):
            if end - start >= room:
                self._free[at : at + 1] = [(start + room, end)] if end - start > room else []
                part = self._memory[start : start + size]
                finalize(part, self._note_freed, start, start + room)
                return part
        return None

    def _note_freed(self, start: int, end: int) -> None:
        self._freed.append((start, end))  # from any thread, even one that holds the pool's lock

    def _put_back(self, start: int, end: int) -> None:
        first = at = bisect(self._free, (start, end))
        if at and self._free[at - 1][1] == start:
            first, start = at - 1, self._free[at - 1][0]
        if at < len(self._free) and self._free[at][0] == end:
            at, end = at + 1, self._free[at][1]
        self._free[first:at] = [(start, end)]
