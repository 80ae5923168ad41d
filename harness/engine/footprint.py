"""Bytes of a method's state, measured from outside: the storages of all tensors its layers hold, by tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from methods.base import KVLayer, LayerSpec, Method, Request
from methods.parts.stores import Tier

_DIAGNOSTIC = {"positions", "rows", "counts"}  # kept for the record, no part of the cache
_SHARED = (LayerSpec, Request, Method)  # descriptions and per-model work, not this sequence's state


@dataclass(frozen=True, slots=True)
class Footprint:
    device_bytes: int = 0
    host_bytes: int = 0


def footprint(layers: Sequence[KVLayer]) -> Footprint:
    """Whole storages are counted once, however many views there are; reserved but unused rows count as well."""
    sizes: dict[int, tuple[Tier, int]] = {}
    for layer in layers:
        for tensor, tier in _tensors(layer, "device", set()):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = (tier, storage.nbytes())
    device = sum(size for tier, size in sizes.values() if tier == "device")
    return Footprint(device, sum(size for _, size in sizes.values()) - device)


def _tensors(value: Any, tier: Tier, visited: set[int]) -> Iterator[tuple[Tensor, Tier]]:
    """Tensors reachable from `value`; an object with a `tier` decides for what it holds."""
    if isinstance(value, Tensor):
        yield value, tier
        return
    if isinstance(value, (str, bytes, int, float, type, *_SHARED)) or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, dict):
        inside: Any = value.values()
    elif isinstance(value, (list, tuple, set)):
        inside = value
    else:
        inside = [item for name, item in getattr(value, "__dict__", {}).items() if name not in _DIAGNOSTIC]
        tier = getattr(value, "tier", tier)
    for item in list(inside):
        yield from _tensors(item, tier, visited)
