"""Fold: while the answer grows, merge the values of rows that go into the kept rows whose keys are most like theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kernels import ops
from kernels.sink_logits import column_sums
from methods.abilities.last_queries import EvictsWhileDecoding, LastQueries
from methods.base import Plan
from methods.layers import between_ends


class FoldKeep(LastQueries):  # no capturable: captured steps cannot write rows
    method: Fold

    def size(self, budget: int) -> int:
        return budget - 1  # the next token's row is in the budget

    def keep(self, size: int) -> Tensor:
        assert self.queries is not None
        k, v, window = self.store.k, self.store.v, self.method.window
        # [B H S], what the last queries give each stored token
        weights = column_sums(self.queries, k, self.spec.scale, self.spec.sink_logits)
        weights = weights.unflatten(1, (self.spec.num_kv_heads, -1)).mean(2)  # [B G S]
        plan = Plan(0, window, size - window)
        best = ops.top_k(weights[..., : self.store.length - window], plan.top)
        rows = between_ends(best, plan, self.store.length)
        self.layer.write(rows, v=self._merged(k, v, rows))
        return rows

    def _merged(self, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        """Return for each kept row [B G K] the mean of its value and of those that go to it."""
        stays = torch.zeros(k.shape[:3], device=k.device).scatter_(2, rows, 1)
        gone = stays.argsort(dim=2, stable=True)[..., : k.shape[2] - rows.shape[2]]  # [B G E]
        leaving, kept = (normalize(ops.gather_rows(k, one).float(), dim=3) for one in (gone, rows))
        nearest = (leaving @ kept.mT).argmax(-1)  # [B G E], places in `rows`
        count = torch.ones(rows.shape, device=k.device)
        count.scatter_add_(2, nearest, torch.ones(gone.shape, device=k.device))
        sums = ops.gather_rows(v, rows).float()
        into = nearest.unsqueeze(3).expand(*gone.shape, v.shape[3])
        sums.scatter_add_(2, into, ops.gather_rows(v, gone).float())
        return sums / count.unsqueeze(3)


@dataclass(frozen=True, kw_only=True)
class Fold(EvictsWhileDecoding):
    """window: by how many of the last queries rows are chosen, whose own rows stay."""

    policies = (FoldKeep,)

    window: int = 8

    @property
    def smallest_budget(self) -> int:
        return self.window + 2
