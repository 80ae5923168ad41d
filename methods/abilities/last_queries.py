"""Evicts by the last queries: at the seal by those of the prompt. Where rows go by their scores while
the model decodes, it evicts by the queries of the answer, too."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from methods.abilities import ability
from methods.abilities.bounded_answer import AnswerBound, CountedAnswer
from methods.base import AttnInput, Cost, LayerWorkload
from methods.layers.layer import PolicyMethod
from methods.layers.policy import Keep
from methods.parts import costs


class LastQueries(Keep, capturable=True, of_each={"last": None}):
    """Remember the queries of the last tokens, as many as the method's `window`, for `keep` to
    choose by. While decoding, it does so only if rows are still dropped. A subclass whose steps can
    be taken together with other sequences names `last` in `of_each`."""

    method: Any
    layer: Any
    # [B H <=window D], rotated, after `lacking` rows of zeros; None once no more rows are dropped
    last: Tensor | None = None
    lacking = 0

    @property
    def queries(self) -> Tensor | None:
        """Return the queries of the last tokens, [B H <=window D], rotated."""
        return None if self.last is None else self.last[:, :, self.lacking :]

    def observe(self, x: AttnInput) -> None:
        new = x.q[:, :, -self.method.window :]
        queries = new if self.last is None else torch.cat([self.last, new], 2)
        self.last = queries[:, :, -self.method.window :].clone()

    def decode(self, x: AttnInput) -> Tensor:
        if self.last is not None:
            self.last.copy_(torch.cat([self.last[:, :, 1:], x.q], 2))
            self.lacking = max(0, self.lacking - 1)
        return super().decode(x)

    def count_replayed(self, steps: int) -> None:
        self.lacking = max(0, self.lacking - steps)

    def close(self, evicted: int) -> None:
        states = self.layer.states
        if self.last is not None and any(
            isinstance(state, AnswerBound) and state.ranks and state.reached() is not None
            for state in states
        ):
            more = self.method.window - self.last.shape[2]
            self.last, self.lacking = pad(self.last, (0, 0, more, 0)), self.lacking + more
        else:
            self.last, self.lacking = None, 0

    def reopen(self) -> None:
        self.last, self.lacking = None, 0

    def form(self) -> Hashable:
        return super().form(), self.last is None

    def together_refusal(self) -> str | None:
        if self.last is not None and "last" not in (self.of_each or {}):
            return f"{type(self).__name__} does not name its last queries in of_each"
        return super().together_refusal()


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
