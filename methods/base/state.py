"""Holds what all layers of one cache share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from methods.base.counters import StepCounters
from methods.base.request import Request
from methods.tiers.traffic import Traffic
from methods.tiers.transfer.engine import Arrival, TransferEngine

T = TypeVar("T")


@dataclass
class Checks:
    """Says whether what a method returns is checked: from the seal of a turn to its end, once for a first turn and once
    for a further one. `pending` names the turns still to check, and is shared by all caches of a run."""

    pending: set[str] = field(default_factory=set)
    on: bool = False

    def begin(self, turn: str) -> None:
        """Start checking if `turn`, whose prompt is about to be sealed, is of a kind still to check."""
        self.on = turn in self.pending
        self.pending.discard(turn)


@dataclass
class CacheState:
    """Holds the `request`, what belongs to the cache and changes with every step (`traffic`, `counters` and `checks`),
    and the `engine` that moves rows for all caches of the device: `ahead` as soon as they are asked for, else once they
    are waited for."""

    request: Request
    traffic: Traffic = field(default_factory=Traffic)
    counters: StepCounters = field(default_factory=StepCounters)
    checks: Checks = field(default_factory=Checks)
    engine: TransferEngine = field(default_factory=TransferEngine)
    ahead: bool = False

    def fetch(self, read: Callable[[Traffic], T]) -> Arrival[T]:
        """Ask for the rows that `read` brings to the device, and that somebody waits for later: in the same step, while
        steps are captured."""
        begin = self.engine.branch if self.counters.running else self.engine.begin
        return begin(read, self.traffic, self.request.device, ahead=self.ahead)

    def work(self, compute: Callable[[], T]) -> Arrival[T]:
        """Begin work on a prompt that later layers may hide, and whose result somebody waits for later; for a cache
        whose rows come `ahead`. It belongs to no step, and so counts in no `traffic`."""
        assert self.ahead
        return self.engine.work(compute, self.request.device)

    def send(self, write: Callable[[Traffic], None]) -> None:
        """Let `write` put rows away from the device."""
        self.engine.send(write, self.traffic)

    @property
    def checking(self) -> bool:
        """Say whether to check what a policy has just returned; not while a step is captured, which computes
        nothing."""
        return self.checks.on and not self.counters.capturing

    def on(self, device: torch.device | None) -> CacheState:
        """Return the same cache for a layer that lies on `device`; None: where the request says."""
        if device is None or device == self.request.device:
            return self
        return replace(self, request=replace(self.request, device=device))

    def with_dense(self, layers: Iterable[int]) -> CacheState:
        """Return the same cache, with a budget that leaves `layers` whole as well."""
        budget = self.request.budget
        if budget is None:
            return self
        dense = tuple(sorted({*budget.dense_layers, *layers}))
        return replace(self, request=replace(self.request, budget=replace(budget, dense_layers=dense)))
