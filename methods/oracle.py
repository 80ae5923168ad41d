"""Oracle: the exact top-k tokens of each step, chosen by the true attention weights (PQCache, arXiv 2407.12820).

The upper bound for methods that select per KV head: nothing is approximated but the number of tokens. It reads every
key to choose, so it is real but never fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels import ops
from methods.base import KVLayer, LayerSpec, Method, Request
from methods.layers import Plan, SelectLayer
from methods.windows import Windows


@dataclass(frozen=True, kw_only=True)
class Oracle(Method):
    """sinks, recent_ratio: how the budget is split, see methods/windows.py."""

    sinks: int
    recent_ratio: float

    def __post_init__(self) -> None:
        self.windows.check()

    @property
    def windows(self) -> Windows:
        return Windows(self.sinks, self.recent_ratio)

    @property
    def smallest_budget(self) -> int:
        return self.windows.smallest_budget

    def start(self, specs: Sequence[LayerSpec], request: Request) -> list[KVLayer]:
        return [OracleLayer(spec, request, self) for spec in specs]


class OracleLayer(SelectLayer):
    """Ranks by softmax over all stored tokens, summed over the query heads of a group."""

    method: Oracle

    def split(self, budget: int) -> Plan:
        return self.method.windows.split(budget)

    def index(self, keys: Tensor) -> None:
        """Nothing to prepare: the keys themselves are the index."""

    def select(self, q: Tensor, top: int) -> Tensor:
        keys = self.store.k  # [B G S D]
        assert self.plan is not None
        logits = q.view(*keys.shape[:2], self.spec.group, -1) @ keys.transpose(-1, -2)
        weights = (logits.float() * self.spec.scale).softmax(-1).sum(2)  # [B G S]
        middle = weights[..., self.plan.sinks : self.sealed - self.plan.local]
        rows: Tensor = ops.top_k(middle, top)
        return rows
