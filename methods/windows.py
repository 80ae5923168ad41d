"""Sinks and a prompt-local window inside the budget, as PQCache's comparison splits it (arXiv 2407.12820)."""

from __future__ import annotations

from dataclasses import dataclass

from methods.layers import Plan


@dataclass(frozen=True, slots=True)
class Windows:
    """Of a budget: `sinks` first tokens, `recent_ratio` of the rest as the prompt's last ones, the others by choice."""

    sinks: int
    recent_ratio: float

    def check(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks={self.sinks} is negative: give the number of first tokens that are always read.")
        if not 0 <= self.recent_ratio < 1:
            raise ValueError(
                f"recent_ratio={self.recent_ratio} leaves nothing to select: give a share from 0 to below 1."
            )

    @property
    def smallest_budget(self) -> int:
        return self.sinks + 1

    def split(self, budget: int) -> Plan:
        local = int((budget - self.sinks) * self.recent_ratio)
        return Plan(self.sinks, local, budget - self.sinks - local)
