"""Defines policies that say what stays of a prompt, and carry it out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from methods.layers.policy import Policy


class Evict(Policy, ABC, capturable=True):
    """Lets a part of the prompt stay after the seal, and carries that out; what comes later is kept whole.

    Where the budget covers the prompt nothing leaves, and `evict` is not called.
    """

    def size(self, budget: int) -> int:
        """Return how many tokens stay under a budget of so many; all, if that is the number of stored ones or more."""
        return budget

    @abstractmethod
    def evict(self, size: int) -> None:
        """Choose `size` tokens, and let the others go: by `layer.retain`, or by `layer.retain_per_head` where heads
        keep different numbers of them."""

    def close(self, evicted: int) -> None:
        """Finish, now that the choice is made: so many tokens have left by it, and the store holds the others."""


class Keep(Evict, capturable=True):
    """Lets only what `keep` names stay, as many tokens in every head."""

    @abstractmethod
    def keep(self, size: int) -> Tensor:
        """Return the `size` stored tokens that each KV head keeps [B G size], ascending.

        It is [B H size] where each query head keeps its own; the store then holds a copy for each.
        """

    def evict(self, size: int) -> None:
        rows, given = self.keep(size), f"{type(self).__name__}.keep returned"
        self.layer.check_rows(given, rows, self.store.length, count=size, ascending=True)
        self.layer.retain(rows)
