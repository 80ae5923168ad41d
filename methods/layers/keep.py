"""Defines policies that say what stays of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from methods.layers.policy import Policy


class Keep(Policy, ABC, capturable=True):
    """Lets only what `keep` names stay of the prompt after the seal; what comes later is kept whole.

    Where the budget covers the prompt nothing leaves, and `keep` is not called.
    """

    @abstractmethod
    def keep(self, size: int) -> Tensor:
        """Return the `size` stored tokens that each KV head keeps [B G size], ascending.

        It is [B H size] where each query head keeps its own; the store then holds a copy for each.
        """

    def size(self, budget: int) -> int:
        """Return how many tokens stay under a budget of so many; all, if that is the number of stored ones or more."""
        return budget

    def evict(self, size: int) -> None:
        """Carry the choice out. Heads that keep different numbers of tokens call `layer.retain_per_head`."""
        rows, given = self.keep(size), f"{type(self).__name__}.keep returned"
        self.layer.check_rows(given, rows, self.store.length, count=size, ascending=True)
        self.layer.retain(rows)

    def close(self, evicted: int) -> None:
        """Finish, now that the choice is made: so many tokens have left by it, and the store holds the others."""
