"""Evicts by the last queries: at the seal by those of the prompt. Where rows go by their scores while
the model decodes, it evicts by the queries of the answer, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from methods.abilities import ability
from methods.abilities.bounded_answer import AnswerBound, CountedAnswer
from methods.base import AttnInput, Cost, LayerWorkload
from methods.layers.layer import PolicyMethod
from methods.layers.policy import Keep
from methods.parts import costs


class LastQueries(Keep, capturable=True, of_each={}):
    """Remember the queries of the last tokens, as many as the method's `window`, for `keep` to
    choose by. While decoding, it does so only if rows are still dropped."""

    method: Any
    layer: Any
    queries: Tensor | None = None  # [B H <=window D], rotated; None once no more rows are dropped

    def observe(self, x: AttnInput) -> None:
        last = x.q[:, :, -self.method.window :]
        queries = last if self.queries is None else torch.cat([self.queries, last], 2)
        self.queries = queries[:, :, -self.method.window :].clone()

    def decode(self, x: AttnInput) -> Tensor:
        if self.queries is not None:
            self.observe(x)
        return super().decode(x)

    def close(self, evicted: int) -> None:
        states = self.layer.states
        if not any(
            isinstance(state, AnswerBound) and state.ranks and state.reached() is not None
            for state in states
        ):
            self.queries = None

    def reopen(self) -> None:
        self.queries = None


class EvictsWhileDecoding(PolicyMethod):
    """Define a method whose budget counts all rows of a KV head, those of the answer included. A
    `LastQueries` policy says which rows stay, at the seal and whenever a new token has no room."""

    abilities = (CountedAnswer(),)

    @property
    def window(self) -> int:
        """Return how many of the last queries decide which rows stay."""
        return 1

    def cost(self, case: LayerWorkload) -> Cost:
        kept = case.sealed if self.reads_whole(case) else case.budget
        rows, counted = case.rows, ability(self, CountedAnswer)
        if rows is None and case.budget < case.sealed:
            rows = case.budget
        if counted is None or rows is None or rows < self.smallest_budget:
            return costs.evict(case, kept)
        # no more generated tokens than a budget of prompt and answer leaves beside the prompt's rows
        room = min(case.reserve, rows + counted.extra_rows - min(case.sealed, rows))
        queries = self.window * case.query_bytes if room < case.reserve else 0
        return costs.evict(replace(case, reserve=room), kept) + Cost(queries)
