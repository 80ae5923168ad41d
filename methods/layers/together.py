"""Lets several sequences take a step together: a layer whose store and indices are those of several layers.

A policy writes its step once. For one sequence its attributes are tensors and whole numbers; for several they are
`Ragged` and `Each` (kernels/ragged.py), which the operations take as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor

from kernels.ragged import Ragged, each
from methods.base import CacheState, KVLayer
from methods.layers.keep import Keep
from methods.layers.layer import Layer
from methods.layers.policy import Policy
from methods.layers.read import Read
from methods.pools.near import KVStore
from methods.pools.together import StoreOfSeveral
from methods.tiers.rows import DeviceRows


def alone_because(layer: KVLayer) -> str | None:
    """Say why a step of a sealed layer is taken for one sequence after the other, or return None."""
    if not isinstance(layer, Layer) or type(layer).decode is not Layer.decode:
        return f"{type(layer).__name__} attends for one sequence after the other"
    if (refusal := layer.capture_refusal()) is not None:
        return refusal
    if layer.far is not None:
        return "codes are decoded for one sequence after the other"
    if type(layer.store) is not KVStore:
        return "heads hold different numbers of tokens"
    strangers = [type(policy).__name__ for policy in layer.policies if type(policy).of_each is None]
    return f"{strangers[0]} chooses for one sequence after the other" if strangers else None


def form(layer: Layer) -> Hashable:
    """Return what layers must share to take steps together."""
    return type(layer), layer.method, layer.heads, layer.reads is not None and layer.reads.plan is not None


def together(layers: Sequence[Layer], cache: CacheState) -> Layer:
    """Return a layer whose `decode` takes one token of each sequence of `layers`, which are of one form. `cache`: what
    they step with; its request counts all sequences. What the layers count in Python is left to `count_replayed`."""
    one = copy(layers[0])
    one.cache = cache = cache.on(one.spec.device)
    one.request = cache.request
    one.store = StoreOfSeveral([layer.store for layer in layers], cache)
    one.sealed = cast(int, each([layer.sealed for layer in layers for _ in range(layer.request.batch)]))
    joined = {mine: _joined(policies, one) for mine, *policies in _policies(layers)}
    one.policies = tuple(joined.values())
    one.keeps = one.keeps and cast(Keep, joined[one.keeps])
    one.reads = one.reads and cast(Read[Any], joined[one.reads])
    one.attends = joined[one.attends]
    return one


def hand_back(one: Layer, layer: Layer, first: int) -> None:
    """Tell `layer`, whose sequences are number `first` and following of those of `one`, what the last step chose and
    changed."""
    own = slice(first, first + layer.request.batch)
    for joined, policy in zip(one.policies, layer.policies, strict=True):
        for name, dim in (type(joined).of_each or {}).items():
            if dim is None and (value := getattr(joined, name, None)) is not None:
                setattr(policy, name, value[own].clone())
    if one.reads is None or layer.reads is None or (rows := one.reads.rows) is None:
        return
    if isinstance(rows, Ragged):
        own_size = rows.sizes.values[first]
        layer.reads.rows = rows.whole[own, ..., :own_size]
    else:
        layer.reads.rows = rows[own]


def _tensor(value: Any) -> Tensor | None:
    """Return what a policy holds as a tensor."""
    tensor: Tensor | None = value.stored if isinstance(value, DeviceRows) else value
    return tensor


def _policies(layers: Sequence[Layer]) -> list[tuple[Policy, ...]]:
    """Return each policy of the first layer, and behind it the same of all layers."""
    return [(same[0], *same) for same in zip(*(layer.policies for layer in layers), strict=True)]


def _joined(policies: Sequence[Policy], layer: Layer) -> Policy:
    """Return a policy of `layer` for the sequences of all."""
    one = copy(policies[0])
    one.bind(layer)
    for name, dim in (type(one).of_each or {}).items():
        values = [_tensor(getattr(policy, name, None)) for policy in policies]
        tensors = [value for value in values if value is not None]
        if len(tensors) == len(values):
            parts = [part for value in tensors for part in value.split(1)]
            setattr(one, name, torch.cat(parts) if dim is None else Ragged(parts, dim))
    if isinstance(one, Read) and one.plan is not None:
        plans: list[Any] = [cast(Read[Any], policy).plan for policy in policies for _ in range(policy.request.batch)]
        joint: Any = type(one.plan)
        one.plan = joint(*map(each, zip(*plans, strict=True))) if isinstance(one.plan, tuple) else each(plans)
    return one
