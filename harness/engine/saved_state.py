"""What a cache knows in Python, kept and put back: capturing a step runs Python once, but nothing on the device."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, nn

from harness.engine.cache import KVCache
from methods.base import LayerSpec, Method, Request

_CONSTANT = (str, bytes, int, float, type, ModuleType, Tensor, nn.Module, LayerSpec, Method, Request)


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
            self._keep(inside)
