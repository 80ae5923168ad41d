"""SnapKV: lets the prompt's last queries vote for what is kept (arXiv 2404.14469).

The rule: the softmax weights of the last `window` queries are summed per key and pooled over
neighbouring tokens. The keys with the largest pooled sums and the window itself are kept, together
exactly the budget. This happens once, at the seal: the prompt's own outputs are dense, later tokens
are kept whole, and keys stay at their positions. A further turn shorter than the window votes with
the queries it has. 32 queries vote, as in the released code's configurations. With
`select_per=kv_head` votes are averaged over a group before they are pooled, which differs from
pooling first only for `max`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, pad

from kernels import ops
from kernels.sink_logits import column_sums
from methods.abilities.kept_codec import KeptCodec
from methods.abilities.last_queries import LastQueries
from methods.base import Cost, LayerSpec, LayerWorkload, Plan
from methods.layers import Policy, PolicyMethod, between_ends
from methods.parts import costs
from methods.pools import KVStore


class SnapKeep(LastQueries, capturable=True, of_each={"last": None}):
    """Collect the prompt's last `window` queries. When the prompt is complete, the tokens that
    receive most attention from these queries stay, and the others are dropped."""

    method: SnapKV

    def keep(self, size: int) -> Tensor:
        window = self.method.window
        plan = Plan(0, window, size - window)
        return between_ends(ops.top_k(self._votes(), plan.top), plan, self.store.length)

    def best_generated(self, count: int, size: int) -> Tensor:
        """Return which `size` of the last `count` stored tokens, the generated ones, each KV head
        keeps, [B G size]: the latest, as many as vote, and of the others those with most votes."""
        plan = Plan(0, min(self.method.window, size), size - min(self.method.window, size))
        votes = pad(self._votes(), (0, self.method.window), value=torch.inf)
        votes = votes[..., votes.shape[2] - count : votes.shape[2] - plan.local]
        of_heads = votes.unflatten(1, (self.layer.heads, -1)).mean(2)
        return between_ends(ops.top_k(of_heads, plan.top), plan, count)

    def _votes(self) -> Tensor:
        """Return the votes for every stored token except the window, [B G S] or [B H S]: the
        attention that it received from the last queries, pooled over neighbouring tokens."""
        assert self.queries is not None
        return self.pooled_votes(self.queries, self.store)

    def pooled_votes(self, queries: Tensor, store: KVStore, head: int | None = None) -> Tensor:
        """Return the attention that each token of `store` except the window receives from queries
        [B H w D], pooled over neighbouring tokens, [B G|H S]: for all KV heads, or for KV head
        number `head` alone, if `store` is its own."""
        sums = column_sums(queries, store.k, self.spec.scale, self.spec.sinks_of(head))  # [B H S]
        # before pooling, which would spread the window's votes
        sums = sums[..., : store.length - self.method.window]
        if self.method.select_per == "kv_head":
            sums = sums.unflatten(1, (store.heads, -1)).mean(2)
        # zeros beyond the ends count in `avg`
        pool = max_pool1d if self.method.pooling == "max" else avg_pool1d
        return pool(sums, self.method.kernel, stride=1, padding=self.method.kernel // 2)


@dataclass(frozen=True, kw_only=True)
class SnapKV(PolicyMethod):
    """Define SnapKV, which keeps the prompt tokens that its last queries attend to, by its
    parameters. `window`: how many last queries vote, whose tokens are kept too. `kernel`: over how
    many neighbouring tokens votes are pooled, an odd number (1: none), by `pooling`. `select_per`:
    whether each KV head or each query head keeps tokens of its own."""

    policies: ClassVar[tuple[type[Policy], ...]] = (SnapKeep,)
    takes = {KeptCodec: None}
    tunable = {
        "window": (8, 16, 32, 64),
        "kernel": (1, 3, 5, 7, 11, 15, 23, 31),
        "pooling": ("max", "avg"),
    }

    window: int = 32
    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"
    select_per: Literal["kv_head", "query_head"] = "kv_head"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(
                f"window={self.window} leaves no query to vote: give at least 1, 32 in the paper's runs."
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                f"kernel={self.kernel} has no middle: give an odd number of tokens to pool, like 7."
            )
        if self.pooling not in ("max", "avg"):
            raise ValueError(f"pooling={self.pooling!r} is unknown: choose max or avg.")
        if self.select_per not in ("kv_head", "query_head"):
            raise ValueError(
                f"select_per={self.select_per!r} is unknown: choose kv_head or query_head."
            )

    @property
    def smallest_budget(self) -> int:
        return self.window + 1

    def check_model(self, spec: LayerSpec) -> None:
        if self.select_per == "query_head" and spec.values_in_keys:
            raise ValueError(
                f"select_per=query_head would keep {spec.num_heads} copies of each latent, one per query head: leave "
                "it at kv_head."
            )

    def kept(self, case: LayerWorkload) -> int:
        """Return how many prompt tokens stay in the layer that `case` describes."""
        return case.budget

    def cost(self, case: LayerWorkload) -> Cost:
        queries = Cost(self.window * case.query_bytes if case.room < case.reserve else 0)
        if self.reads_whole(case):
            return costs.dense(case) + queries
        copies = case.spec.group if self.select_per == "query_head" else 1
        return costs.evict(case, self.kept(case), copies) + queries
