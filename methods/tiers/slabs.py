"""Holds host memory for rows that are still to come: pinned before a clock starts, and as much as was asked for.

Torch pins memory while it makes a tensor there, for which the device stands still, and rounds it up to a power of two:
6.1 GB take 8.6. What is registered is as large as it is, and serves one cache after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

Pin = Callable[[Tensor], Callable[[], None]]  # lets a GPU read memory in place, and returns what undoes that
_PAGE = 4096  # bytes that are pinned together
ALIGNED = 64  # bytes: rows begin at a multiple
_PARTS = 8  # tensors of rows in a layer, at most: those of a codec, and a copy of the keys


def registered(memory: Tensor) -> Callable[[], None]:
    """Pin memory for CUDA, and return what undoes that once nothing moves any more. Raises `RuntimeError` where the
    system does not lock as much."""
    cudart: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    _check(cudart.cudaHostRegister(address, memory.nbytes, 0), f"pin {memory.nbytes} bytes of host memory")

    def undo() -> None:
        torch.cuda.synchronize()
        _check(cudart.cudaHostUnregister(address), f"unpin {memory.nbytes} bytes of host memory")

    return undo


def _check(result: Any, what: str) -> None:
    """Raise `RuntimeError` where CUDA could not do `what`. CUDA keeps such an error until somebody asks for the last
    one, which torch does after each launch: so that no other call is blamed for this one, launch something now."""
    try:
        torch.cuda.check_error(result)
    except RuntimeError as error:
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
        raise RuntimeError(
            f"CUDA could not {what} ({error}): raise the limit of locked memory (ulimit -l), or keep less there."
        ) from error


def slab_bytes(layers: Sequence[int]) -> int:
    """Return the bytes that a slab takes for rows of so many bytes in each layer."""
    return -(-sum(map(_region_bytes, layers)) // _PAGE) * _PAGE


def _region_bytes(rows: int) -> int:
    return -(-rows // ALIGNED) * ALIGNED + _PARTS * ALIGNED if rows else 0


class Lease:
    """Keeps memory from serving anybody else, as long as something refers to this."""


class Region:
    """Holds memory for the rows of one layer, one tensor behind the other. It starts anew once all of them are gone, as
    at the beginning of a further turn."""

    def __init__(self, memory: Tensor, lease: Lease) -> None:
        self._memory: Any = memory.numpy()
        self._lease = lease
        self._at = self._cuts = 0
        self._gone: list[None] = []

    def cut(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return a tensor with a storage of its own, or None where there is no room for it."""
        nbytes = prod(shape) * dtype.itemsize
        if len(self._gone) == self._cuts:
            self._at = 0
        if not nbytes or self._at + nbytes > len(self._memory):
            return None
        part = self._memory[self._at : self._at + nbytes]
        finalize(part, self._let_go)
        self._at += -(-nbytes // ALIGNED) * ALIGNED
        self._cuts += 1
        return torch.frombuffer(part, dtype=dtype).view(*shape)

    def _let_go(self) -> None:
        self._gone.append(None)  # from any thread


class Slab(NamedTuple):
    """Holds host memory for the rows of one cache, a region for each layer."""

    regions: list[Region]
    memory: Tensor  # [bytes], of all regions

    def spare(self, taken: Mapping[int, int]) -> int:
        """Return the bytes that no rows take, of which `taken` has the sizes by their addresses."""
        place = range(self.memory.data_ptr(), self.memory.data_ptr() + self.memory.nbytes)
        return self.memory.nbytes - sum(size for address, size in taken.items() if address in place)


class _Pinned(NamedTuple):
    memory: Tensor
    undo: Callable[[], None]


class Slabs:
    """Lends pinned memory to the caches of a device and to what keeps conversations between turns. What one of them has
    let go of serves the next one, if it is large enough; else it is unpinned before more is pinned."""

    def __init__(self, pin: Pin = registered) -> None:
        self._pin, self._idle, self._closed = pin, list[_Pinned](), False

    def slab(self, layers: Sequence[int]) -> Slab:
        """Return a slab with room for rows of so many bytes in each layer."""
        memory, lease = self.lent(slab_bytes(layers))
        sizes = [_region_bytes(rows) for rows in layers]
        return Slab([Region(part, lease) for part in memory[: sum(sizes)].split(sizes)], memory)

    def lent(self, size: int) -> tuple[Tensor, Lease]:
        """Return so many bytes [size], which are the caller's as long as anything refers to the lease. Raises
        `RuntimeError` where the system does not lock as much."""
        if not size:  # CUDA takes it for an error
            return torch.empty(0, dtype=torch.uint8), Lease()
        self._closed = False
        idle = list(self._taken())
        pinned = min((other for other in idle if other.memory.nbytes >= size), key=_size, default=None)
        for other in idle:
            if pinned is None:
                other.undo()
            elif other is not pinned:
                self._give_back(other)
        pinned = pinned or self._pinned(size)
        lease = Lease()
        finalize(lease, self._give_back, pinned).atexit = False
        return pinned.memory[:size], lease

    def close(self) -> None:
        """Unpin all that nobody has; the rest follows when it is let go of, unless somebody asks for more before."""
        self._closed = True
        self._unpin()

    def _pinned(self, size: int) -> _Pinned:
        whole = torch.empty(size + _PAGE, dtype=torch.uint8)
        start = -whole.data_ptr() % _PAGE
        memory = whole[start : start + size]
        return _Pinned(memory, self._pin(memory))

    def _give_back(self, pinned: _Pinned) -> None:
        self._idle.append(pinned)
        if self._closed:
            self._unpin()

    def _unpin(self) -> None:
        for pinned in self._taken():
            pinned.undo()

    def _taken(self) -> Iterator[_Pinned]:
        """One by one: any thread may drop the last thing that refers to a lease, and so give memory back meanwhile."""
        while self._idle:
            with suppress(IndexError):
                yield self._idle.pop()


def _size(pinned: _Pinned) -> int:
    return pinned.memory.nbytes
