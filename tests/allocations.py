"""Counts the bytes of tensors that are alive, by a hook on every operation; on the CPU nothing else
reports the peak."""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from methods.tiers.rows import HostRows
from methods.tiers.tier import DEVICE, HOST
from tests.dispatched import tensors


class Allocations(TorchDispatchMode):
    """Count what operations allocate inside `with Allocations() as counted:`. `counted.peak`: the
    most bytes at a time; `counted.peaks`: the same per tier. Rows of the host tier count for the
    host, all else for the device.

    Memory that compiled kernels allocate for themselves is not seen, but the tensors that they
    write are. Files that are mapped for reading take no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.alive, self.peaks = Counter[str](), Counter[str]()
        self._tier = DEVICE  # of what is allocated now
        self._known: WeakSet[torch.UntypedStorage] = WeakSet()

    def __enter__(self) -> Any:
        self._room = vars(HostRows)["room"]

        def room(cls: Any, *args: Any) -> torch.Tensor:
            self._tier = HOST
            try:
                return self._room.__func__(cls, *args)
            finally:
                self._tier = DEVICE

        HostRows.room = classmethod(room)  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        HostRows.room = self._room  # type: ignore[method-assign]
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for x in tensors(out):
            if not x.is_meta and x.untyped_storage()._cdata not in given:
                self._count(x.untyped_storage(), mapped=func is torch.ops.aten.from_file.default)
        return out

    def _count(self, storage: torch.UntypedStorage, mapped: bool) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        if mapped:
            return
        size, tier = storage.nbytes(), self._tier
        self.alive[tier] += size
        self.peak = max(self.peak, self.alive.total())
        self.peaks[tier] = max(self.peaks[tier], self.alive[tier])
        finalize(storage, self._free, size, tier)

    def _free(self, size: int, tier: str) -> None:
        self.alive[tier] -= size
