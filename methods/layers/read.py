"""Defines policies that choose what a step reads of a prompt: `Read` in general, and `Select`, which reads
sinks, a window, and single tokens between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels import ops
from kernels.ragged import Ragged, filled
from kernels.reference import Segment, without_missing
from kernels.sink_logits import lse_with_sink
from kernels.step_inputs import to_device
from methods.base import Attended, AttnInput, Plan
from methods.layers.indices import first_places, union_per_kv_head
from methods.layers.policy import OfEach, Policy
from methods.layers.returned import ReturnedError
from methods.parts.top_p import RANGE_BYTES, carrying, estimated_logits, quantised_keys
from methods.tiers.tier import DEVICE
from methods.tiers.transfer import Arrival

PRUNED: OfEach = {
    "key_codes": 2,
    "key_ranges": 2,
    "choices_read": None,
}  # for `of_each`, where `Budget.mass` may be set
PlanT = TypeVar("PlanT")  # says how a budget is spent


class Read(Policy, ABC, Generic[PlanT], capturable=True):
    """Choose in each decode step the part of the stored prompt that the step reads.

    If the budget covers what is stored, all of it is read, and the methods below are not called; but
    under `Budget.mass` all are candidates then. A choice is used again for `request.reuse_steps`
    further steps.

    A policy that `weighs` sets `log_weights` in `select`: numbers that are added to the scaled
    logits of the chosen tokens. A token with minus infinity is not read, so each head reads a
    number of tokens of its own; `of_each` then names "choices_read" with None."""

    diagnostics: ClassVar[tuple[str, ...]] = ("rows", "log_weights", "choices_read")
    plan: PlanT | None = None  # None: everything is read
    rows: Tensor | None = None  # the last choice, [B G K] or [B H K]
    log_weights: Tensor | None = None  # of the last choice, fp32, of the same shape; None: all are read and weigh alike
    key_codes: Tensor | None = None  # [B G M D/2], copies of the keys of all candidates in 4 bits, under `Budget.mass`
    key_ranges: Tensor | None = None  # [B G M 2], their offsets and steps
    choices_read: Tensor | None = None  # [B] fp64, chosen tokens that a head read since `readings`, the mean over heads
    age = 0  # further steps that the last choice has served
    arrival: Arrival[Segment] | None = None  # rows of a choice that is known, but not read yet

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
        self.plan = None if limit is None or (limit >= self.store.length and self._mass is None) else self.split(limit)
        self.rows = self.arrival = self.log_weights = self.choices_read = self.key_codes = self.key_ranges = None
        if self.plan is not None:
            self.prepare(self.plan)
            if self._mass is not None:
                self.key_codes, self.key_ranges = quantised_keys(self.candidates().k)
            if self.weighs:
                self.choices_read = torch.zeros(self.request.batch, dtype=torch.float64, device=self.request.device)

    def decode(self, x: AttnInput) -> Tensor:
        return super().decode(x) if self.plan is None else self.read(x, self.plan)

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
        far, groups, arrival, unread = self.layer.far, self.spec.num_kv_heads, self.arrival, self.unread
        assert far is not None
        self.arrival = None
        if arrival is not None:
            return arrival.wait()
        if rows.shape[1] == groups and unread is not None:
            return far.gather(filled(rows).masked_fill(unread, 0), torch.where(unread, 0, -1)).wait()
        if rows.shape[1] == groups:
            return far.gather(rows).wait()
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
        first = first_places(together)
        unread = torch.where((first == every) & (together >= 0), -1, 0)
        return far.gather(together.clamp(min=0), unread).wait()._replace(rows=first.reshape(chosen.shape), live=live)

    def attend(self, q: Tensor, *segments: Segment) -> Tensor:
        """Attend under one softmax to all of `segments`, q [B H 1 D] -> [B H 1 D]."""
        return self.layer.attend(q, *segments)

    @property
    def weighs(self) -> bool:
        """Return whether chosen tokens have log-weights: `select` gives them, or those are not read
        that carry too little of the estimated weights (`Budget.mass`)."""
        return self._mass is not None

    @property
    def _mass(self) -> float | None:
        return None if self.request.budget is None else self.request.budget.mass

    def always_read(self) -> list[Segment]:
        """Return the segments of the store that every step reads, whatever it chooses. Only methods that
        take a budget by mass (`Method.mass_refusal`) need it, and `candidates`."""
        raise NotImplementedError(f"{type(self).__name__} takes no budget by mass: write `always_read`.")

    def candidates(self) -> Segment:
        """Return the keys and values of which a step chooses, if they are still in the store; `select`
        numbers them from the first one."""
        raise NotImplementedError(f"{type(self).__name__} takes no budget by mass: write `candidates`.")

    def absent(self, rows: Tensor) -> Tensor | None:
        """Return a mask of the entries of `rows`, a choice of `select`, that stand for no token; None
        if all are tokens."""
        return None

    def always_lse(self, grouped: Tensor) -> Tensor:
        """Return the log-sum-exp of the logits of all tokens that every step reads, and of the sink
        logits if the model has them. grouped [B G g D] -> [B G g]"""
        logits = [
            part.without_missing(filled(ops.row_scores(grouped, part.k)) * self.spec.scale, float("-inf"))
            for part in self.always_read()
            if part.k.shape[2]
        ]
        lse = torch.cat(logits, -1).logsumexp(-1)
        return lse_with_sink(lse.flatten(1), self.spec.sink_logits).view_as(lse)

    def _pruned(self, q: Tensor, rows: Tensor, mass: float) -> Tensor:
        """Return the log-weights of a choice of which the tokens are read that carry `mass` of the
        estimated weights: 0, and minus infinity for the others. q [B H 1 D], rows [B G|H K]"""
        assert self.key_codes is not None
        assert self.key_ranges is not None
        chosen, absent = filled(rows), self.absent(rows)
        if isinstance(rows, Ragged):
            absent = torch.arange(chosen.shape[2], device=q.device) >= rows.counts.view(-1, 1, 1)
        if absent is not None:
            chosen = chosen.masked_fill(absent, 0)
        grouped = q.view(q.shape[0], self.spec.num_kv_heads, self.spec.group, -1)
        logits = estimated_logits(grouped, self.key_codes, self.key_ranges, chosen) * self.spec.scale
        if absent is not None:
            logits = logits.masked_fill(absent.unsqueeze(2), float("-inf"))
        read = carrying(logits, self.always_lse(grouped).view(logits.shape[:3]), mass)
        return torch.zeros(read.shape, device=q.device).masked_fill(~read, float("-inf"))

    @property
    def estimate_bytes(self) -> int:
        """Return the bytes of the copies of keys by which the last step estimated weights, none if it used a
        choice again."""
        if self.key_codes is None or self.rows is None or self.age:
            return 0
        return filled(self.rows).numel() * (self.key_codes.shape[3] + RANGE_BYTES)

    @property
    def unread(self) -> Tensor | None:
        """Return a mask of the tokens of the last choice that are not read, [B G K] or [B H K]; None
        if all are."""
        return None if self.log_weights is None else self.log_weights == float("-inf")

    def weighted(self, chosen: Segment) -> Segment:
        """Return the segment of the chosen tokens with their log-weights, if they have any."""
        return chosen if self.log_weights is None else chosen._replace(log_weights=self.log_weights)

    def hand_back(self, member: Policy, own: slice) -> None:
        super().hand_back(member, own)
        assert isinstance(member, Read)
        if self.choices_read is not None:
            self.choices_read[own] = 0  # the member has them now
        if isinstance(self.rows, Ragged):
            member.rows = self.rows.whole[own, ..., : self.rows.sizes.values[own.start]]
        elif self.rows is not None:
            member.rows = self.rows[own]
        if self.log_weights is not None and member.rows is not None:
            member.log_weights = self.log_weights[own, ..., : member.rows.shape[2]]

    @property
    def selects_next(self) -> bool:
        """Return whether the next step makes a new choice."""
        return self.rows is None or self.age >= self.request.reuse_steps

    def chosen(self, q: Tensor, top: int) -> Tensor:
        """Return the choice that this step reads: a new one by `select`, or the last one again
        while `reuse_steps` lasts. Call it exactly once per step."""
        if self.rows is None or self.selects_next:
            self.rows, self.age = self.select(q, top), 0
            if self._mass is not None:
                self.log_weights = self._pruned(q, self.rows, self._mass)
            elif self.log_weights is not None and isinstance(self.rows, Ragged):
                self.log_weights = without_missing(self.log_weights, self.rows.counts, float("-inf"))
            if self.cache.checking:
                self.check_choice(self.rows, top)
        else:
            self.age += 1
        if self.choices_read is not None:
            self.choices_read += self._read_of_choice()
        return self.rows

    def _read_of_choice(self) -> Tensor:
        """Return how many tokens of the last choice a head reads, the mean over heads, [B] fp64."""
        assert self.unread is not None
        return (~self.unread).sum(-1).double().mean(1)

    def check_choice(self, rows: Tensor, top: int | None) -> None:
        """Raise `ReturnedError` if the choice `rows` names tokens that do not exist, or one token
        twice for a head. `top`: how many were to be chosen; None for any number."""
        self._check_selected(rows, None, None)
        assert self.plan is not None
        given, choosing = f"{type(self).__name__}.rows_of returned", (self.spec.num_kv_heads, self.spec.num_heads)
        self.layer.check_rows(given, self.selected_rows(), self.sealed, heads=choosing, gaps=True)

    def _check_selected(self, rows: Tensor, among: int | None, count: int | None) -> None:
        """Raise `ReturnedError` unless every head has `count` row numbers, all different and below
        `among`. None allows any count, or any numbers."""
        choosing, given, gaps = (self.spec.num_kv_heads, self.spec.num_heads), f"{type(self).__name__}.select", False
        if self.unread is not None:
            if self.unread.shape != rows.shape:
                shapes = f"{list(rows.shape)} and log-weights {list(self.unread.shape)}"
                raise ReturnedError(f"{given} returned rows {shapes}. Wanted is a log-weight for each row.")
            rows, gaps = rows.masked_fill(self.unread, -1), True
        self.layer.check_rows(f"{given} returned", rows, among, heads=choosing, count=count, gaps=gaps)

    @property
    def attended(self) -> Attended:
        if self.plan is None:
            return super().attended
        whole = self.attended_under(self.plan)
        if self.log_weights is None:
            return whole
        return whole._replace(prompt=self._always_read() + self._read_of_choice().mean().item())

    def _always_read(self) -> float:
        """Return how many prompt tokens a head reads besides the chosen ones."""
        assert self.plan is not None
        assert self.rows is not None
        return self.attended_under(self.plan).prompt - self.rows.shape[2]

    def readings(self, steps: int) -> tuple[float | Tensor, float | Tensor]:
        prompt, generated = super().readings(steps)
        if self.choices_read is None or self.rows is None:
            return prompt, generated
        read = self.choices_read + steps * self._always_read()
        self.choices_read.zero_()
        return read, generated

    @property
    def reading(self) -> tuple[float | Tensor, float | Tensor]:
        if self.plan is None or self.log_weights is None:
            return self.attended
        return self._always_read() + self._read_of_choice(), self.attended_under(self.plan).generated

    def read_rows(self) -> Tensor | None:
        rows, groups = self.selected_rows(), self.spec.num_kv_heads
        return rows if rows is None or rows.shape[1] == groups else union_per_kv_head(rows, groups, self.sealed)

    def selected_rows(self) -> Tensor | None:
        if self.plan is None or self.rows is None:
            return None
        rows = self.rows_of(self.rows, self.plan)
        if self.unread is None:
            return rows
        return rows.masked_fill(pad(self.unread, (rows.shape[2] - self.unread.shape[2], 0)), -1)


class Select(Read[Plan], capturable=True):
    """Choose single tokens for each decode step. A step reads the first tokens (sinks), a window at
    the end of the prompt, the tokens that `select` returns from the middle between them, and all
    later tokens.

    The middle may lie on another tier or be quantised (settings `placement` and `codec`): only the
    selected tokens are then fetched."""

    @abstractmethod
    def index(self, keys: Tensor) -> None:
        """Prepare to choose among the middle tokens, those between sinks and window, by their keys
        [B G M D]."""

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
