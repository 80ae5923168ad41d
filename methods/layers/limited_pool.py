"""Gives a head room for some of its tokens: once the pool is full, each new token replaces one that
leaves.

It is InfiniGen's host pool (arXiv 2406.19707). With `fifo` the oldest token leaves; with `counter`
the one fetched least often, and with `lru` the one fetched least recently, both among the older
half of the pool. Entering counts as a fetch for `lru`, not for `counter`. Among equals the oldest
leaves. Every KV head has its own victims.

The released code leaves what it evicted among the candidates, and so evicts the same token again;
here it is gone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Literal, get_args

import torch
from torch import Tensor

from methods.base import AttnInput, Budget, Cost, LayerWorkload, Method, Plan
from methods.base.method import LONG
from methods.base.state import StepCounters
from methods.budget import BudgetError
from methods.layers.read import Select
from methods.layers.storage import Storage

Eviction = Literal["counter", "fifo", "lru"]
# rows [B G K], of which each sequence fetches the first so many [B]
Fetched = tuple[Tensor, Tensor]
USE_BYTES, LIVE_BYTES = 4, 1  # of a column: use, and whether it is there
NEVER = torch.iinfo(torch.int32).max


class LimitedPool:
    """Decide which tokens a KV head keeps when it has room for only `slots` of them. It holds no
    keys or values, only tables [B G S] with a column per prompt token: whether the token is still
    there, and how it was used. Generated tokens take slots but have no column, as they never
    leave."""

    def __init__(
        self,
        policy: Eviction,
        slots: int,
        shape: tuple[int, int, int],
        device: torch.device,
        counters: StepCounters,
    ) -> None:
        """Begin empty. `policy`: which token leaves when all slots are taken, the oldest (fifo),
        the least recently read (lru) or the least often read (counter). shape: sequences, KV heads,
        tokens of the prompt. `counters` holds growing numbers on the device while steps are
        captured in a CUDA graph; each step adds one token and one fetch."""
        self.policy, self.slots, self.counters = policy, slots, counters
        # how often, or when last; 0 under fifo
        self.uses = torch.zeros(shape, dtype=torch.int32, device=device)
        self.live = torch.zeros(shape, dtype=torch.bool, device=device)
        self.entered = self.step = 0  # tokens so far, and fetches

    def take(self, fetches: Iterable[Fetched]) -> None:
        """Let the prompt enter token by token, each in all heads. Once the slots are full, one
        token per head leaves for each that enters. `fetches`: for each token but the first, the
        tokens that it fetches before it enters. They are needed only if the policy counts fetches,
        and may be generated one by one from what the pool holds at that moment."""
        remaining = iter(fetches)
        for column in range(self.live.shape[2]):
            if column and self.policy != "fifo":
                self.fetched(*next(remaining))
            if self.entered >= self.slots:
                self.live.scatter_(2, self._victims(), False)
            self.entered += 1
            self.live[:, :, column] = True
            self.uses[:, :, column] = self.step if self.policy == "lru" else 0

    def fetched(self, rows: Tensor, counts: Tensor) -> None:
        """Count one fetch for each token that a step has read. rows [B G K]: numbers of prompt
        tokens. Of each sequence the first `counts` [B] of them count and are different; the rest
        are padding."""
        self.step += 1
        read = leading_columns(rows, counts).expand_as(rows).int()
        if self.policy == "counter":
            self.uses.scatter_add_(2, rows, read)
        elif self.policy == "lru":
            now = self.counters.tensor(self.step, rows.device).int()
            self.uses.scatter_reduce_(2, rows, read * now, "amax")

    def enter_generated(self) -> None:
        """Give a generated token a slot in each head; if all are taken, a prompt token leaves. This
        works also in a step that is captured in a CUDA graph."""
        full = self.counters.tensor(self.entered, self.live.device) >= self.slots
        victims = self._victims()
        self.live.scatter_(2, victims, self.live.gather(2, victims) & ~full)
        self.entered += 1

    def _victims(self) -> Tensor:
        """Return the number of the prompt token that leaves next in each head, [B G 1]. It is
        chosen among the older half of the pool."""
        older = self.live & (self.live.cumsum(2) <= max(1, self.slots // 2))
        return self.uses.masked_fill(~older, NEVER).argmin(2, keepdim=True)

    def compact(self) -> Tensor:
        """Remove the columns of tokens that have left from the tables, which say which tokens are
        there and how they were used. Return the numbers of the tokens that stay, [B G P],
        ascending."""
        kept = self.live.nonzero()[:, 2].view(*self.live.shape[:2], -1)
        self.uses, self.live = self.uses.gather(2, kept), self.live.gather(2, kept)
        return kept


def leading_columns(rows: Tensor, counts: Tensor) -> Tensor:
    """Return a mask [B 1 K] of the first `counts` [B] columns of each sequence in rows [B G K]."""
    return torch.arange(rows.shape[2], device=rows.device) < counts.to(rows.device).view(-1, 1, 1)


class PooledMethod(Method):
    """Define a method whose KV heads may have room for only a part of the tokens, with the
    parameters `pool_capacity` (a share of prompt and new tokens, or a number of tokens; None for
    all) and `pool_policy` (which token leaves when the room is full). Layers that the budget calls
    dense hold all tokens."""

    pool_capacity: float | None
    pool_policy: Eviction

    def __post_init__(self) -> None:
        asked = self.pool_capacity
        share = isinstance(asked, float) and 0 < asked <= 1
        number = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 1
        if not (asked is None or share or number):
            raise ValueError(
                f"pool_capacity={asked} is neither a share of the tokens (a float above 0 and up to 1, like 0.8), a "
                "number of them (from 1), nor null for all."
            )
        if self.pool_policy not in get_args(Eviction):
            raise ValueError(
                f"pool_policy={self.pool_policy!r} is unknown: choose counter, fifo or lru."
            )

    def slots(self, tokens: int) -> int | None:
        """Return for how many tokens per KV head there is room, in a cache that may see up to
        `tokens` tokens; None if all have room."""
        asked = self.pool_capacity
        slots = (
            tokens if asked is None else asked if isinstance(asked, int) else int(asked * tokens)
        )
        return slots if slots < tokens else None

    def check(self, budget: Budget | None, layer: int = 0) -> None:
        """Raise `BudgetError` if the budget does not fit this method, or if room for tokens is
        limited and the budget covers even a long prompt, so that nothing is chosen, or limits
        generated tokens, which must all stay."""
        super().check(budget, layer)
        if budget is None or self.slots(LONG) is None:
            return
        if budget.generated is not None:
            raise BudgetError(
                "Every generated token has a slot of the limited pool: leave out budget_generated or pool_capacity."
            )
        if layer not in budget.dense_layers and budget.covers(LONG, layer):
            raise BudgetError(
                f"budget={budget} covers every prompt, so nothing is fetched that a limited pool could go by: set a "
                "smaller budget, or pool_capacity=null."
            )

    def reads_whole(self, case: LayerWorkload) -> bool:
        """Return whether every step reads the whole prompt: the budget covers it, or the generated
        tokens alone fill all slots, so that none can be given to the prompt."""
        slots = self.slots(case.capacity)
        return super().reads_whole(case) or (slots is not None and slots <= case.reserve)

    def kept(self, case: LayerWorkload) -> tuple[LayerWorkload, Cost]:
        """Return `case` with only as many prompt tokens as have room, and the cost of the tables
        that count their use. A step reads only the table that says which tokens are there."""
        if (slots := self.slots(case.capacity)) is None:
            return case, Cost()
        left = min(case.sealed, slots)
        columns = left * case.spec.num_kv_heads
        tables = Cost((USE_BYTES + LIVE_BYTES) * columns).reading(LIVE_BYTES * columns)
        return replace(case, sealed=left, budget=min(case.budget, left)), tables


class Pooled(Select, capturable=True):
    """Choose what a step reads while each KV head has room for only `slots` tokens. At the seal
    (the end of the prompt) the prompt enters token by token (`fill`) and what has no room is
    dropped; then each new token takes a slot, and is itself always read.

    A subclass calls `fill` in `index`, hides dropped tokens by `present`, and tells the pool what
    it fetched. While `rehearses` is true, it appends the prompt's queries [B H T D] to `rehearsed`;
    they decide which tokens count as used. There are no sinks and no window."""

    method: PooledMethod
    pool: LimitedPool | None = None

    def bind(self, layer: Storage) -> None:
        super().bind(layer)
        budget, request = self.request.budget, self.request
        dense = budget is not None and self.spec.index in budget.dense_layers
        # of each KV head; None: room for all
        self.slots = None if dense else self.method.slots(request.capacity)
        self.rehearsed: list[Tensor] = []
        if self.slots is not None and request.grows:
            raise ValueError(
                "pool_capacity is a part of the room for all tokens: say it, as attached(..., capacity=)."
            )
        if self.slots is not None and request.reuse_steps:
            raise ValueError(
                "reuse_steps would read tokens that a limited pool has evicted: set pool_capacity=null."
            )

    @abstractmethod
    def fetches(self, q: Tensor) -> Fetched:
        """Return which tokens a query q [B H 1 D] of the prompt would fetch, among the earlier ones
        that still have room: rows [B G K], and how many of them count in each sequence, [B]."""

    @property
    def rehearses(self) -> bool:
        return self.slots is not None and self.method.pool_policy != "fifo"

    def seal(self, limit: int | None) -> None:
        """Prepare for steps that read at most `limit` prompt tokens (None for all). A prompt is
        read whole if the budget covers it, or if the generated tokens leave it no slot; then no
        token leaves."""
        if self.slots is not None:
            capacity, new = self.method.pool_capacity, self.request.capacity - self.layer.seen
            if self.slots <= new and isinstance(capacity, int):
                raise ValueError(
                    f"pool_capacity={capacity} has no slot for the prompt, since up to {new} new tokens never leave: "
                    f"set it to at least {new + 1} tokens, or generate fewer."
                )
            limit = None if self.slots <= new else limit
            if limit is None:
                self.rehearsed.clear()
                self.layer.fallback = self.layer.fallback or (
                    f"all is read, and nothing leaves the pool: the prompt of {self.layer.seen} tokens is covered by "
                    f"the budget, or too short for {self.slots} slots"
                )
        super().seal(limit)

    def reopen(self) -> None:
        if self.slots is not None:
            raise ValueError(
                "A limited pool lets tokens go that a further turn attends to: set pool_capacity=null."
            )

    def state(self) -> dict[str, Tensor]:
        self.reopen()
        return {}

    def fill(self) -> Tensor:
        """Replay how the prompt's tokens would come one by one to a place with limited room, each
        pushing out another one once it is full, and drop from the layer those that were pushed out.
        Return the numbers of the kept tokens, [B G P], ascending."""
        assert self.slots is not None
        assert self.plan is not None
        shape = (*self.store.k.shape[:2], self.sealed)
        self.pool = LimitedPool(
            self.method.pool_policy, self.slots, shape, self.request.device, self.cache.counters
        )
        queries = (q for chunk in self.rehearsed for q in chunk.split(1, 2))
        self.pool.take(self.fetches(q) for q in islice(queries, 1, None))
        self.rehearsed.clear()
        kept = self.pool.compact()
        self.layer.retain(kept)
        self.plan = Plan(0, 0, min(self.plan.top, kept.shape[2]))
        return kept

    def present(self, x: Tensor) -> Tensor:
        """Set the scores of dropped tokens to -inf, in place, and return x. x [B G S] or [B G g S]
        has an entry per token, prompt tokens first."""
        if self.pool is not None:
            live = self.pool.live if x.dim() == 3 else self.pool.live.unsqueeze(2)
            x[..., : live.shape[-1]].masked_fill_(~live, float("-inf"))
        return x

    def decode(self, x: AttnInput) -> Tensor:
        out = super().decode(x)
        if self.pool is not None:
            self.pool.enter_generated()
        return out

    def together_refusal(self) -> str | None:
        return (
            super().together_refusal()
            if self.pool is None
            else "a limited pool holds the tokens of one sequence"
        )

    def count_replayed(self, steps: int) -> None:
        super().count_replayed(steps)
        if self.pool is not None:
            self.pool.entered += steps
            self.pool.step += steps
