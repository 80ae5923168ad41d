"""Defines a pool with room for some of a head's tokens: once it is full, each new token replaces
one that leaves.

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

from methods.base import AttnInput, Budget, Cost, LayerWorkload, PeakExtra, Plan
from methods.base.state import StepCounters
from methods.budget import BudgetError
from methods.layers.read import Select
from methods.layers.storage import Storage
from methods.parts import costs

Eviction = Literal["counter", "fifo", "lru"]
Counts = list[int] | Tensor  # one for each sequence; a Tensor [B] where a step does not wait for them
Fetched = tuple[Tensor, Counts]  # rows [B G K], of which each sequence fetches the first so many
USE_BYTES, LIVE_BYTES = 4, 1  # of a column: use, and whether it is there
NEVER = torch.iinfo(torch.int32).max


class LimitedPool:
    """Give `slots` tokens of each KV head room. The tables have a column per prompt token;
    generated tokens only take slots."""

    def __init__(
        self, policy: Eviction, slots: int, shape: tuple[int, int, int], device: torch.device, counters: StepCounters
    ) -> None:
        """Begin empty. shape: sequences, KV heads, tokens of the prompt. `counters` counts tokens
        and fetches of captured steps, one of each per step."""
        self.policy, self.slots, self.counters = policy, slots, counters
        self.uses = torch.zeros(shape, dtype=torch.int32, device=device)  # how often, or when last; 0 under fifo
        self.live = torch.zeros(shape, dtype=torch.bool, device=device)
        self.entered = self.step = 0  # tokens so far, and fetches

    @property
    def columns(self) -> int:
        return self.live.shape[2]

    def take(self, fetches: Iterable[Fetched]) -> None:
        """Let the prompt enter token by token. `fetches`: what each token but the first fetches
        before it enters, if the policy uses it; they may be computed one by one from what the pool
        then holds."""
        remaining = iter(fetches)
        for column in range(self.columns):
            if column and self.policy != "fifo":
                self.fetched(*next(remaining))
            self.enter(column)

    def fetched(self, rows: Tensor, counts: Counts) -> None:
        """Count a fetch. rows [B G K], of which the first `counts` [B] are different tokens; the
        others may be any."""
        self.step += 1
        if self.policy == "fifo":
            return
        read = leading_columns(rows, counts)
        if self.policy == "counter":
            self.uses.scatter_add_(2, rows, read.expand_as(rows).int())
        else:
            now = self.counters.tensor(self.step, rows.device).int()
            self.uses.scatter_reduce_(2, rows, read.expand_as(rows).int() * now, "amax")

    def enter(self, column: int) -> None:
        """Let a token of the prompt in. If all slots are taken, another leaves first."""
        if self.entered >= self.slots:
            self.live.scatter_(2, self._victims(), False)
        self.entered += 1
        self.live[:, :, column] = True
        self.uses[:, :, column] = self.step if self.policy == "lru" else 0

    def enter_generated(self) -> None:
        """Let a token without a column in, in a step that may be captured."""
        full, victims = self.counters.tensor(self.entered, self.live.device) >= self.slots, self._victims()
        self.live.scatter_(2, victims, self.live.gather(2, victims) & ~full)
        self.entered += 1

    def count_replayed(self, steps: int) -> None:
        """Update what is counted in Python, after steps that were replayed."""
        self.entered += steps
        self.step += steps

    def _victims(self) -> Tensor:
        """Return the token of each head that leaves next, [B G 1]."""
        older = self.live & (self.live.cumsum(2) <= max(1, self.slots // 2))
        return self.uses.masked_fill(~older, NEVER).argmin(2, keepdim=True)

    def compact(self) -> Tensor:
        """Drop the columns of evicted tokens, and return those that stay, [B G P], in order."""
        kept = self.live.nonzero()[:, 2].view(*self.live.shape[:2], -1)
        self.uses, self.live = self.uses.gather(2, kept), self.live.gather(2, kept)
        return kept

    def hide(self, x: Tensor) -> Tensor:
        """Set the entries of evicted tokens to -inf, in place. x [B G S] or [B G g S], prompt
        tokens first"""
        evicted = ~self.live if x.dim() == 3 else ~self.live.unsqueeze(2)
        x[..., : self.columns].masked_fill_(evicted, float("-inf"))
        return x


def check(asked: float | None, policy: str) -> None:
    """Raise `ValueError` for a capacity or a policy that makes no sense."""
    share = isinstance(asked, float) and 0 < asked <= 1
    number = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 1
    if not (asked is None or share or number):
        raise ValueError(
            f"pool_capacity={asked} is neither a share of the tokens (a float above 0 and up to 1, like 0.8), a number "
            "of them (from 1), nor null for all."
        )
    if policy not in get_args(Eviction):
        raise ValueError(f"pool_policy={policy!r} is unknown: choose counter, fifo or lru.")


def size(asked: float | None, tokens: int) -> int | None:
    """Return the slots of a pool that may see up to `tokens` tokens; None if it has room for
    all."""
    slots = tokens if asked is None else asked if isinstance(asked, int) else int(asked * tokens)
    return slots if slots < tokens else None


def kept(asked: float | None, case: LayerWorkload) -> tuple[LayerWorkload, Cost]:
    """Return `case` with what the pool keeps of its prompt, and the cost of its tables, of which a
    step reads which tokens are there."""
    slots = size(asked, case.capacity)
    if slots is None:
        return case, Cost()
    left = min(case.sealed, slots)
    case = replace(case, sealed=left, budget=min(case.budget, left))
    columns = left * case.spec.num_kv_heads
    return case, Cost((USE_BYTES + LIVE_BYTES) * columns).reading(LIVE_BYTES * columns)


def filling(asked: float | None, policy: Eviction, case: LayerWorkload) -> PeakExtra:
    """Return the memory of the prompt while it passes through the pool, and before: the queries by
    which its tokens fetch."""
    slots = size(asked, case.capacity)
    if slots is None:
        return PeakExtra()
    rehearsed = 0 if policy == "fifo" else case.sealed * case.query_bytes
    return PeakExtra(rehearsed, 0, costs.evicting(case, slots - case.reserve))


def has_room(asked: float | None, case: LayerWorkload) -> bool:
    """Return whether a pool has a slot for some of the prompt, once each of the generated tokens
    has one."""
    slots = size(asked, case.capacity)
    return slots is None or slots > case.reserve


def check_budget(budget: Budget | None, sealed: int, layer: int) -> None:
    """Raise `BudgetError` if a limited pool would have to be read whole even for a long prompt of
    `sealed` tokens, or would have to drop generated tokens."""
    if budget is not None and budget.generated is not None:
        raise BudgetError(
            "Every generated token has a slot of the limited pool: leave out budget_generated or pool_capacity."
        )
    if budget is not None and layer not in budget.dense_layers and budget.covers(sealed, layer):
        raise BudgetError(
            f"budget={budget} covers every prompt, so nothing is fetched that a limited pool could go by: set a "
            "smaller budget, or pool_capacity=null."
        )


def leading_columns(rows: Tensor, counts: Counts) -> Tensor:
    """Return which of rows [B G K] are among the first `counts` [B] of their sequence, bool
    [B 1 K]."""
    first = counts if isinstance(counts, Tensor) else torch.tensor(counts, device=rows.device)
    return torch.arange(rows.shape[2], device=rows.device) < first.view(-1, 1, 1)


class Pooled(Select, capturable=True):
    """Let the prompt enter the pool at the seal (`fill`); then each new token takes a slot, and is
    itself always read.

    A subclass calls `fill` in `index`, hides evicted tokens by `present`, and tells the pool what
    it fetched. While `rehearses`, it puts the queries [B H T D] by which the prompt's tokens fetch
    into `rehearsed`. It has neither sinks nor window."""

    pool: LimitedPool | None = None

    def __init__(self, capacity: float | None, eviction: Eviction) -> None:
        """Limit the pool to `capacity`: a share of prompt and new tokens, or a number; None for
        all. Dense layers keep all."""
        self.capacity, self.eviction = capacity, eviction
        self.rehearsed: list[Tensor] = []

    def bind(self, layer: Storage) -> None:
        super().bind(layer)
        budget = self.request.budget
        dense = budget is not None and self.spec.index in budget.dense_layers
        self.slots = (
            None if dense else size(self.capacity, self.request.capacity)
        )  # slots of each KV head; None: room for all
        if self.slots is not None and self.request.grows:
            raise ValueError("pool_capacity is a part of the room for all tokens: say it, as attached(..., capacity=).")
        if self.slots is not None and self.request.reuse_steps:
            raise ValueError("reuse_steps would read tokens that a limited pool has evicted: set pool_capacity=null.")

    @abstractmethod
    def fetches(self, q: Tensor) -> Fetched:
        """Return what a token with query q [B H 1 D] fetches of the earlier tokens that are still
        there."""

    @property
    def rehearses(self) -> bool:
        return self.slots is not None and self.eviction != "fifo"

    def seal(self, limit: int | None) -> None:
        if self.slots is not None:
            if not self._has_room(self.slots):
                limit = None
            if limit is None:
                self._keep_all(self.slots)
        super().seal(limit)

    def _has_room(self, slots: int) -> bool:
        """Return whether the pool has a slot for some of the prompt. Raise `ValueError` for a
        number of slots that has none for any prompt."""
        new = self.request.capacity - self.layer.seen
        if slots > new:
            return True
        if isinstance(self.capacity, int):
            raise ValueError(
                f"pool_capacity={self.capacity} has no slot for the prompt, since up to {new} new tokens never leave: "
                f"set it to at least {new + 1} tokens, or generate fewer."
            )
        return False

    def _keep_all(self, slots: int) -> None:
        """Read a prompt whole that is too short for the pool, or that the budget covers."""
        self.rehearsed.clear()
        if self.layer.fallback is None:
            self.layer.fallback = (
                f"all is read, and nothing leaves the pool: the prompt of {self.layer.seen} tokens is covered by the "
                f"budget, or too short for {slots} slots"
            )

    def reopen(self) -> None:
        if self.slots is not None:
            raise ValueError("A limited pool lets tokens go that a further turn attends to: set pool_capacity=null.")

    def state(self) -> dict[str, Tensor]:
        self.reopen()
        return {}

    def fill(self) -> Tensor:
        """Let the prompt pass through the pool and keep what it then holds. Return its rows
        [B G P], in order."""
        assert self.slots is not None
        assert self.plan is not None
        shape = (*self.store.k.shape[:2], self.sealed)
        self.pool = LimitedPool(self.eviction, self.slots, shape, self.request.device, self.cache.counters)
        queries = (q for chunk in self.rehearsed for q in chunk.split(1, 2))
        self.pool.take(self.fetches(q) for q in islice(queries, 1, None))
        self.rehearsed.clear()
        kept = self.pool.compact()
        self.layer.retain(kept)
        self.plan = Plan(0, 0, min(self.plan.top, kept.shape[2]))
        return kept

    def present(self, x: Tensor) -> Tensor:
        """Set x [B G S] or [B G g S], which has an entry per token, to -inf for evicted tokens."""
        return x if self.pool is None else self.pool.hide(x)

    def check_choice(self, rows: Tensor, top: int | None) -> None:
        """Check the choice, which may be of fewer than `top` tokens."""
        super().check_choice(rows, None)

    def decode(self, x: AttnInput) -> Tensor:
        out = super().decode(x)
        if self.pool is not None:
            self.pool.enter_generated()
        return out

    def together_refusal(self) -> str | None:
        return super().together_refusal() if self.pool is None else "a limited pool holds the tokens of one sequence"

    def count_replayed(self, steps: int) -> None:
        super().count_replayed(steps)
        if self.pool is not None:
            self.pool.count_replayed(steps)
