"""The cache that a model is handed for one step of several sequences, each of which has its own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from harness.engine.cache import KVCache
from kernels.ragged import each
from methods.base import AttnInput, CacheState, KVLayer
from methods.base.counters import StepCounters
from methods.layers import Layer
from methods.layers.together import alone_because, form, hand_back, together

CHECKED = "what a method returns is checked, or compared with exact attention, one sequence after the other"


class StepGroup(NamedTuple):
    """Members whose sequences take a layer's step together, or one member alone."""

    layer: KVLayer
    members: tuple[int, ...]
    rows: Tensor | slice  # of these members, among those of all


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
        self.alone = alone
        self._joint_state = CacheState(
            replace(self.state.request, batch=sum(self._sizes), prepared=None), counters=self._counters
        )
        self._begins = each([member.num_tokens for member in members for _ in range(member.state.request.batch)])
        self._groups = [
            self._grouped(layers, alone) for layers in zip(*(member.layers for member in members), strict=True)
        ]

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
        for member, rows in zip(self._members, self._sizes, strict=True):
            member.begin()
            member.expect(rows, 1)

    def end(self) -> None:
        for member in self._members:
            member.end()
        for index, groups in enumerate(self._groups):
            for group in groups:
                for number in group.members if len(group.members) > 1 else ():
                    self._members[number].layers[index].count_replayed(1)
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

    def hand_back(self, member: int) -> None:
        """Bring the layers of a member up to what the last step chose for it."""
        for groups, layer in zip(self._groups, self._members[member].layers, strict=True):
            for group in groups:
                if member in group.members and len(group.members) > 1:
                    first = sum(self._sizes[other] for other in group.members if other < member)
                    hand_back(cast(Layer, group.layer), cast(Layer, layer), first)

    def count_replayed(self, steps: int) -> None:
        for member in self._members:
            member.count_replayed(steps)
        self._counters.steps += steps
        self.num_tokens += steps

    def _grouped(self, layers: Sequence[KVLayer], alone: str | None) -> list[StepGroup]:
        """Which members take the step of one layer together."""
        forms: dict[Hashable, list[int]] = {}
        for number, layer in enumerate(layers):
            member = self._members[number]
            looks_on = member.watch is not None or member.state.checking
            reason = alone or (CHECKED if looks_on else alone_because(layer))
            self.alone = self.alone or reason
            forms.setdefault(number if reason else form(cast(Layer, layer)), []).append(number)
        return [self._group([layers[number] for number in numbers], numbers) for numbers in forms.values()]

    def _group(self, layers: Sequence[KVLayer], members: Sequence[int]) -> StepGroup:
        spans = [range(sum(self._sizes[:number]), sum(self._sizes[: number + 1])) for number in members]
        if len(members) == 1:
            return StepGroup(layers[0], tuple(members), slice(spans[0].start, spans[0].stop))
        rows = [row for span in spans for row in span]
        state = replace(self._joint_state, request=replace(self._joint_state.request, batch=len(rows)))
        one = together(cast(Sequence[Layer], layers), state)
        return StepGroup(one, tuple(members), torch.tensor(rows, device=self.state.request.device))


def _rows_of(x: AttnInput, rows: Tensor | slice) -> AttnInput:
    """What some of the sequences see. Each has its own positions, so that all parts of x are [B ...]."""
    return AttnInput(x.q[rows], x.k[rows], x.v[rows], x.cos[rows], x.sin[rows], x.hidden[rows], x.start)
