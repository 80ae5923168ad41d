"""Measures the bytes of a method's state from outside: all tensors and files that its layers hold,
by tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import Tensor

from methods.base import CacheState, KVLayer, LayerSpec, Method, Request
from methods.layers import Policy
from methods.pools import KVStore
from methods.tiers.tier import DEVICE, HOST, TIERS, tier_of
from methods.tiers.transfer import TransferEngine

_SHARED = (
    LayerSpec,
    Request,
    CacheState,
    Method,
    TransferEngine,
)  # descriptions and per-model work, not this sequence's state
PLAIN = (str, bytes, int, float, type, ModuleType)


def footprint(layers: Sequence[KVLayer]) -> dict[str, int]:
    """Return the bytes that layers hold in memory or files, for every tier: device, host and disk
    (methods/tiers/tier.py).

    The memory of a tensor is counted once, however many views there are. If views belong to several
    tiers, it counts for the slowest: on a CPU, rows that came from the host are views of host
    memory. Reserved but unused rows count too, and so do pinned host memory for rows that are still
    to come, and files. Raises `ValueError` for a tier that is not in TIERS."""
    sizes: dict[int | Path, tuple[str, int]] = {}
    for layer in layers:
        for held, tier in _held(layer, DEVICE, set()):
            tier_of(tier)  # raises if the tier is unknown
            if isinstance(held, Path):
                sizes[held] = (tier, held.stat().st_size)
            else:
                storage = held.untyped_storage()
                known, _ = sizes.get(storage.data_ptr(), (tier, 0))
                sizes[storage.data_ptr()] = (
                    max(known, tier, key=list(TIERS).index),
                    storage.nbytes(),
                )
    totals = dict.fromkeys(TIERS, 0)
    for tier, size in sizes.values():
        totals[tier] += size
    by_address = {place: size for place, (_, size) in sizes.items() if isinstance(place, int)}
    reservations = {
        id(reservation): reservation
        for layer in layers
        if (reservation := layer.request.reservation) is not None
    }
    totals[HOST] += sum(reservation.spare(by_address) for reservation in reservations.values())
    return totals


def unused_bytes(layers: Sequence[KVLayer]) -> int:
    """Return how many of the bytes that layers hold are reserved for tokens to come."""
    stores = [getattr(layer, "store", None) for layer in layers]
    return sum(store.unused_bytes for store in stores if isinstance(store, KVStore))


def _held(value: Any, tier: str, visited: set[int]) -> Iterator[tuple[Tensor | Path, str]]:
    """Yield the tensors and files reachable from `value`, each with the tier (device, host or disk)
    that it lies in. `tier`: that of `value`; an object with a `tier` decides for what it holds."""
    if isinstance(value, Tensor) or (isinstance(value, Path) and tier_of(tier).in_files):
        yield value, tier
        return
    if isinstance(value, (*PLAIN, *_SHARED)) or id(value) in visited:
        return
    visited.add(id(value))
    tier = getattr(value, "tier", tier)
    diagnostics = value.diagnostics if isinstance(value, (KVLayer, Policy)) else ()
    for inside in list(held_by(value, diagnostics)):
        yield from _held(inside, tier, visited)


def changing(value: Any, visited: set[int]) -> Iterator[Tensor]:
    """Yield the tensors reachable from `value` that a decode step may write to: all but those that
    a store of keys and values names in `steady`, to which steps only append. (What a step writes
    there, `KVStore.write` writes to copies.)"""
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, (*PLAIN, *_SHARED)) and id(value) not in visited:
        visited.add(id(value))
        for inside in list(held_by(value, getattr(value, "steady", ()))):
            yield from changing(inside, visited)


def held_by(value: Any, left_out: Collection[str]) -> Iterable[Any]:
    """Return all objects that `value` refers to (elements, attributes, arguments bound to a
    function), except by the attributes `left_out`."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, FunctionType):
        return (*(value.__defaults__ or ()), *_closed_over(value))
    return (inside for name, inside in _attributes(value) if name not in left_out)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes: those in `__dict__` and those in the slots of its class and
    base classes."""
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        for name in [
            name for name, member in vars(cls).items() if isinstance(member, MemberDescriptorType)
        ]:
            with suppress(AttributeError):  # never set
                yield name, vars(cls)[name].__get__(value)


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not bound yet
            yield cell.cell_contents
