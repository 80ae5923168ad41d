"""Defines policies that choose what stays of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from methods.layers.policy import Policy


class Evict(Policy, ABC, capturable=True):
    """Let a part of the prompt stay after the seal; what is stored later is kept whole.

    If the budget covers the prompt nothing is evicted, and `evict` is not called.
    """

    def size(self, budget: int) -> int:
        """Return how many tokens stay under a budget of `budget` tokens; if it is no less than the
        number stored, all stay."""
        return budget

    @abstractmethod
    def evict(self, size: int) -> None:
        """Choose `size` tokens and drop the others, by `layer.retain`, or by
        `layer.retain_per_head` if heads keep different numbers of them."""

    def close(self, evicted: int) -> None:
        """Finish the seal: `evicted` tokens have left by this choice, and the store holds the
        others."""


class Keep(Evict, capturable=True):
    """Keep only the tokens that `keep` returns, equally many in every head."""

    @abstractmethod
    def keep(self, size: int) -> Tensor:
        """Return the `size` stored tokens that each KV head keeps, [B G size], ascending.

        It is [B H size] if each query head keeps its own; the store then holds a copy for each.
        """

    def evict(self, size: int) -> None:
        rows, given = self.keep(size), f"{type(self).__name__}.keep returned"
        self.layer.check_rows(given, rows, self.store.length, count=size, ascending=True)
        self.layer.retain(rows)
