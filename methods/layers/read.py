"""Defines policies that choose what a step reads of a prompt: `Read` in general, and `Select`, which reads
sinks, a window, and single tokens between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import ops
from kernels.ragged import Ragged, filled
from kernels.reference import Segment, without_missing
from kernels.step_inputs import to_device
from methods.base import Attended, AttnInput, Plan, Reading, over_steps
from methods.layers.indices import union_per_kv_head
from methods.layers.policy import Policy
from methods.layers.returned import ReturnedError
from methods.layers.weights import ChoiceWeights
from methods.tiers.tier import DEVICE
from methods.tiers.transfer import Arrival

PlanT = TypeVar("PlanT")  # says how a budget is spent


class Read(Policy, ABC, Generic[PlanT], capturable=True):
    """Choose in each decode step the part of the stored prompt that the step reads.

    If the budget covers what is stored, all of it is read, and the methods below are not called,
    except under the ability `Mass`, for which all tokens are candidates then. A choice is used
    again for `request.reuse_steps` further steps. In a layer with `ChoiceWeights` the chosen tokens
    have log-weights."""

    diagnostics: ClassVar[tuple[str, ...]] = ("rows",)
    plan: PlanT | None = None  # None: everything is read
    rows: Tensor | None = None  # the last choice, [B G K] or [B H K]
    # of the tokens of a choice; None: all are read and weigh alike
    weights: ChoiceWeights | None = None
    age = 0  # further steps that the last choice has served
    arrival: Arrival[Segment] | None = None  # rows of a choice that is known, but not read yet
    lends = False  # whether it chooses for a layer that borrows, whose tokens are not counted

    @abstractmethod
    def split(self, budget: int) -> PlanT:
        """Return a plan: how `budget`, a number of prompt tokens that a step may read, is divided
        among sinks, window and chosen tokens, or whatever this method reads."""

    @abstractmethod
    def prepare(self, plan: PlanT) -> None:
        """Index or compress the prompt at its end, when steps will read only a part of it."""

    @abstractmethod
    def select(self, q: Tensor, top: int) -> Tensor:
        """Choose the `top` best tokens, pages or chunks for the query q [B H 1 D]. Return their
        numbers, [B G K], or [B H K] if each query head chooses; only this policy interprets
        them."""

    @abstractmethod
    def read(self, x: AttnInput, plan: PlanT) -> Tensor:
        """Attend from one new token, which is stored already, to the parts that `plan` names.
        Return [B H 1 D]."""

    @abstractmethod
    def attended_under(self, plan: PlanT) -> Attended:
        """Return how many prompt tokens and generated tokens one head that chooses for itself read
        in the last step."""

    @abstractmethod
    def rows_of(self, rows: Tensor, plan: PlanT) -> Tensor:
        """Return the prompt tokens that each choosing head reads with the choice `rows` of
        `select`, as row numbers in the store, [B G K] or [B H K] without repeats, -1 where a head
        reads fewer. Tokens that are always read come before those of `rows`."""

    def away(self, plan: PlanT) -> tuple[int, int] | None:
        """Return (first, end): the stored tokens from `first` up to `end` are read only if chosen,
        and only by `fetch`, so they may be moved to another tier or be quantised. None if the
        policy places its tokens itself."""
        return None

    def sent_away(self, tokens: Segment) -> None:
        """Take note that the tokens of the range `away` have left the store for a pool on another
        tier or in fewer bits. `tokens` [B G M D]: their keys and values, still on the device as
        they were."""

    def seal(self, limit: int | None) -> None:
        """Prepare, at the end of the prompt, for decode steps that may read `limit` of the stored
        tokens; None for all."""
        prunes = self.weights is not None and self.weights.prunes
        all_is_read = limit is None or (limit >= self.store.length and not prunes)
        self.plan = None if limit is None or all_is_read else self.split(limit)
        self.rows = self.arrival = None
        if self.plan is not None:
            self.prepare(self.plan)
        if self.weights is not None:
            self.weights.begin(self.plan is not None)

    def decode(self, x: AttnInput) -> Tensor:
        return super().decode(x) if self.plan is None else self.read(x, self.plan)

    def lend(self, x: AttnInput) -> Tensor:
        """Choose for the queries of the layer that borrows. A copy of this policy does so, because the
        layer's own next step must not know of it."""
        if self.plan is None:
            return super().lend(x)
        other = copy(self)
        other.rows, other.lends = None, True
        other.weights = copy(self.weights)
        return other.read(x, self.plan)

    def send_for(self, rows: Tensor, slots: Tensor | None = None) -> None:
        """Begin to bring chosen prompt tokens to the device that lie in host memory, on disk or in
        fewer bits, before the step that will `fetch` the same rows. rows [B G K] are numbered from
        the first token that was moved there. Tokens whose `slots` entry is 0 or more will not be
        read and need not move."""
        assert self.layer.far is not None
        self.arrival = self.layer.far.gather(rows, slots, early=True)

    def fetch(self, rows: Tensor) -> Segment:
        """Return keys and values, on the device, of chosen prompt tokens that lie in host memory,
        on disk or in fewer bits. rows [B G K] or [B H K] are numbered from the first token that was
        moved there. A token that several query heads of a KV head chose is moved once; the
        segment's `rows` then say where each head finds it."""
        far, groups, arrival = self.layer.far, self.spec.num_kv_heads, self.arrival
        unread = None if self.weights is None else self.weights.unread
        assert far is not None
        self.arrival = None
        if arrival is not None:
            return arrival.wait()
        if rows.shape[1] == groups:
            if unread is None:
                return far.gather(rows).wait()
            there = filled(rows).masked_fill(unread, 0)
            return far.gather(there, torch.where(unread, 0, -1)).wait()
        chosen, live = filled(rows), rows.counts if isinstance(rows, Ragged) else None
        every = torch.arange(chosen.shape[1] // groups * chosen.shape[2], device=rows.device)
        if far.tier == DEVICE:  # nothing moves, so that each head may read what it chose itself
            together = chosen.reshape(len(chosen), groups, -1)
            own = every.expand_as(together).reshape(chosen.shape)
            return far.gather(together).wait()._replace(rows=own, live=live)
        if live is not None:
            chosen = without_missing(chosen, live, -1)
        if unread is not None:
            chosen = chosen.masked_fill(unread, -1)
        together = chosen.reshape(len(chosen), groups, -1)
        first = ops.first_places(together)
        unread = torch.where((first == every) & (together >= 0), -1, 0)
        return (
            far.gather(together.clamp(min=0), unread)
            .wait()
            ._replace(rows=first.reshape(chosen.shape), live=live)
        )

    def attend(self, q: Tensor, *segments: Segment) -> Tensor:
        """Attend under one softmax to all of `segments`, q [B H 1 D] -> [B H 1 D]."""
        return self.layer.attend(q, *segments)

    def weighted(self, chosen: Segment) -> Segment:
        """Return the segment of the chosen tokens with their log-weights, if they have any."""
        return (
            chosen
            if self.weights is None
            else chosen._replace(log_weights=self.weights.log_weights)
        )

    def link(self, members: Sequence[Policy], joint: Mapping[int, Policy]) -> None:
        if self.weights is not None:
            self.weights = cast(ChoiceWeights, joint[id(cast(Read[Any], members[0]).weights)])

    def hand_back(self, member: Policy, own: slice) -> None:
        super().hand_back(member, own)
        assert isinstance(member, Read)
        if isinstance(self.rows, Ragged):
            member.rows = self.rows.whole[own, ..., : self.rows.sizes.values[own.start]]
        elif self.rows is not None:
            member.rows = self.rows[own]

    @property
    def selects_next(self) -> bool:
        """Return whether the next step makes a new choice."""
        return self.rows is None or self.age >= self.request.reuse_steps

    def chosen(self, q: Tensor, top: int) -> Tensor:
        """Return the choice that this step reads: a new one by `select`, or the last one again
        while `reuse_steps` lasts. Call it exactly once per step."""
        if self.rows is None or self.selects_next:
            self.rows, self.age = self.select(q, top), 0
            if self.weights is not None:
                self.weights.weigh(q, self.rows)
            if self.cache.checking:
                self.check_choice(self.rows, top)
        else:
            self.age += 1
        if self.weights is not None and not self.lends:
            self.weights.count()
        return self.rows

    def check_choice(self, rows: Tensor, top: int | None) -> None:
        """Raise `ReturnedError` if the choice `rows` names tokens that do not exist, or one token
        twice for a head. `top`: how many were to be chosen; None for any number."""
        self._check_selected(rows, None, None)
        assert self.plan is not None
        given = f"{type(self).__name__}.rows_of returned"
        choosing = (self.spec.num_kv_heads, self.spec.num_heads)
        self.layer.check_rows(given, self.selected_rows(), self.sealed, heads=choosing, gaps=True)

    def _check_selected(self, rows: Tensor, among: int | None, count: int | None) -> None:
        """Raise `ReturnedError` unless every head has `count` row numbers, all different and below
        `among`. None allows any count, or any numbers."""
        choosing = (self.spec.num_kv_heads, self.spec.num_heads)
        given = f"{type(self).__name__}.select"
        gaps = False
        unread = None if self.weights is None else self.weights.unread
        if unread is not None:
            if unread.shape != rows.shape:
                shapes = f"{list(rows.shape)} and log-weights {list(unread.shape)}"
                raise ReturnedError(
                    f"{given} returned rows {shapes}. Wanted is a log-weight for each row."
                )
            rows, gaps = rows.masked_fill(unread, -1), True
        self.layer.check_rows(
            f"{given} returned", rows, among, heads=choosing, count=count, gaps=gaps
        )

    @property
    def reading(self) -> Reading:
        if self.plan is None:
            return super().reading
        whole = self.attended_under(self.plan)
        if self.weights is None or self.rows is None:
            return whole
        always = whole.prompt - self.rows.shape[2]
        return always + self.weights.read_of_choice(), whole.generated

    def readings(self, steps: int) -> Reading:
        if self.plan is None or self.weights is None or self.rows is None:
            return super().readings(steps)
        whole = self.attended_under(self.plan)
        read = self.weights.take_count(steps, whole.prompt - self.rows.shape[2])
        return read, over_steps(steps, *whole)[1]

    def read_rows(self) -> Tensor | None:
        rows, groups = self.selected_rows(), self.spec.num_kv_heads
        return (
            rows
            if rows is None or rows.shape[1] == groups
            else union_per_kv_head(rows, groups, self.sealed)
        )

    def selected_rows(self) -> Tensor | None:
        if self.plan is None or self.rows is None:
            return None
        rows = self.rows_of(self.rows, self.plan)
        unread = None if self.weights is None else self.weights.unread
        if unread is None:
            return rows
        return rows.masked_fill(pad(unread, (rows.shape[2] - unread.shape[2], 0)), -1)


class Select(Read[Plan], capturable=True):
    """Choose single tokens for each decode step. A step reads the first tokens (sinks), a window at
    the end of the prompt, the tokens that `select` returns from the middle between them, and all
    later tokens.

    The middle may lie on another tier or be quantised (settings `placement` and `codec`): only the
    selected tokens are then fetched."""

    def split(self, budget: int) -> Plan:
        """Return how `budget` tokens are divided among sinks, window and chosen tokens: by default as
        the method's own `split` says."""
        return cast(Any, self.method).split(budget)

    def index(self, keys: Tensor) -> None:
        """Prepare to choose among the middle tokens, those between sinks and window, by their keys
        [B G M D]. By default nothing is prepared: `select` looks at the keys themselves."""

    @abstractmethod
    def select(self, q: Tensor, top: int) -> Tensor:
        """Return the `top` tokens of the middle to read for the query q [B H 1 D], as [B G top],
        numbered from the first token after the sinks."""

    def form(self) -> Hashable:
        """Return the number of sinks, which must be equal for sequences that share a decode step:
        the tokens to choose from begin after them. None if everything is read."""
        return None if self.plan is None else self.plan.sinks

    def prepare(self, plan: Plan) -> None:
        self.index(self.middle().k)

    def away(self, plan: Plan) -> tuple[int, int]:
        return plan.sinks, self.sealed - plan.local

    def read(self, x: AttnInput, plan: Plan) -> Tensor:
        rows = self.chosen(x.q, plan.top)
        if self.layer.far is not None:
            return self.attend(x.q, self.weighted(self.fetch(rows)), *self.always_read())
        sinks, *rest = self.always_read()
        return self.attend(x.q, sinks, self.weighted(self.middle()._replace(rows=rows)), *rest)

    def always_read(self) -> list[Segment]:
        """Return the segments of the store that every step reads: the sinks, the window at the end
        of the prompt, and all tokens that came after the prompt."""
        assert self.plan is not None
        layer, store = self.layer, self.layer.store
        if layer.far is not None:
            return [store.since(0)]
        return [store.between(0, self.plan.sinks), store.since(layer.sealed - self.plan.local)]

    def candidates(self) -> Segment:
        return self.middle()

    def absent(self, rows: Tensor) -> Tensor | None:
        return None

    def middle(self) -> Segment:
        """Return the keys and values between sinks and window, of which the step chooses, if they
        are still in the store."""
        assert self.plan is not None
        return self.store.between(self.plan.sinks, self.sealed - self.plan.local)

    def check_choice(self, rows: Tensor, top: int | None) -> None:
        """Raise `ReturnedError` unless `rows` names `top` different tokens of the middle for each
        head; `top` None: any number of them."""
        assert self.plan is not None
        self._check_selected(rows, self.sealed - self.plan.sinks - self.plan.local, top)
        super().check_choice(rows, top)

    def attended_under(self, plan: Plan) -> Attended:
        return Attended(sum(plan), self.layer.stored - self.sealed)

    def rows_of(self, rows: Tensor, plan: Plan) -> Tensor:
        ends = [torch.arange(plan.sinks), torch.arange(self.sealed - plan.local, self.sealed)]
        fixed = to_device(torch.cat(ends), rows.device).expand(*rows.shape[:2], -1)
        return torch.cat([fixed, rows + plan.sinks], -1)
