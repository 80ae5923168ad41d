"""Counts the bytes of tensors that are alive, by a hook on every operation: on the CPU nothing else tells the peak."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet, finalize

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Allocations(TorchDispatchMode):
    """`with Allocations() as counted:` what operations inside the block allocate; `counted.peak` bytes at most at once.

    What compiled kernels take for themselves is not seen; the tensors that they write are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self._count(x.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.alive += size
        self.peak = max(self.peak, self.alive)
        finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.alive -= size
