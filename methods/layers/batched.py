"""Lets several sequences, each with a cache of its own, take a decode step together. Their layers
at the same place of the model are combined in a joint layer, whose store, indices and policies read
and write the memory of all of them.

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
    """Return the reason, in words for the record, for which this sealed layer must take its decode
    steps apart from those of other sequences; None if it can share them."""
    kind = type(layer)
    if not isinstance(layer, Layer) or (
        kind.decode is not Layer.decode and "joined" not in vars(kind)
    ):
        return f"{type(layer).__name__} attends for one sequence after the other"
    whole = type(layer.store) is KVStore
    reasons = (
        layer.capture_refusal(),
        layer.together_refusal(),
        None
        if whole or layer.spec.sink_logits is None
        else "heads with sink logits hold different numbers of tokens",
        *(policy.together_refusal() for policy in layer.policies),
    )
    return next((reason for reason in reasons if reason), None)


def form(layer: Layer) -> Hashable:
    """Return a key that is equal for layers of different sequences if they can share a decode step.
    It holds what one launch for all of them takes for granted: the classes, the method, the number
    of heads, whether everything is read, and where and how tokens outside the store are held. If a
    step reads all tokens outside the store, it also holds whether any are encoded and whether any
    are plain."""
    reads_all = layer.reads is None or layer.reads.plan is None
    far = None if layer.far is None else (layer.far.tier, layer.far.codec)
    whole = (
        ()
        if layer.far is None or layer.reads
        else (layer.far.encoded > 0, layer.far.encoded < layer.far.length)
    )
    return (
        type(layer),
        layer.method,
        type(layer.store),
        layer.heads,
        reads_all,
        far,
        whole,
        tuple(policy.form() for policy in layer.policies),
    )


class Slots(NamedTuple):
    """Hold the layers that one joint decode step serves, each for one or more sequences. `dead`:
    how many free slots follow their sequences, so that a captured step has places for sequences
    that join later; None if the step has no slots. `shared`: the joint objects made so far, by the
    ids of the objects that they combine. All layers of a sequence share some objects, such as its
    table of rotations, and by `shared` the joint layers share the joint one."""

    layers: Sequence[Layer]
    dead: int | None
    shared: dict[Hashable, Any]

    def of_rows(self, values: Sequence[int]) -> int | PerSequence:
        """Return one number per sequence, given one number per layer; free slots get 0."""
        counted = zip(values, self.layers, strict=True)
        return per_sequence(
            [value for value, layer in counted for _ in range(layer.request.batch)], self.dead
        )


def together(slots: Slots, cache: CacheState) -> Layer:
    """Return a joint layer whose `decode` takes one token of each sequence of `slots.layers`. These
    layers must have equal keys (`form`). `cache`: the state of the joint step, whose request counts
    all sequences and free slots. The layers' own lengths do not change in a joint step:
    `count_replayed` of each updates them later."""
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
    joint.acting = []  # each of `layers` has prepared for steps in which it does not act
    joint.sealed = cast(int, slots.of_rows([layer.sealed for layer in layers]))
    joined = {mine: _joined(policies, joint, slots) for mine, *policies in _policies(layers)}
    joint.policies = tuple(joined.values())
    joint.keeps = joint.keeps and cast(Keep, joined[joint.keeps])
    joint.reads = joint.reads and cast(Read[Any], joined[joint.reads])
    joint.attends = joined[joint.attends]
    joint.joined(layers, slots.dead)
    return joint


def link(steps: Sequence[tuple[Layer, Sequence[Layer]]]) -> None:
    """Connect the joint layers of a model, and their policies, with one another. It does something
    only for methods whose layers refer to other layers, as when one asks for the rows of the next.
    `steps`: each joint layer that `together` has returned, with the layers of single sequences for
    which it stands."""
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
    """Copy to `layer`, one of the layers that `joint` stands for, what the last joint step chose
    and changed. `first`: where the sequences of `layer` begin among those of `joint`."""
    for joined, policy in zip(joint.policies, layer.policies, strict=True):
        joined.hand_back(policy, slice(first, first + layer.request.batch))


def _policies(layers: Sequence[Layer]) -> list[tuple[Policy, ...]]:
    """Return a tuple for each policy of the first layer: that policy, followed by the corresponding
    policies of all layers, the first one's included."""
    return [(same[0], *same) for same in zip(*(layer.policies for layer in layers), strict=True)]


def _joined(policies: Sequence[Policy], layer: Layer, slots: Slots) -> Policy:
    """Return a policy for the joint `layer`: a copy of the first of `policies` whose attributes
    named in `of_each` combine those of all. `policies`: corresponding policies, one per layer of
    `slots`."""
    joint = copy(policies[0])
    Policy.bind(joint, layer)  # a subclass's `bind` would reset it to a layer that has seen nothing
    for name, how in (type(joint).of_each or {}).items():
        values = [getattr(policy, name, None) for policy in policies]
        if all(value is not None for value in values):
            setattr(joint, name, _several(joint, values, how, slots))
    if isinstance(joint, Read) and joint.plan is not None:
        joint.plan = _plan([cast(Read[Any], policy).plan for policy in policies], slots)
    return joint


def _plan(plans: Sequence[Any], slots: Slots) -> Any:
    """Combine the plans of several sequences, which say how many tokens of each kind a step reads,
    into one with a number per sequence. The number of sinks (first tokens) stays one number, since
    sequences that step together have equally many."""
    if not isinstance(plans[0], tuple):
        return slots.of_rows(plans)
    kind: Any = type(plans[0])
    each = zip(kind._fields, zip(*plans, strict=True), strict=True)
    return kind(*(same[0] if name == "sinks" else slots.of_rows(same) for name, same in each))


def _several(joint: Policy, values: Sequence[Any], how: int | Padded | None, slots: Slots) -> Any:
    """Return what the policy `joint` has in place of an attribute whose values in the single layers
    are `values`. `how`: the attribute's entry in `Policy.of_each`."""
    if isinstance(values[0], int):
        return slots.of_rows(values)
    if hasattr(values[0], "batched"):
        same = tuple(map(id, values))
        if same not in slots.shared:
            seen = slots.of_rows([layer.seen for layer in slots.layers])
            slots.shared[same] = values[0].batched(values, joint.cache, seen, slots.dead)
        return slots.shared[same]
    tensors = [value.stored if isinstance(value, MemoryRows) else value for value in values]
    parts = [part for tensor in tensors for part in tensor.split(1)]
    if isinstance(values[0], HostRows):
        assert isinstance(how, int)
        return BatchedHostRows(parts, joint.request.device, how, slots.dead)
    if isinstance(how, int):
        return with_free_slots(parts, how, slots.dead)
    if isinstance(how, Padded):
        joined = with_free_slots(parts, how.dim, slots.dead).whole
        if how.most is None:
            return joined
        return as_wide(joined, getattr(joint, how.most), how.dim).contiguous()
    return torch.cat([*parts, *(torch.zeros_like(parts[0]) for _ in range(slots.dead or 0))])
