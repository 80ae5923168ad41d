"""Lets several sequences take a step together, in a layer whose store and indices combine those of
several layers.

A policy writes its step once. For one sequence its attributes are tensors and whole numbers; for
several they are `Ragged` and `PerSequence` (kernels/ragged.py), which the operations accept as
well."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from typing import Any, NamedTuple, cast

import torch

from kernels.per_sequence import PerSequence, per_sequence
from kernels.ragged import with_free_slots
from methods.base import CacheState, KVLayer
from methods.layers.layer import Layer
from methods.layers.policy import Keep, Padded, Policy
from methods.layers.read import Read
from methods.parts.hit_cache import as_wide
from methods.pools.batched import BatchedHostRows, BatchedPool, BatchedStore
from methods.pools.device_store import KVStore
from methods.pools.pool import Pool
from methods.tiers.rows import HostRows, MemoryRows


def alone_because(layer: KVLayer) -> str | None:
    """Return why steps of a sealed layer are taken for one sequence after the other, or None."""
    kind = type(layer)
    if not isinstance(layer, Layer) or (kind.decode is not Layer.decode and "joined" not in vars(kind)):
        return f"{type(layer).__name__} attends for one sequence after the other"
    reasons = (
        layer.capture_refusal(),
        layer.together_refusal(),
        None if type(layer.store) is KVStore else "heads hold different numbers of tokens",
        *(policy.together_refusal() for policy in layer.policies),
    )
    return next((reason for reason in reasons if reason), None)


def form(layer: Layer) -> Hashable:
    """Return what layers must share to take steps together."""
    reads_all = layer.reads is None or layer.reads.plan is None
    far = None if layer.far is None else (layer.far.tier, layer.far.codec)
    return type(layer), layer.method, layer.heads, reads_all, far, tuple(policy.form() for policy in layer.policies)


class Slots(NamedTuple):
    """Hold the layers whose sequences take a step together, and `dead`, how many free slots follow
    them; None: there are no slots. `shared` maps the objects that layers of one sequence share to
    those for several sequences."""

    layers: Sequence[Layer]
    dead: int | None
    shared: dict[Hashable, Any]

    def of_rows(self, values: Sequence[int]) -> int | PerSequence:
        """Return one number per layer as one number per sequence."""
        counted = zip(values, self.layers, strict=True)
        return per_sequence([value for value, layer in counted for _ in range(layer.request.batch)], self.dead)


def together(slots: Slots, cache: CacheState) -> Layer:
    """Return a layer whose `decode` takes one token of each sequence of `slots.layers`, which are
    of one form. `cache`: the state of the joint step; its request counts all sequences and free
    slots. What the layers count in Python is updated by `count_replayed`."""
    layers = slots.layers
    for policy in (policy for layer in layers for policy in layer.policies):
        policy.settle()
    joint = copy(layers[0])
    joint.cache = cache = cache.on(joint.spec.device)
    joint.request = cache.request
    joint.store = BatchedStore([layer.store for layer in layers], cache, slots.dead)
    if layers[0].far is not None:
        pools = [layer.far for layer in layers if layer.far is not None]
        joint.far = cast(Pool, BatchedPool(pools, cache, slots.dead))
    joint.sealed = cast(int, slots.of_rows([layer.sealed for layer in layers]))
    joined = {mine: _joined(policies, joint, slots) for mine, *policies in _policies(layers)}
    joint.policies = tuple(joined.values())
    joint.keeps = joint.keeps and cast(Keep, joined[joint.keeps])
    joint.reads = joint.reads and cast(Read[Any], joined[joint.reads])
    joint.attends = joined[joint.attends]
    joint.joined(layers, slots.dead)
    return joint


def link(steps: Sequence[tuple[Layer, Sequence[Layer]]]) -> None:
    """Link the layers and policies of several sequences with each other, as those of one sequence
    are linked. `steps`: the layers that `together` has returned, with those that each is made
    of."""
    joint_layers = {id(layer): joint for joint, layers in steps for layer in layers}
    for joint, layers in steps:
        joint.link(layers, joint_layers)
    members = [
        (policy, others)
        for joint, layers in steps
        for policy, (_, *others) in zip(joint.policies, _policies(layers), strict=True)
    ]
    joint_policies = {id(other): policy for policy, others in members for other in others}
    for policy, others in members:
        policy.link(others, joint_policies)


def hand_back(joint: Layer, layer: Layer, first: int) -> None:
    """Give `layer`, whose sequences are number `first` and following of those of `joint`, what the
    last step chose and changed."""
    for joined, policy in zip(joint.policies, layer.policies, strict=True):
        joined.hand_back(policy, slice(first, first + layer.request.batch))


def _policies(layers: Sequence[Layer]) -> list[tuple[Policy, ...]]:
    """Return each policy of the first layer, followed by the same policy of all layers."""
    return [(same[0], *same) for same in zip(*(layer.policies for layer in layers), strict=True)]


def _joined(policies: Sequence[Policy], layer: Layer, slots: Slots) -> Policy:
    """Return a policy of the joint `layer` for the sequences of all layers."""
    joint = copy(policies[0])
    Policy.bind(joint, layer)  # a subclass's `bind` would reset it to a layer that has seen nothing
    for name, how in (type(joint).of_each or {}).items():
        values = [getattr(policy, name, None) for policy in policies]
        if all(value is not None for value in values):
            most = getattr(joint, how.most) if isinstance(how, Padded) and how.most is not None else None
            setattr(joint, name, _several(values, how, most, layer.cache, slots))
    if isinstance(joint, Read) and joint.plan is not None:
        joint.plan = _plan([cast(Read[Any], policy).plan for policy in policies], slots)
    return joint


def _plan(plans: Sequence[Any], slots: Slots) -> Any:
    """Return the joint plan of several sequences. Its sinks are the same for all, as part of their
    form."""
    if not isinstance(plans[0], tuple):
        return slots.of_rows(plans)
    numbers: Any = {name: [getattr(plan, name) for plan in plans] for name in plans[0]._fields}  # type: ignore[attr-defined]
    return type(plans[0])(
        **{name: same[0] if name == "sinks" else slots.of_rows(same) for name, same in numbers.items()}
    )


def _several(
    values: Sequence[Any], how: int | Padded | None, most: int | None, cache: CacheState, slots: Slots
) -> Any:  # fmt: skip
    """Return the joint value of an attribute whose values in several sequences are `values`."""
    if isinstance(values[0], int):
        return slots.of_rows(values)
    if hasattr(values[0], "batched"):
        same = tuple(map(id, values))
        if same not in slots.shared:
            seen = slots.of_rows([layer.seen for layer in slots.layers])
            slots.shared[same] = values[0].batched(values, cache, seen, slots.dead)
        return slots.shared[same]
    tensors = [value.stored if isinstance(value, MemoryRows) else value for value in values]
    parts = [part for tensor in tensors for part in tensor.split(1)]
    if isinstance(values[0], HostRows):
        assert isinstance(how, int)
        return BatchedHostRows(parts, cache.request.device, how, slots.dead)
    if isinstance(how, int):
        return with_free_slots(parts, how, slots.dead)
    if isinstance(how, Padded):
        joined = with_free_slots(parts, how.dim, slots.dead).whole
        return joined if most is None else as_wide(joined, most, how.dim).contiguous()
    return torch.cat([*parts, *(torch.zeros_like(parts[0]) for _ in range(slots.dead or 0))])
