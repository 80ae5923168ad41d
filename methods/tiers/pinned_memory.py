"""Lends pinned host memory (which a GPU can read directly) for keys and values that arrive later.
It is pinned before any clock starts, and exactly as much as asked.

Torch pins memory when it creates a tensor there, which stalls the device, and rounds its size up to
a power of two (6.1 GB take 8.6). Memory that is registered with CUDA keeps its size and serves one
cache after the other."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from threading import Lock
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

# lets a GPU read memory in place; returns the function that undoes it
Pin = Callable[[Tensor], Callable[[], None]]
_PAGE = 4096  # bytes; whole pages are pinned
ALIGNED = 64  # bytes; rows begin at a multiple of it
# a pool pins so much at a time, so that many small conversations do not pin a piece each
STEP_BYTES = 64 << 20
_PARTS = 8  # the most tensors of rows in a layer: those of a codec, and a copy of the keys


def registered(memory: Tensor) -> Callable[[], None]:
    """Pin host memory for CUDA. Return a function that unpins it, once the GPU has done its work.
    Raises `RuntimeError` if the system does not allow so much locked memory."""
    cudart: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    _check(
        cudart.cudaHostRegister(address, memory.nbytes, 0),
        f"pin {memory.nbytes} bytes of host memory",
    )

    def undo() -> None:
        torch.cuda.synchronize()
        _check(cudart.cudaHostUnregister(address), f"unpin {memory.nbytes} bytes of host memory")

    return undo


def _check(result: Any, what: str) -> None:
    """Raise `RuntimeError` if `result`, which a CUDA function has returned, is an error. `what`:
    what was tried, in words. CUDA keeps its last error, and torch asks for it after each launch:
    something is launched here at once, so that no later call is blamed for this error."""
    try:
        torch.cuda.check_error(result)
    except RuntimeError as error:
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
        raise RuntimeError(
            f"CUDA could not {what} ({error}): raise the limit of locked memory (ulimit -l), or keep less there."
        ) from error


def reservation_bytes(layers: Sequence[int]) -> int:
    """Return how many bytes to reserve for a cache whose layers hold `layers` bytes of keys and
    values each, with room for alignment, in whole pages."""
    return -(-sum(map(_region_bytes, layers)) // _PAGE) * _PAGE


def _region_bytes(rows: int) -> int:
    return -(-rows // ALIGNED) * ALIGNED + _PARTS * ALIGNED if rows else 0


class Lease:
    """Represent the right to use a piece of lent memory: it is lent to nobody else for as long as
    something refers to this object."""


class Region:
    """Cut tensors out of a piece of lent memory; what a tensor took is free again when it is
    dropped. `_free` lists the free stretches as (start, end), in order; no two of them touch."""

    def __init__(self, memory: Tensor, lease: Lease) -> None:
        self._memory: Any = memory.numpy()
        self._lease = lease
        self._free = [(0, memory.nbytes)]
        self._freed = deque[tuple[int, int]]()

    def cut(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return an uninitialised tensor in this memory, with a storage of its own; while it lives,
        so does this object. None if no free stretch is long enough."""
        while self._freed:
            self._put_back(*self._freed.popleft())
        size = prod(shape) * dtype.itemsize
        room = -(-size // ALIGNED) * ALIGNED
        for at, (start, end) in enumerate(self._free):
            if end - start >= room > 0:
                self._free[at : at + 1] = [(start + room, end)] if end - start > room else []
                part = self._memory[start : start + size]
                finalize(part, self._note_freed, start, start + room)
                return torch.frombuffer(part, dtype=dtype).view(tuple(shape))
        return None

    def _note_freed(self, start: int, end: int) -> None:
        self._freed.append((start, end))  # from any thread, even one that holds a pool's lock

    def _put_back(self, start: int, end: int) -> None:
        first = at = bisect(self._free, (start, end))
        if at and self._free[at - 1][1] == start:
            first, start = at - 1, self._free[at - 1][0]
        if at < len(self._free) and self._free[at][0] == end:
            at, end = at + 1, self._free[at][1]
        self._free[first:at] = [(start, end)]


class PinnedReservation(NamedTuple):
    """Hold pinned host memory for keys and values of one cache, divided into one region per
    layer."""

    regions: list[Region]  # one per layer
    memory: Tensor  # uint8, contains all regions

    def spare(self, taken: Mapping[int, int]) -> int:
        """Return how many bytes of this memory hold no keys and values. `taken`: from the address
        of each tensor, in this memory or elsewhere, to its size in bytes."""
        place = range(self.memory.data_ptr(), self.memory.data_ptr() + self.memory.nbytes)
        return self.memory.nbytes - sum(size for address, size in taken.items() if address in place)


class _Pinned(NamedTuple):
    memory: Tensor
    undo: Callable[[], None]


class PinnedMemory:
    """Lend pinned host memory to the caches of a device and to the store of conversations. Memory
    that a borrower has released is lent again if it is large enough; otherwise it is unpinned
    before more is pinned."""

    def __init__(self, pin: Pin = registered) -> None:
        self._pin, self._idle, self._closed = pin, list[_Pinned](), False

    def reserve(self, layers: Sequence[int]) -> PinnedReservation:
        """Lend memory for a cache, as one region per layer. `layers`: the bytes that each layer
        will hold."""
        memory, lease = self.lend(reservation_bytes(layers))
        sizes = [_region_bytes(rows) for rows in layers]
        return PinnedReservation(
            [Region(part, lease) for part in memory[: sum(sizes)].split(sizes)], memory
        )

    def lend(self, size: int) -> tuple[Tensor, Lease]:
        """Lend `size` bytes: return them as a uint8 tensor [size], and a lease. The memory belongs
        to the caller as long as anything refers to the lease. Raises `RuntimeError` if the system
        does not allow so much locked memory."""
        if not size:  # CUDA refuses to pin nothing
            return torch.empty(0, dtype=torch.uint8), Lease()
        self._closed = False
        idle = list(self._pop_idle())
        enough = [other for other in idle if other.memory.nbytes >= size]
        pinned = min(enough, key=lambda other: other.memory.nbytes, default=None)
        for other in idle:
            if pinned is None:
                other.undo()
            elif other is not pinned:
                self._give_back(other)
        if pinned is None:
            whole = torch.empty(size + _PAGE, dtype=torch.uint8)
            memory = whole[-whole.data_ptr() % _PAGE :][:size]
            pinned = _Pinned(memory, self._pin(memory))
        lease = Lease()
        finalize(lease, self._give_back, pinned).atexit = False
        return pinned.memory[:size], lease

    def close(self) -> None:
        """Unpin all memory that is not lent, and the rest as soon as it is released, unless memory
        is lent again before."""
        self._closed = True
        self._unpin()

    def _give_back(self, pinned: _Pinned) -> None:
        self._idle.append(pinned)
        # within a capture nothing may wait for the device: the next `lend` or `close` unpins it
        captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if self._closed and not captures:
            self._unpin()

    def _unpin(self) -> None:
        for pinned in self._pop_idle():
            pinned.undo()

    def _pop_idle(self) -> Iterator[_Pinned]:
        """Remove and yield the pieces of memory that are not lent, one after the other; any thread
        may meanwhile release another, which is then yielded too."""
        while self._idle:
            with suppress(IndexError):
                yield self._idle.pop()


def pinned_bytes(expected: int, limit: int) -> int:
    """Return how many bytes of host memory are pinned where tensors of `expected` bytes in all are
    to be cut from it (`PinnedPool`): a multiple of 64 MiB, but at most `limit`."""
    return min(limit, -(-expected // STEP_BYTES) * STEP_BYTES)


class PinnedPool:
    """Cut tensors out of pinned host memory, of which it pins more on demand, up to `limit` bytes.
    Any thread may cut and release tensors; a released one makes room again. If `pinned_memory` is
    None, all tensors lie in ordinary memory."""

    def __init__(self, pinned_memory: PinnedMemory | None, limit: int) -> None:
        self._pinned_memory, self._limit, self._expected, self.bytes = pinned_memory, limit, 0, 0
        self._regions, self._lock = list[Region](), Lock()

    def expect(self, size: int) -> None:
        """Make sure that memory is pinned for `size` more bytes than expected so far, within the
        limit. Raises `RuntimeError` if the system does not allow so much locked memory."""
        self._expected += size
        lacking = pinned_bytes(self._expected, self._limit) - self.bytes
        if self._pinned_memory is None or lacking <= 0:
            return
        region = Region(*self._pinned_memory.lend(lacking))
        with self._lock:
            self._regions.append(region)
            self.bytes += lacking

    def cut(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor with a storage of its own: in pinned memory, or in
        ordinary memory if there is no room."""
        with self._lock:
            cut = (region.cut(shape, dtype) for region in self._regions)
            pinned = next((x for x in cut if x is not None), None)
        return torch.empty(tuple(shape), dtype=dtype) if pinned is None else pinned

    def close(self) -> None:
        """Give the memory back, each piece once no tensor lies in it. Tensors that are cut from now
        on lie in ordinary memory."""
        with self._lock:
            self._regions, self._limit, self.bytes = [], 0, 0
