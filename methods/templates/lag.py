"""Lag: keep the tokens that stand out from those that follow them, after LagKV (arXiv 2504.04704)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels import ops
from methods.base import Cost, LayerWorkload, Plan
from methods.layers import Keep, PolicyMethod, between_ends
from methods.parts import costs


class LagKeep(Keep, capturable=True, of_each={}):
    method: Lag

    def keep(self, size: int) -> Tensor:
        sinks, lag = self.method.sinks, self.method.lag
        scores = self._scores(self.store.k) + self._scores(self.store.v)  # [B G M], of the middle
        plan = Plan(sinks, lag, size - sinks - lag)
        return between_ends(ops.top_k(scores, plan.top), plan, self.store.length)

    def _scores(self, x: Tensor) -> Tensor:
        """Scale each partition by the least and the largest numbers of the next one, and score its
        tokens by how much their channels differ. Partitions are counted from the end."""
        parts = x[:, :, self.method.sinks :].float().flip(2).split(self.method.lag, 2)
        scores = []
        for after, part in pairwise(parts):
            low, high = after.amin(2, keepdim=True), after.amax(2, keepdim=True)
            strays = ((part - low) / (high - low).clamp(min=1e-6)).std(3)
            scores.append(strays.softmax(2) * part.shape[2])
        return torch.cat(scores, 2).flip(2)


@dataclass(frozen=True, kw_only=True)
class Lag(PolicyMethod):
    """sinks: first tokens, always kept. lag: tokens of a partition; the last one is always kept."""

    policies = (LagKeep,)

    sinks: int = 4
    lag: int = 16

    @property
    def smallest_budget(self) -> int:
        return self.sinks + self.lag + 1

    def cost(self, case: LayerWorkload) -> Cost:
        return costs.evict(case, case.sealed if self.reads_whole(case) else case.budget)
