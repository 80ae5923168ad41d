"""What a cache knows, kept and put back.

`SavedState` is the part in Python: capturing a step runs Python once, but nothing on the device. `Snapshot` is all of
it: a sealed cache answers one question, goes back, and answers the next as if it were the first.
"""

from __future__ import annotations

from operator import is_
from types import ModuleType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from harness.engine.cache import KVCache
from harness.engine.footprint import changing
from methods.base import LayerSpec, Method, Request
from methods.tiers.transfer.engine import Arrival, TransferEngine

_CONSTANT = (
    str, bytes, int, float, type, ref, ModuleType, Tensor, nn.Module, LayerSpec, Method, Request, TransferEngine,
    Arrival,
)  # fmt: skip
_LEAVES = {*_CONSTANT, bool, type(None)}  # the types of nearly all values: found sooner than by `isinstance`


class SavedState:
    """The attributes and containers of everything that hangs on `cache`, with their tensors by reference: their
    contents are the device's affair."""

    def __init__(self, cache: KVCache) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}  # a dict, list or set, and its copy
        self._keep(cache)

    def restore(self) -> None:
        """May be called once more after further changes."""
        for container, content in self._held.values():
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)

    def since(self, before: SavedState) -> SavedState:
        """Leave out what is as it was `before`: it may change in other ways until this is put back."""
        held = self._held.items()
        self._held = {at: kept for at, kept in held if not _same(kept[1], before._held.get(at, (None, None))[1])}
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
    """Whether a container holds the very objects that it held before."""
    if before is None or len(content) != len(before):
        return False
    if isinstance(content, dict):
        return all(name in before and before[name] is value for name, value in content.items())
    return content == before if isinstance(content, set) else all(map(is_, content, before))


class Snapshot:
    """A sealed cache as it is now. Copied is what decode steps may write to: counts, pools, caches, indices; stores of
    keys and values name the tensors that steps only append to (`steady`), and go back to their length."""

    def __init__(self, cache: KVCache) -> None:
        cache.traffic.settle()
        self._cache, self._python, visited = cache, SavedState(cache), set[int]()
        held = [tensor.untyped_storage() for root in (*cache.layers, cache.watch) for tensor in changing(root, visited)]
        self._contents = [(one, one.clone()) for one in {one.data_ptr(): one for one in held}.values()]

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(held.nbytes() for _, held in self._contents)

    def restore(self) -> None:
        """May be called again after further steps."""
        self._cache.traffic.settle()  # then nothing of these steps is left beside what Python counts
        self._python.restore()
        for storage, held in self._contents:
            storage.copy_(held)
