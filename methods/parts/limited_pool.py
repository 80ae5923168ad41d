"""Defines a pool with room for some of a head's tokens: once it is full, each new token replaces
one that leaves.

It is InfiniGen's host pool (arXiv 2406.19707). With `fifo` the oldest token leaves; with `counter`
the one fetched least often, and with `lru` the one fetched least recently, both among the older
half of the pool. Entering counts as a fetch for `lru`, not for `counter`. Among equals the oldest
leaves. Every KV head has its own victims.

The released code leaves what it evicted among the candidates, and so evicts the same token again;
here it is gone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor

from methods.base import Budget, Cost, LayerWorkload, PeakExtra
from methods.base.counters import StepCounters
from methods.budget import BudgetError
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
