"""Lets several sequences take a step together: a layer whose store and indices are those of several layers.

A policy writes its step once. For one sequence its attributes are tensors and whole numbers; for several they are
`Ragged` and `Each` (kernels/ragged.py), which the operations take as well.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from typing import Any, cast

import torch

from kernels.ragged import Each, Ragged, each
from methods.base import CacheState, KVLayer
from methods.layers.keep import Keep
from methods.layers.layer import Layer
from methods.layers.policy import Padded, Policy
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
    reads_all = layer.reads is None or layer.reads.plan is None
    return type(layer), layer.method, layer.heads, reads_all, tuple(policy.form() for policy in layer.policies)


def together(layers: Sequence[Layer], cache: CacheState, shared: dict[Hashable, Any]) -> Layer:
    """Return a layer whose `decode` takes one token of each sequence of `layers`, which are of one form. `cache`: what
    they step with; its request counts all sequences. `shared`: what the layers of several sequences share, as those of
    one do; the same for all of them. What the layers count in Python is left to `count_replayed`."""
    one = copy(layers[0])
    one.cache = cache = cache.on(one.spec.device)
    one.request = cache.request
    one.store = StoreOfSeveral([layer.store for layer in layers], cache)
    one.sealed = cast(int, _of_rows([layer.sealed for layer in layers], layers))
    joined = {mine: _joined(policies, layers, one, shared) for mine, *policies in _policies(layers)}
    one.policies = tuple(joined.values())
    one.keeps = one.keeps and cast(Keep, joined[one.keeps])
    one.reads = one.reads and cast(Read[Any], joined[one.reads])
    one.attends = joined[one.attends]
    return one


def link(steps: Sequence[tuple[Layer, Sequence[Layer]]]) -> None:
    """Let the policies of several sequences find each other, where those of one do. `steps`: the layers that
    `together` has returned, with those that each is made of."""
    of_members = [
        (mine, others)
        for one, layers in steps
        for mine, (_, *others) in zip(one.policies, _policies(layers), strict=True)
    ]
    joint = {id(other): mine for mine, others in of_members for other in others}
    for mine, others in of_members:
        mine.link(others, joint)


def hand_back(one: Layer, layer: Layer, first: int) -> None:
    """Tell `layer`, whose sequences are number `first` and following of those of `one`, what the last step chose and
    changed."""
    for joined, policy in zip(one.policies, layer.policies, strict=True):
        joined.hand_back(policy, slice(first, first + layer.request.batch))


def _of_rows(values: Sequence[int], layers: Sequence[Layer]) -> int | Each:
    """Return a number that layers have as that of their sequences."""
    return each([value for value, layer in zip(values, layers, strict=True) for _ in range(layer.request.batch)])


def _policies(layers: Sequence[Layer]) -> list[tuple[Policy, ...]]:
    """Return each policy of the first layer, and behind it the same of all layers."""
    return [(same[0], *same) for same in zip(*(layer.policies for layer in layers), strict=True)]


def _joined(policies: Sequence[Policy], layers: Sequence[Layer], one: Layer, shared: dict[Hashable, Any]) -> Policy:
    """Return a policy of the layer `one` for the sequences of all `layers`."""
    joint = copy(policies[0])
    Policy.bind(joint, one)  # what subclasses begin with is that of a layer which has seen nothing
    for name, how in (type(joint).of_each or {}).items():
        values = [getattr(policy, name, None) for policy in policies]
        if all(value is not None for value in values):
            setattr(joint, name, _several(values, how, layers, one.cache, shared))
    if isinstance(joint, Read) and joint.plan is not None:
        plans = [cast(Read[Any], policy).plan for policy in policies]
        numbers: Any = zip(*plans, strict=True) if isinstance(joint.plan, tuple) else [plans]
        joined: list[Any] = [_of_rows(same, layers) for same in numbers]
        joint.plan = type(joint.plan)(*joined) if isinstance(joint.plan, tuple) else joined[0]
    return joint


def _several(
    values: Sequence[Any], how: int | Padded | None, layers: Sequence[Layer], cache: CacheState,
    shared: dict[Hashable, Any],
) -> Any:  # fmt: skip
    """Return what several sequences have in the place of `values`."""
    if isinstance(values[0], int):
        return _of_rows(values, layers)
    if hasattr(values[0], "of_several"):
        same = tuple(map(id, values))
        if same not in shared:
            shared[same] = values[0].of_several(values, cache, _of_rows([layer.seen for layer in layers], layers))
        return shared[same]
    tensors = [value.stored if isinstance(value, DeviceRows) else value for value in values]
    parts = [part for tensor in tensors for part in tensor.split(1)]
    if isinstance(how, Padded):
        return Ragged(parts, how.dim).whole
    return torch.cat(parts) if how is None else Ragged(parts, how)
