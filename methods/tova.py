"""TOVA: drops the token to which the newest one attends least, with every token of the answer (arXiv
2401.06104).

The rule: when rows must go, the softmax weights of the last token's query are averaged over all
query heads of the layer, and the rows with the smallest weights go, the same in all heads. This
happens once at the seal, which leaves room in the budget for the next token, and then before each
further token. Keys stay at their positions. The last token's row always stays, as in kvpress; the
authors' code would drop it if its own query gave it the least weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels import ops
from kernels.sink_logits import column_sums
from methods.abilities.last_queries import EvictsWhileDecoding, LastQueries
from methods.base import Plan
from methods.layers import between_ends


class TOVAKeep(LastQueries, capturable=True, of_each={}):
    """Keep the last token and those to which it attends most, on average over all query heads."""

    def size(self, budget: int) -> int:
        return budget - 1  # the next token's row is in the budget

    def keep(self, size: int) -> Tensor:
        assert self.queries is not None
        # [B H S]
        weights = column_sums(self.queries, self.store.k, self.spec.scale, self.spec.sink_logits)
        plan = Plan(0, 1, size - 1)
        best = ops.top_k(weights[..., :-1].mean(1, keepdim=True), plan.top)
        return between_ends(best, plan, self.store.length).expand(-1, self.spec.num_kv_heads, -1)


@dataclass(frozen=True, kw_only=True)
class TOVA(EvictsWhileDecoding):
    """Define TOVA, which drops, with every token of the answer, the one that the newest token
    attends to least. It has no parameters."""

    policies = (TOVAKeep,)

    @property
    def smallest_budget(self) -> int:
        return 2
