"""Defines policies that read sinks, a window, and single tokens between them that are selected in
each step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable

import torch
from torch import Tensor

from kernels.reference import Segment
from methods.base import Attended, AttnInput, Plan
from methods.layers.read import Read


class Select(Read[Plan], capturable=True):
    """Read in a step sinks, a window at the end of the prompt, `select`ed tokens between them, and
    all later tokens.

    The tokens between sinks and window, the middle, may lie elsewhere (`placement`, `codec`): only
    the selected ones are then fetched."""

    @abstractmethod
    def split(self, budget: int) -> Plan:
        """Return how `budget` prompt tokens are spent."""

    @abstractmethod
    def index(self, keys: Tensor) -> None:
        """Prepare for selection among the middle keys [B G M D]."""

    @abstractmethod
    def select(self, q: Tensor, top: int) -> Tensor:
        """Return the `top` middle tokens to read, [B G top], as indices into the middle. q
        [B H 1 D]"""

    def form(self) -> Hashable:
        """Return the number of sinks, after which the tokens to choose from begin."""
        return None if self.plan is None else self.plan.sinks

    def prepare(self, plan: Plan) -> None:
        self.index(self.middle().k)

    def away(self, plan: Plan) -> tuple[int, int]:
        return plan.sinks, self.sealed - plan.local

    def read(self, x: AttnInput, plan: Plan) -> Tensor:
        rows = self.chosen(x.q, plan.top)
        if self.layer.far is not None:
            return self.attend(x.q, self.fetch(rows), *self.always_read())
        sinks, *rest = self.always_read()
        return self.attend(x.q, sinks, self.middle()._replace(rows=rows), *rest)

    def always_read(self) -> list[Segment]:
        """Return what every step reads: the sinks, the window at the end of the prompt, and all
        that came after the seal."""
        assert self.plan is not None
        layer, store = self.layer, self.layer.store
        if layer.far is not None:
            return [store.since(0)]
        return [store.between(0, self.plan.sinks), store.since(layer.sealed - self.plan.local)]

    def middle(self) -> Segment:
        """Return the tokens between sinks and window, in the store."""
        assert self.plan is not None
        return self.store.between(self.plan.sinks, self.sealed - self.plan.local)

    def check_choice(self, rows: Tensor, top: int | None) -> None:
        """Raise `ReturnedError` unless the rows are tokens of the middle: `top` of them, None for
        any number."""
        assert self.plan is not None
        self._check_selected(rows, self.sealed - self.plan.sinks - self.plan.local, top)
        super().check_choice(rows, top)

    def attended_under(self, plan: Plan) -> Attended:
        return Attended(sum(plan), self.layer.stored - self.sealed)

    def rows_of(self, rows: Tensor, plan: Plan) -> Tensor:
        ends = [torch.arange(plan.sinks), torch.arange(self.sealed - plan.local, self.sealed)]
        fixed = torch.cat(ends).to(rows.device).expand(*rows.shape[:2], -1)
        return torch.cat([fixed, rows + plan.sinks], -1)
