"""Gives a model one cache for a step of several sequences, each of which has a cache of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from harness.engine.cache import KVCache, Run
from harness.engine.states import ModelStates
from kernels.per_sequence import per_sequence
from kernels.ragged import Ragged
from kernels.step_inputs import StepInputs, to_device
from methods.base import AttnInput, Checks, KVLayer, NextRow
from methods.base.state import StepCounters
from methods.layers import Layer, Policy
from methods.layers.batched import Slots, alone_because, form, hand_back, link, together
from methods.tiers.traffic import Traffic

CHECKED = "what a method returns is checked, or compared with exact attention, one sequence after the other"


class StepGroup(NamedTuple):
    """Name the sequences of a joint decode step that compute one layer together, in one call on a
    shared layer object. A sequence that computes the layer by itself is a group of one. `members`:
    numbers of the sequences' caches in a `SlotsCache`."""

    layer: Layer | None  # what the members share; None: the only one computes its own layer
    members: tuple[int, ...]
    rows: Tensor | slice  # rows of these members and of free slots, among the rows of all members


class Attending(NamedTuple):
    """Say for one sequence of a joint decode step in which layers it computes attention alone, and
    in which together with other sequences through a shared layer object."""

    alone: list[KVLayer]
    # its own layer, the shared one, and the row in that with which its sequences begin
    together: list[tuple[Layer, Layer, int]]
    lags: bool  # all layers of the method are shared


class SlotsCache(KVCache):
    """Serve as the one cache of a decode step that several sequences take together, whatever their
    lengths. Each member is a sealed cache of its own, with as many rows of the batch as it has
    sequences. What a method computes for one of them does not depend on the others.

    Where a layer's policies allow it, all members attend in one launch per operation. Where they
    attend one by one, `alone` says why."""

    def __init__(
        self, members: Sequence[KVCache], alone: str | None = None, *, sized: bool = False
    ) -> None:
        """`alone`: a reason for which all members attend one by one. `sized`: where all attend
        together, take steps of a size that other sequences may use (`KVCache.step_inputs`), with
        slots for a power of two of sequences; the slots after the members' are free."""
        super().__init__([layer for member in members for layer in member.layers], members[0].state)
        self._members = tuple(members)
        self._sizes = [member.state.request.batch for member in members]
        # the row with which each member begins, and the one after the last
        self._starts = [0, *accumulate(self._sizes)]
        self.sealed = True
        self.num_tokens = max(member.num_tokens for member in members)
        checked = [member.watch is not None or member.state.checking for member in members]
        reasons = [
            [alone or (CHECKED if is_checked else alone_because(layer)) for layer in member.layers]
            for member, is_checked in zip(members, checked, strict=True)
        ]
        self.alone = next(
            (reason for by_member in zip(*reasons, strict=True) for reason in by_member if reason),
            None,
        )
        self._forms = [_forms(*pair) for pair in zip(members, reasons, strict=True)]
        self.step_inputs = StepInputs() if sized and self.alone is None else None
        self._free = self._slots()
        self.free = sum(map(len, self._free.values()))
        rows = self._starts[-1] + self.free
        request = replace(self.state.request, batch=rows, prepared=None)
        self.state = replace(
            self.state, request=request, traffic=Traffic(), counters=StepCounters(), checks=Checks()
        )
        self.counters.start()
        # numbers of members that step together -> their traffic
        self._traffic: dict[tuple[int, ...], Traffic] = {}
        begins = [
            member.num_tokens for member in members for _ in range(member.state.request.batch)
        ]
        self._begins = per_sequence(begins, None if self.step_inputs is None else self.free)
        self._groups = self._grouped(reasons)
        self._attending = [self._places(number) for number in range(len(members))]
        self._upto = [0] * len(members)  # steps that each member knows of
        # steps until one is full
        self._fits = min(member.capacity - member.num_tokens for member in members)
        self._record_inputs()
        states = [member.states for member in members if member.states is not None]
        self.states = ModelStates.joined(states, self.num_tokens) if states else None

    @property
    def members(self) -> tuple[KVCache, ...]:
        return self._members

    @property
    def capacity(self) -> int:
        return max(member.capacity for member in self._members)

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Return the positions [B count] of the next `count` tokens, each row's own."""
        first = self.counters.first(self._begins, device)
        first = first.view(-1, 1).expand(self.state.request.batch, 1)
        return first if count == 1 else first + torch.arange(count, device=device)

    def note_text(self, ids: Tensor, *, prompt: bool = False) -> None:
        for number, (member, own) in enumerate(
            zip(self._members, ids.split(self._sizes), strict=True)
        ):
            if member.fed.known == member.num_tokens + self._unheard(number):
                member.fed.parts.append(own)

    def text_lengths(self, arriving: int) -> list[int]:
        """Return the length of each row's text, by which the model rotates it."""
        return [
            length
            for number, (member, rows) in enumerate(zip(self._members, self._sizes, strict=True))
            for length in [member.note_length(member.num_tokens + self._unheard(number) + arriving)]
            * rows
        ]

    def _unheard(self, number: int) -> int:
        """Return how many decode steps member number `number`, one of the caches that step
        together, has not counted in its `num_tokens` yet. Some members are updated only now and
        then (`lags`)."""
        return 0 if self._attending[number].alone else self.behind(number)

    def begin(self, ids: Tensor | None = None) -> None:
        if self.counters.steps >= self._fits:
            for number, (member, rows) in enumerate(zip(self._members, self._sizes, strict=True)):
                self.catch_up(number)
                member.expect(rows, 1)  # which refuses it where no room is left
        for member, rows, attending in zip(
            self._members, self._sizes, self._attending, strict=True
        ):
            if attending.alone:
                member.begin()
                member.expect(rows, 1)

    def end(self) -> None:
        for member, attending in zip(self._members, self._attending, strict=True):
            if attending.alone:
                member.end()
        # all members of a group stand still while rows of one arrive
        for members, traffic in self._traffic.items():
            for own in (self._members[number].state.traffic for number in members):
                own.exposed_s += traffic.exposed_s
                own.hidden_s += traffic.hidden_s
            traffic.exposed_s = traffic.hidden_s = 0.0
        self.counters.advance()
        self.num_tokens += 1

    def next_row(self, layer: int) -> NextRow | None:
        """Return where layer `layer` stores the next token of each sequence, if all sequences
        attend together in it; else None."""
        first, *others = self._groups[layer]
        return None if first.layer is None or others else first.layer.next_row()

    def attend(self, layer: int, x: AttnInput) -> Tensor:
        """Compute attention of one layer for one token of each sequence. Return [B H 1 Dv]."""
        self.refuse_prompt(x.q.shape[2])
        groups = self._groups[layer]
        if len(groups) == 1:
            return self._attend(layer, groups[0], x)
        out = x.q.new_empty(*x.q.shape[:3], x.v.shape[3])
        for group in groups:
            out[group.rows] = self._attend(layer, group, _rows_of(x, group.rows))
        return out

    def lend(self, layer: int, x: AttnInput) -> Tensor:
        out = x.q.new_empty(*x.q.shape[:3], x.v.shape[3])
        for group in self._groups[layer]:
            own = _rows_of(x, group.rows)
            if group.layer is not None:
                out[group.rows] = group.layer.lend(own)
            else:
                out[group.rows] = self._members[group.members[0]].lend(layer, own)
        return out

    def advance_state(self, layer: int, run: Run, hidden: Tensor) -> Tensor:
        assert self.states is not None
        self.refuse_prompt(hidden.shape[1])
        return self.states.advance(layer, run, hidden, self.num_tokens)

    def _attend(self, layer: int, group: StepGroup, x: AttnInput) -> Tensor:
        if group.layer is not None:
            return group.layer.decode(x)
        member = self._members[group.members[0]]
        return member.attend(layer, replace(x, start=member.num_tokens))

    def lags(self, member: int) -> bool:
        """Return whether the counts of member number `member`, one of the caches that step
        together, may be updated later (by `catch_up`): it attends together with others in all
        layers of the method."""
        return self._attending[member].lags

    def behind(self, member: int) -> int:
        """Return how many decode steps are not yet counted in member number `member`, one of the
        caches that step together."""
        return self.counters.steps - self._upto[member]

    def catch_up(self, member: int) -> int:
        """Bring member number `member`, one of the caches that step together, up to date: count the
        steps that were counted for all at once, and give it what the last of them chose for it.
        Return how many steps were missing."""
        steps = self.behind(member)
        cache = self._members[member]
        attending = self._attending[member]
        self._upto[member] += steps
        if steps and not attending.alone:
            cache.num_tokens += steps
        for layer, joint, first in attending.together if steps else ():
            layer.count_replayed(steps)
            hand_back(joint, layer, first)
        if steps and self.states is not None and cache.states is not None:
            held = cache.num_tokens, self.num_tokens
            self.states.hand_back(cache.states, self._starts[member], *held)
        if steps and attending.together:
            _, joint, first = attending.together[0]
            joint.cache.traffic.hand_over(
                slice(first, first + self._sizes[member]), cache.state.traffic
            )
        return steps

    def steps_alike(self) -> float:
        """Return how many steps the members can take together before one must prepare for the next
        (`KVCache.prepare`). Layers that attend alone in plain steps do so by themselves."""
        layers = [layer for member in self._attending for layer, *_ in member.together]
        return min((layer.steps_alike() for layer in layers), default=inf)

    def count_replayed(self, steps: int) -> None:
        for member, attending in zip(self._members, self._attending, strict=True):
            if attending.alone:
                member.num_tokens += steps
                member.counters.steps += steps
            for layer in attending.alone:
                layer.count_replayed(steps)
        self.counters.steps += steps
        self.num_tokens += steps

    @property
    def form(self) -> Hashable:
        """Return a key that is equal for joint caches which may use each other's captured step
        (CUDA graph), after its inputs are replaced. It lists the kinds of layers (`form` in
        methods/layers/batched.py) and, for each, the number of slots, which are rows of the batch,
        used or free."""
        used = self._rows_by_form()
        return tuple((form_, used[form_] + len(free)) for form_, free in self._free.items())

    @property
    def policies(self) -> list[Policy]:
        """Return the policies of all layers that members share. A policy is a method's rule for
        what a layer keeps and reads, with what it remembers."""
        return [
            policy
            for groups in self._groups
            for group in groups
            if group.layer is not None
            for policy in group.layer.policies
        ]

    def results(self) -> list[dict[str, Any]]:
        """Return a copy of the attributes of each policy in `policies`. A step stores the tokens
        that it chose in some of these attributes; copies from before and after a step tell which.
        """
        return [dict(vars(policy)) for policy in self.policies]

    def joined(self) -> list[dict[str, Tensor]]:
        """Return, by name, the tensors that hold a state of all sequences together and that a step
        reads and changes: one mapping for each policy in `policies`, then one for each count of
        moved bytes."""
        return [
            *(policy.joined() for policy in self.policies),
            *(moved.tallies for moved in self._traffic.values()),
        ]

    def take_joined(self, joined: Sequence[Mapping[str, Tensor]]) -> None:
        """Use the tensors `joined` in the place of those that the method `joined` returns. They
        belong to a captured step (CUDA graph) that was made for other sequences, and a replay
        changes these very tensors."""
        count = len(self.policies)
        self.take_results(joined[:count])
        for traffic, tallies in zip(self._traffic.values(), joined[count:], strict=True):
            traffic.tallies = dict(tallies)

    def take_results(self, results: Sequence[Mapping[str, Tensor | Ragged]]) -> None:
        """Let the policies refer to the tensors in which a replayed step leaves the tokens that it
        chose; the step was captured (as a CUDA graph) for other sequences and writes to these very
        tensors. `results`: for each policy in `policies`, its tensors by the name of the attribute.
        """
        for policy, held in zip(self.policies, results, strict=True):
            for name, value in held.items():
                if isinstance(value, Ragged):
                    value = Ragged.filled_up(value.whole, getattr(policy, name).sizes, value.dim)
                setattr(policy, name, value)

    def _record_inputs(self) -> None:
        """Add to `step_inputs` the tensors of shared layers that a step reads and does not ask for
        as inputs by itself (rows of the batch, states of all sequences), so that the values of
        other sequences can be written into them when these use the captured step."""
        if self.step_inputs is None:
            return
        for groups in self._groups:
            for group in groups:
                self.step_inputs.add("rows", cast(Tensor, group.rows))
        for held in self.joined():
            for name, tensor in held.items():
                self.step_inputs.add(name, tensor)

    def _rows_by_form(self) -> Counter[Hashable]:
        """Return how many rows of the batch the members have whose layers are of each form."""
        rows = Counter[Hashable]()
        for form_, size in zip(self._forms, self._sizes, strict=True):
            rows[form_] += size
        return rows

    def _slots(self) -> dict[Hashable, range]:
        """Return which slots (rows of the batch, after those of all members) are free for each form
        of layers: in a step of a fixed size, as many as are missing to the next power of two; else
        none."""
        slots: dict[Hashable, range] = {}
        first = self._starts[-1]
        for form_, size in self._rows_by_form().items():
            free = 0 if self.step_inputs is None else (1 << (size - 1).bit_length()) - size
            slots[form_] = range(first, first + free)
            first += free
        return slots

    def _grouped(self, reasons: Sequence[Sequence[str | None]]) -> list[list[StepGroup]]:
        """Return, for each layer, the groups of members that take its step together. `reasons`: per
        member and layer, why it must step alone, or None. Members are grouped alike in all layers
        in which they can be, because a method may link its layers: one layer then reads what
        another has chosen."""
        shared: dict[Hashable, Any] = {}
        groups, linked = [], []
        by_layer = zip(*(member.layers for member in self._members), strict=True)
        for layers, layer_reasons in zip(by_layer, zip(*reasons, strict=True), strict=True):
            alike: dict[Hashable, list[int]] = {}
            for number, reason in enumerate(layer_reasons):
                alike.setdefault(number if reason else self._forms[number], []).append(number)
            groups.append([self._group(layers, numbers, shared) for numbers in alike.values()])
            linked += [
                (group.layer, [cast(Layer, layers[number]) for number in group.members])
                for group in groups[-1]
                if group.layer is not None
            ]
        link(linked)
        return groups

    def _group(
        self, layers: Sequence[KVLayer], members: Sequence[int], shared: dict[Hashable, Any]
    ) -> StepGroup:
        spans = [slice(self._starts[number], self._starts[number + 1]) for number in members]
        whose = tuple(members)
        if len(members) == 1 and self.step_inputs is None:
            return StepGroup(None, whose, spans[0])
        free = self._free[self._forms[members[0]]]
        rows = [*(row for span in spans for row in range(span.start, span.stop)), *free]
        request = replace(self.state.request, batch=len(rows))
        traffic = self._traffic.setdefault(whose, Traffic.batched(len(rows), request.device))
        state = replace(self.state, request=request, traffic=traffic)
        dead = None if self.step_inputs is None else len(free)
        joint = together(
            Slots([cast(Layer, layers[number]) for number in members], dead, shared), state
        )
        if (same := ("rows", *rows)) not in shared:
            shared[same] = to_device(rows, request.device)
        return StepGroup(joint, whose, shared[same])

    def _places(self, number: int) -> Attending:
        """Return in which layers member number `number`, one of the caches that step together,
        attends alone, and where it stands in the layers that it shares."""
        member, alone = self._members[number], list[KVLayer]()
        joint: list[tuple[Layer, Layer, int]] = []
        for layer, groups in zip(member.layers, self._groups, strict=True):
            group = next(group for group in groups if number in group.members)
            if group.layer is None:
                alone.append(layer)
                continue
            first = sum(self._sizes[other] for other in group.members if other < number)
            joint.append((cast(Layer, layer), group.layer, first))
        lags = not {id(layer) for layer in alone} & {id(layer) for layer in member.method_layers}
        return Attending(alone, joint, lags)


def _forms(member: KVCache, reasons: Sequence[str | None]) -> Hashable:
    """Return, for each layer of a member, the key by which it may attend together with other
    members (`form` in methods/layers/batched.py), None where it must attend alone. `reasons`: per
    layer why it must, or None. Members whose results are equal step together."""
    return tuple(
        None if reason else form(cast(Layer, layer))
        for layer, reason in zip(member.layers, reasons, strict=True)
    )


def _rows_of(x: AttnInput, rows: Tensor | slice) -> AttnInput:
    """Return the attention input of some of the sequences, those at `rows` of the batch. Each row
    has its own positions, so all parts of x are [B ...]."""
    index = None if x.index is None else x.index.part(rows)
    q, k, v, cos, sin, hidden = (part[rows] for part in (x.q, x.k, x.v, x.cos, x.sin, x.hidden))
    return AttnInput(q, k, v, cos, sin, hidden, x.start, index=index)
