"""The cache that a model is handed for one step of several sequences, each of which has its own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from harness.engine.cache import KVCache
from kernels.ragged import each
from methods.base import AttnInput, CacheState, KVLayer
from methods.base.counters import StepCounters
from methods.layers import Layer
from methods.layers.together import alone_because, form, hand_back, link, together

CHECKED = "what a method returns is checked, or compared with exact attention, one sequence after the other"


class StepGroup(NamedTuple):
    """Members whose sequences take a layer's step together, or one member alone."""

    layer: KVLayer
    members: tuple[int, ...]
    rows: Tensor | slice  # of these members, among those of all


class Attending(NamedTuple):
    """How one member attends: in some layers alone, in others by the layer that it shares."""

    alone: list[KVLayer]
    together: list[tuple[Layer, Layer]]  # its own layer, and the shared one
    first: dict[int, int]  # where its sequences begin among those of a shared layer, by that layer's id
    lags: bool  # all of the method's layers are shared


class SlotsCache(KVCache):
    """Sealed caches of any lengths, each with as many rows as its request has sequences. What a method gives one of
    them does not depend on the others.

    Where a layer's policies let it, all members attend in one launch per operation. Where they attend one by one,
    `alone` says why.
    """

    def __init__(self, members: Sequence[KVCache], alone: str | None = None) -> None:
        """`alone`: let all attend one by one, for this reason."""
        super().__init__([layer for member in members for layer in member.layers], members[0].state)
        self._members = tuple(members)
        self._sizes = [member.state.request.batch for member in members]
        self._counters = StepCounters()
        self._counters.start()
        self.sealed = True
        self.num_tokens = max(member.num_tokens for member in members)
        self._joint_state = CacheState(
            replace(self.state.request, batch=sum(self._sizes), prepared=None), counters=self._counters
        )
        self._begins = each([member.num_tokens for member in members for _ in range(member.state.request.batch)])
        self.alone: str | None = None
        self._groups = self._grouped(alone)
        self._attending = [self._places(number) for number in range(len(members))]
        self._upto = [0] * len(members)  # steps that a member knows of
        self._fits = min(member.capacity - member.num_tokens for member in members)  # steps

    @property
    def members(self) -> tuple[KVCache, ...]:
        return self._members

    @property
    def counters(self) -> StepCounters:
        return self._counters

    @property
    def capacity(self) -> int:
        return max(member.capacity for member in self._members)

    def positions(self, count: int, device: torch.device) -> Tensor:
        """[B count], each row's own"""
        first = self._counters.first(self._begins, device).view(-1, 1).expand(sum(self._sizes), 1)
        return first if count == 1 else first + torch.arange(count, device=device)

    def begin(self) -> None:
        if self._counters.steps >= self._fits:
            self._refuse_full()
        for member, rows, attending in zip(self._members, self._sizes, self._attending, strict=True):
            if attending.alone:
                member.begin()
                member.expect(rows, 1)

    def end(self) -> None:
        for member, attending in zip(self._members, self._attending, strict=True):
            if attending.alone:
                member.end()
        self._counters.advance()
        self.num_tokens += 1

    def attend(self, layer: int, x: AttnInput) -> Tensor:
        """Attention of one layer for one token of each sequence. -> [B H 1 D]"""
        self.refuse_prompt(x.q.shape[2])
        groups = self._groups[layer]
        if len(groups) == 1:
            return self._attend(layer, groups[0], x)
        out = torch.empty_like(x.q)
        for group in groups:
            out[group.rows] = self._attend(layer, group, _rows_of(x, group.rows))
        return out

    def _attend(self, layer: int, group: StepGroup, x: AttnInput) -> Tensor:
        if len(group.members) > 1:
            return group.layer.decode(x)
        member = self._members[group.members[0]]
        return member.attend(layer, replace(x, start=member.num_tokens))

    def lags(self, member: int) -> bool:
        """Whether a member need not hear of each step: it attends together with others in all that a method does."""
        return self._attending[member].lags

    def behind(self, member: int) -> int:
        """Of how many steps a member has not heard."""
        return self._counters.steps - self._upto[member]

    def catch_up(self, member: int) -> int:
        """Bring a member up to date with the steps that were counted for all at once, and with what the last of them
        chose for it. -> how many steps it had not heard of"""
        steps, cache, attending = self.behind(member), self._members[member], self._attending[member]
        self._upto[member] += steps
        if steps and not attending.alone:
            cache.num_tokens += steps
        for layer, joint in attending.together if steps else ():
            layer.count_replayed(steps)
            hand_back(joint, layer, attending.first[id(joint)])
        return steps

    def count_replayed(self, steps: int) -> None:
        for member, attending in zip(self._members, self._attending, strict=True):
            if attending.alone:
                member.num_tokens += steps
                member.counters.steps += steps
            for layer in attending.alone:
                layer.count_replayed(steps)
        self._counters.steps += steps
        self.num_tokens += steps

    def _refuse_full(self) -> None:
        """Raise `RoomError`, of the member that has no room."""
        for number, (member, rows) in enumerate(zip(self._members, self._sizes, strict=True)):
            self.catch_up(number)
            member.expect(rows, 1)

    def _grouped(self, alone: str | None) -> list[list[StepGroup]]:
        """Which members take the step of each layer together: in all layers that can the same ones, since a method may
        link its layers."""
        by_layer = list(zip(*(member.layers for member in self._members), strict=True))
        reasons = [[alone or self._reason(*numbered) for numbered in enumerate(layers)] for layers in by_layer]
        self.alone = next((reason for of_layer in reasons for reason in of_layer if reason), None)
        forms = [
            tuple(
                None if reason else form(cast(Layer, layer)) for layer, reason in zip(member.layers, why, strict=True)
            )
            for member, why in zip(self._members, zip(*reasons, strict=True), strict=True)
        ]
        shared: dict[Hashable, Any] = {}
        groups, linked = [], []
        for layers, of_layer in zip(by_layer, reasons, strict=True):
            alike: dict[Hashable, list[int]] = {}
            for number, reason in enumerate(of_layer):
                alike.setdefault(number if reason else forms[number], []).append(number)
            groups.append([self._group(layers, numbers, shared) for numbers in alike.values()])
            joint = [group for group in groups[-1] if len(group.members) > 1]
            linked += [(cast(Layer, one.layer), [cast(Layer, layers[n]) for n in one.members]) for one in joint]
        link(linked)
        return groups

    def _reason(self, number: int, layer: KVLayer) -> str | None:
        """Why a member attends alone in a layer."""
        member = self._members[number]
        return CHECKED if member.watch is not None or member.state.checking else alone_because(layer)

    def _group(self, layers: Sequence[KVLayer], members: Sequence[int], shared: dict[Hashable, Any]) -> StepGroup:
        spans = [range(sum(self._sizes[:number]), sum(self._sizes[: number + 1])) for number in members]
        if len(members) == 1:
            return StepGroup(layers[members[0]], tuple(members), slice(spans[0].start, spans[0].stop))
        rows = [row for span in spans for row in span]
        state = replace(self._joint_state, request=replace(self._joint_state.request, batch=len(rows)))
        joint = together([cast(Layer, layers[number]) for number in members], state, shared)
        return StepGroup(joint, tuple(members), torch.tensor(rows, device=self.state.request.device))

    def _places(self, number: int) -> Attending:
        """How a member attends."""
        member, alone, joint = self._members[number], list[KVLayer](), list[tuple[Layer, Layer]]()
        first: dict[int, int] = {}
        for layer, groups in zip(member.layers, self._groups, strict=True):
            group = next(group for group in groups if number in group.members)
            if len(group.members) == 1:
                alone.append(layer)
                continue
            joint.append((cast(Layer, layer), cast(Layer, group.layer)))
            first[id(group.layer)] = sum(self._sizes[other] for other in group.members if other < number)
        lags = not {id(layer) for layer in alone} & {id(layer) for layer in member.method_layers}
        return Attending(alone, joint, first, lags)


def _rows_of(x: AttnInput, rows: Tensor | slice) -> AttnInput:
    """What some of the sequences see. Each has its own positions, so that all parts of x are [B ...]."""
    return AttnInput(x.q[rows], x.k[rows], x.v[rows], x.cos[rows], x.sin[rows], x.hidden[rows], x.start)
