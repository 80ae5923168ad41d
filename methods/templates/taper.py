"""Taper: read the blocks whose mean keys fit the query best, more of them in the first layers than in the last."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from kernels import ops
from methods.base import Cost, LayerSpec, LayerWorkload, Plan
from methods.layers import PolicyMethod, Select
from methods.parts import costs


class TaperRead(Select):
    method: Taper
    means: Tensor  # [B G N D], of the N blocks of the middle
    tokens: int  # of the middle

    def split(self, budget: int) -> Plan:
        return self.method.plan(self.spec, budget, self.sealed)

    def index(self, keys: Tensor) -> None:
        blocks = keys.split(self.method.block, 2)
        self.means = torch.stack([block.float().mean(2) for block in blocks], 2)
        self.tokens = keys.shape[2]

    def select(self, q: Tensor, top: int) -> Tensor:
        groups = q.view(*self.means.shape[:2], self.spec.group, -1).float()  # [B G g D]
        # [B G N], of the group's query heads
        weights = (groups @ self.means.mT * self.spec.scale).softmax(-1).sum(2)
        by_token = weights.repeat_interleave(self.method.block, -1)[..., : self.tokens]  # [B G M]
        # the last block may be read in part, so that the budget holds to the token
        return ops.top_k(by_token, top)


@dataclass(frozen=True, kw_only=True)
class Taper(PolicyMethod):
    """block: tokens that share a mean key. sinks, window: first and last tokens of the prompt, always
    read. slope: by which share of the budget the first layer reads more, and the last one less."""

    policies = (TaperRead,)

    block: int = 8
    sinks: int = 4
    window: int = 16
    slope: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.slope < 1:
            raise ValueError(
                f"slope={self.slope} leaves the last layer nothing to read: give at least 0 and less than 1."
            )

    @property
    # placement=host and disk: the middle lies there, and what is selected comes back
    def offloads(self) -> bool:
        return True

    @property
    def smallest_budget(self) -> int:
        return ceil((self.sinks + self.window + 1) / (1 - self.slope))

    def plan(self, spec: LayerSpec, budget: int, sealed: int) -> Plan:
        """Return how a layer's share of the budget is spent: over all layers it is the budget."""
        # 1 in the first layer, -1 in the last
        place = 1 - 2 * spec.index / (spec.num_layers - 1) if spec.num_layers > 1 else 0
        tokens = min(sealed, round(budget * (1 + self.slope * place)))
        return Plan(self.sinks, self.window, tokens - self.sinks - self.window)

    def cost(self, case: LayerWorkload) -> Cost:
        if self.reads_whole(case):
            return costs.dense(case)
        plan = self.plan(case.spec, case.budget, case.sealed)
        blocks = ceil((case.sealed - plan.sinks - plan.local) / self.block)
        means = blocks * case.spec.num_kv_heads * case.spec.head_dim * costs.FP32
        return costs.select(case, plan, index_bytes=means)
