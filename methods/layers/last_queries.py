"""Evicts by the last queries: those of the prompt at its end, and those of the answer where rows are
dropped while the model decodes, under a budget that counts prompt and answer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from methods.base import AttnInput, Cost, LayerWorkload
from methods.layers.layer import PolicyMethod
from methods.layers.policy import Keep
from methods.parts import costs


class LastQueries(Keep, capturable=True, of_each={}):
    """Remember the queries of the last tokens, as many as the method's `window`, for `keep` to
    choose by. While decoding, it does so only if rows are still dropped."""

    method: Any
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
        if not self.method.counts_answer or self.layer.new_bound() is None:
            self.queries = None

    def reopen(self) -> None:
        self.queries = None


class EvictsWhileDecoding(PolicyMethod):
    """Define a method whose budget is all rows of a KV head, those of the answer included: a
    `LastQueries` policy says which stay at the seal, and whenever a new token has no room."""

    counts_answer: ClassVar[bool] = True

    @property
    def window(self) -> int:
        """Return by how many of the last queries the choice is made."""
        return 1

    def cost(self, case: LayerWorkload) -> Cost:
        bounded = costs.bounded(case, self)
        queries = self.window * case.query_bytes if bounded.reserve < case.reserve else 0
        return costs.evict(bounded, case.sealed if self.reads_whole(case) else case.budget) + Cost(queries)
