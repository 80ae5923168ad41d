"""The highest rate at which a quantile of TTFT stays below a limit: doubling, halving, then bisecting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Self

from harness.config.settings import SettingsError

MOST = 8  # halvings from the rates that were given
CLOSE = 1.1  # ratio of the two rates between which the limit lies


@dataclass(frozen=True)
class FirstTokenLimit:
    """`p90=2s`: 90 % of the turns have their first token within 2 s of their question."""

    quantile: str
    seconds: float

    @classmethod
    def read(cls, text: str) -> Self:
        found = re.fullmatch(r"(p50|p90|p99)=(\d+(?:\.\d+)?)s?", text)
        if not found or not float(found[2]):
            raise SettingsError(f"--limit {text} is no limit of TTFT: write p50, p90 or p99 and seconds, as in p90=2s.")
        return cls(found[1], float(found[2]))

    @property
    def key(self) -> str:
        """Of the figures of a run."""
        return f"ttft_{self.quantile}_s"

    def __str__(self) -> str:
        return f"{self.quantile} of TTFT <= {self.seconds:g} s"


@dataclass
class RateSearch:
    """Of one system. `given`: rates that are run whatever comes of them. `most`: a rate beyond which nothing changes,
    for all sessions are there at once."""

    given: Sequence[float]
    most: float
    kept: list[float] = field(default_factory=list)  # rates within the limit
    broken: list[float] = field(default_factory=list)

    def learn(self, rate: float, within: bool) -> None:
        (self.kept if within else self.broken).append(rate)

    @property
    def highest(self) -> float | None:
        """Within the limit, and below every rate that is not."""
        return max((rate for rate in self.kept if rate < self.lowest_broken), default=None)

    @property
    def lowest_broken(self) -> float:
        return min(self.broken, default=float("inf"))

    def next(self) -> float | None:
        """The rate to run now; None where all is known."""
        tried = {*self.kept, *self.broken}
        if left := [rate for rate in self.given if rate not in tried]:
            return left[0]
        low, high = self.highest, self.lowest_broken
        if low is None:
            return high / 2 if high > min(self.given) / 2**MOST else None
        if not self.broken:
            return low * 2 if low < self.most else None
        return sqrt(low * high) if high / low > CLOSE else None
