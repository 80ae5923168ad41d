"""A layer that keeps everything, and in each step reads a part of the prompt that it chooses."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from methods.base import Attended, AttnInput
from methods.layers.dense import DenseLayer

PlanT = TypeVar("PlanT")  # how a budget is spent


class ChoosingLayer(DenseLayer, Generic[PlanT], capturable=True):
    """Where the budget covers the prompt all of it is read, as by `DenseLayer`; the methods below are then not called.

    A choice is used again for `request.reuse_steps` further steps.
    """

    diagnostics: ClassVar[tuple[str, ...]] = ("rows",)
    plan: PlanT | None = None  # None: everything is read
    rows: Tensor | None = None  # the last choice, [B G K] or [B H K]
    age = 0  # further steps that it has served

    @abstractmethod
    def split(self, budget: int) -> PlanT:
        """Spend `budget` prompt tokens."""

    @abstractmethod
    def prepare(self, plan: PlanT) -> None:
        """The prompt is complete, and not all of it will be read: index, compress, move."""

    @abstractmethod
    def select(self, q: Tensor, top: int) -> Tensor:
        """Choose `top` tokens, pages or chunks. q [B H 1 D] -> what `rows` then is"""

    @abstractmethod
    def read(self, x: AttnInput, plan: PlanT) -> Tensor:
        """Attend; the new token is stored already. -> [B H 1 D]"""

    @abstractmethod
    def attended_under(self, plan: PlanT) -> Attended:
        """What one selecting head read in the last step."""

    @abstractmethod
    def positions_of(self, rows: Tensor, plan: PlanT) -> Tensor:
        """Prompt positions that a step with the choice `rows` reads, as `read_positions` gives them."""

    def seal(self) -> None:
        super().seal()
        limit = self.limit()
        self.plan = None if limit is None else self.split(limit)
        self.rows = None
        if self.plan is not None:
            self.prepare(self.plan)

    def decode(self, x: AttnInput) -> Tensor:
        if self.plan is None:
            return super().decode(x)
        self.store.append(x.k, x.v)
        return self.read(x, self.plan)

    @property
    def selects_next(self) -> bool:
        """Whether the next step makes a new choice."""
        return self.rows is None or self.age >= self.request.reuse_steps

    def chosen(self, q: Tensor, top: int) -> Tensor:
        """The choice that this step reads: a new one, or once more the last. Call it once per step."""
        if self.rows is None or self.selects_next:
            self.rows, self.age = self.select(q, top), 0
        else:
            self.age += 1
        return self.rows

    @property
    def attended(self) -> Attended:
        return super().attended if self.plan is None else self.attended_under(self.plan)

    def read_positions(self) -> Tensor | None:
        return None if self.plan is None or self.rows is None else self.positions_of(self.rows, self.plan)

    def selected_positions(self) -> Tensor | None:
        if self.plan is None or self.rows is None or self.rows.shape[1] == self.spec.num_kv_heads:
            return self.read_positions()
        members = self.rows.unflatten(1, (self.spec.num_kv_heads, -1)).unbind(2)  # one query head of every group
        found = [self.positions_of(rows, self.plan) for rows in members]
        widest = max(rows.shape[2] for rows in found)
        return torch.stack([pad(rows, (0, widest - rows.shape[2]), value=-1) for rows in found], 2).flatten(1, 2)
