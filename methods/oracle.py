"""Oracle: reads the exact top-k tokens of each step, chosen by the true attention weights (PQCache,
arXiv 2407.12820).

The rule: all stored keys are ranked by their softmax weights, summed over the query heads of a KV
head, and the best tokens between sinks and window are read. Nothing is approximated but the number
of tokens. Choosing reads every key, so it is real but never fast. It is no upper bound: the largest
weights of one step are not the best tokens for the answer, and other rules, or other sinks and
windows, score above it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels import ops
from kernels.ragged import filled, spanned
from kernels.sink_logits import softmax
from methods.abilities.mass import Mass
from methods.base import Cost, LayerWorkload
from methods.layers import Select
from methods.layers.windowed import Windowed
from methods.parts import costs


class OracleRead(Select, capturable=True, of_each={}):
    """Read in each step the tokens with the largest true attention weights, summed over the query
    heads of a KV head."""

    method: Oracle

    def select(self, q: Tensor, top: int) -> Tensor:
        stored = self.store.since(0)
        assert self.plan is not None
        grouped = q.view(*stored.k.shape[:2], self.spec.group, -1)
        if self.spec.sink_logits is None:
            # [B G S]
            weights = filled(
                ops.row_weights(grouped, stored.k, self.spec.scale, "sum", stored.live)
            )
        else:
            scaled = filled(ops.row_scores(grouped, stored.k)) * self.spec.scale
            scaled = stored.without_missing(scaled, float("-inf"))
            weights = softmax(scaled, self.spec.sink_logits).sum(2)
        middle = spanned(weights, self.plan.sinks, self.sealed - self.plan.local)
        return ops.top_k(middle, top)


@dataclass(frozen=True, kw_only=True)
class Oracle(Windowed):
    """Define the oracle, which reads the tokens with the largest true attention weights, by its
    parameters: of the budget, `sinks` first tokens and a share `recent_ratio` of the rest, the last
    tokens, are always read."""

    policies = (OracleRead,)
    rows_stay = True
    takes = {Mass: None}

    sinks: int = 32
    recent_ratio: float = 0.5

    def cost(self, case: LayerWorkload) -> Cost:
        if self.reads_whole(case):
            return costs.dense(case)
        plan = self.split(case.budget)
        keys = case.sealed * case.key_bytes  # it chooses by all of them, sinks and window too
        return costs.select(case, plan, index_bytes=0) + Cost().reading(keys)
