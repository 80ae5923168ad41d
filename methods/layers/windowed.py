"""Splits a budget into sinks, a window at the prompt's end and chosen tokens, as PQCache's
comparison does (arXiv 2407.12820)."""

from __future__ import annotations

from collections.abc import Callable

from methods.base import Plan
from methods.layers.layer import PolicyMethod


class Windowed(PolicyMethod):
    """Define a method that divides its budget into `sinks` first tokens, the prompt's last tokens
    (a share `recent_ratio` of the rest), and chosen tokens. `paper_tokens` counts the budget as the
    paper of PQCache (arXiv 2407.12820) does: a share of what follows the sinks, with the sinks on
    top."""

    window_names = {"sinks": "sinks", "recent_ratio": "recent_ratio"}
    tunable = {
        "sinks": (0, 4, 16, 32),
        "recent_ratio": (0.0, 0.125, 0.25, 0.5, 0.75),
    }
    sinks: int
    recent_ratio: float

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(
                f"sinks={self.sinks} is negative: give the number of first tokens that are always read."
            )
        if not 0 <= self.recent_ratio < 1:
            raise ValueError(
                f"recent_ratio={self.recent_ratio} leaves nothing to select: give a share from 0 to below 1."
            )

    @property
    def smallest_budget(self) -> int:
        return self.sinks + 1

    def split(self, budget: int) -> Plan:
        """Return how many of `budget` prompt tokens are spent on sinks, on the window at the
        prompt's end, and on chosen tokens."""
        local = int((budget - self.sinks) * self.recent_ratio)
        return Plan(self.sinks, local, budget - self.sinks - local)

    def paper_tokens(self, budget: Callable[[int], int], sealed: int) -> int:
        return self.sinks + budget(sealed - self.sinks)
