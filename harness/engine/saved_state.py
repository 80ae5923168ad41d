"""Saves the state of a cache and restores it.

`SavedState` saves the part in Python: capturing a step runs Python once, but nothing on the device.
`Snapshot` saves everything: a sealed cache answers one question, is restored, and answers the next
as if it were the first."""

from __future__ import annotations

from operator import is_
from types import ModuleType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from harness.engine.cache import KVCache
from harness.engine.footprint import changing
from methods.base import LayerSpec, Method, Request
from methods.tiers.transfer import Arrival, TransferEngine

_CONSTANT = (
    str, bytes, int, float, type, ref, ModuleType, Tensor, nn.Module, LayerSpec, Method, Request, TransferEngine,
    Arrival,
)  # fmt: skip
# the types of nearly all values; looking them up is faster than `isinstance`
_LEAVES = {*_CONSTANT, bool, type(None)}


class SavedState:
    """Save a copy of every list, dict, set and attribute dict reachable from `cache`, so that what
    a decode step changes in Python can be undone, or done again when a captured graph of the step
    is replayed. Tensors are saved as references: their contents are not copied."""

    def __init__(self, cache: KVCache) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}  # a dict, list or set, and its copy
        self._keep(cache)

    def restore(self) -> None:
        """Set every saved list, dict and set back to the content that it had. It may be called
        again after further changes."""
        for container, content in self._held.values():
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)

    def since(self, before: SavedState) -> SavedState:
        """Leave out of this saved state whatever is equal in the earlier one, `before`, so that
        restoring it changes only what differs. Return this object."""
        held = self._held.items()
        self._held = {
            at: kept
            for at, kept in held
            if not _same(kept[1], before._held.get(at, (None, None))[1])
        }
        return self

    def _keep(self, value: Any) -> None:
        if isinstance(value, _CONSTANT):
            return
        if not isinstance(value, (dict, list, set, tuple)):
            value = getattr(value, "__dict__", ())
        if id(value) in self._held:
            return
        if not isinstance(value, tuple):
            self._held[id(value)] = (value, value.copy())
        for inside in value.values() if isinstance(value, dict) else value:
            if type(inside) not in _LEAVES:
                self._keep(inside)


def _same(content: Any, before: Any) -> bool:
    """Return True if the container `content` holds the very same objects as `before`, an earlier
    copy of it; False if `before` is None (there was no such container)."""
    if before is None or len(content) != len(before):
        return False
    if isinstance(content, dict):
        return all(name in before and before[name] is value for name, value in content.items())
    return content == before if isinstance(content, set) else all(map(is_, content, before))


class Snapshot:
    """Save a sealed cache as it is now, to go back to this state after further steps. Tensors that
    decode steps may write to are copied: counts, pools, caches, indices. Stores of keys and values
    are not, since steps only append to them: going back sets their length back."""

    def __init__(self, cache: KVCache) -> None:
        cache.traffic.settle()
        self.cache, self._python, visited = cache, SavedState(cache), set[int]()
        held = [
            tensor.untyped_storage()
            for root in (*cache.layers, cache.states, cache.watch)
            for tensor in changing(root, visited)
        ]
        unique = {storage.data_ptr(): storage for storage in held}
        self._contents = [(storage, storage.clone()) for storage in unique.values()]

    @property
    def nbytes(self) -> int:
        """Return how many bytes the copies of the cache's tensors take."""
        return sum(copied.nbytes() for _, copied in self._contents)

    def restore(self) -> None:
        """Set the cache back to the state that was saved. It may be called again after further
        steps."""
        # moves what the device has counted of these steps into Python's counts
        self.cache.traffic.settle()
        self._python.restore()
        for storage, held in self._contents:
            storage.copy_(held)
