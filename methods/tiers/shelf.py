"""Lends pinned host memory to tensors that come and go in any order, as blocks of conversations do between turns.

It is pinned before a clock starts, as much as its owner expects to need, in a few large slabs. A tensor that finds no
room there lies in ordinary memory, from which it travels more slowly: nothing is pinned when rows come.
"""

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

from methods.tiers.slabs import ALIGNED, Lease, Slabs

STEP_BYTES = 64 << 20  # at a time, so that many small conversations do not take a slab each


def pinned_bytes(expected: int, limit: int) -> int:
    """Return how many bytes a shelf pins for so many that are expected, where it may pin no more than `limit`."""
    return min(limit, -(-expected // STEP_BYTES) * STEP_BYTES)


class Shelf:
    """Cuts tensors out of memory that `slabs` lend, at most `limit` bytes of it. Any thread may cut and let go of them;
    what is gone makes room again. Without slabs all tensors lie in ordinary memory."""

    def __init__(self, slabs: Slabs | None, limit: int) -> None:
        self._slabs, self._limit, self._expected, self.bytes = slabs, limit, 0, 0
        self._boards, self._lock = list[_Board](), Lock()

    def expect(self, size: int) -> None:
        """Pin memory for so many bytes more than before. Raises `RuntimeError` where the system does not lock as
        much."""
        self._expected += size
        lacking = pinned_bytes(self._expected, self._limit) - self.bytes
        if self._slabs is None or lacking <= 0:
            return
        board = _Board(*self._slabs.lent(lacking))
        with self._lock:
            self._boards.append(board)
            self.bytes += lacking

    def cut(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor with a storage of its own, and anything in it."""
        size = prod(shape) * dtype.itemsize
        if not size or (part := self._part(size)) is None:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(part, dtype=dtype).view(tuple(shape))

    def close(self) -> None:
        """Return the memory to the slabs, each once no tensor lies there any more. Tensors that are cut from now on lie
        in ordinary memory."""
        with self._lock:
            self._boards, self._limit, self.bytes = [], 0, 0

    def _part(self, size: int) -> Any:
        with self._lock:
            parts = (board.part(size) for board in self._boards)
            return next((part for part in parts if part is not None), None)


class _Board:
    """Holds one slab and its free stretches, in their order, no two of which touch."""

    def __init__(self, memory: Tensor, lease: Lease) -> None:
        self._memory: Any = memory.numpy()
        self._lease = lease
        self._free = [(0, memory.nbytes)]
        self._gone = deque[tuple[int, int]]()

    def part(self, size: int) -> Any:
        """Return so many bytes, which keep this object as long as they last; None: no free stretch is as long."""
        while self._gone:
            self._put_back(*self._gone.popleft())
        room = -(-size // ALIGNED) * ALIGNED
        for at, (start, end) in enumerate(self._free):
            if end - start >= room:
                self._free[at : at + 1] = [(start + room, end)] if end - start > room else []
                part = self._memory[start : start + size]
                finalize(part, self._let_go, start, start + room)
                return part
        return None

    def _let_go(self, start: int, end: int) -> None:
        self._gone.append((start, end))  # from any thread, even one that holds the shelf's lock

    def _put_back(self, start: int, end: int) -> None:
        first = at = bisect(self._free, (start, end))
        if at and self._free[at - 1][1] == start:
            first, start = at - 1, self._free[at - 1][0]
        if at < len(self._free) and self._free[at][0] == end:
            at, end = at + 1, self._free[at][1]
        self._free[first:at] = [(start, end)]
