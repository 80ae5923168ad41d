"""Defines policies that choose among the tokens that a limited pool still holds."""

from __future__ import annotations

from abc import abstractmethod
from itertools import islice

from torch import Tensor

from methods.base import AttnInput, Plan
from methods.layers.select import Select
from methods.layers.storage import Storage
from methods.parts.limited_pool import Eviction, Fetched, LimitedPool, size


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
