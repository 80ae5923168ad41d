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
    """Say whether return values of a method are checked: from the seal of a turn to its end, once
    for a first turn and once for a further one. `pending` names the kinds of turns still to check,
    and is shared by all caches of a run."""

    pending: set[str] = field(default_factory=set)
    on: bool = False

    def begin(self, turn: str) -> None:
        """Start checking if `turn`, whose prompt is about to be sealed, is of a kind still to
        check."""
        self.on = turn in self.pending
        self.pending.discard(turn)


@dataclass
class CacheState:
    """Hold what all layers of a cache share: the `request`, what changes with every step
    (`traffic`, `counters`, `checks`), and the `engine` that moves rows for all caches of the
    device. `ahead`: rows move as soon as they are asked for, otherwise when they are waited for."""

    request: Request
    traffic: Traffic = field(default_factory=Traffic)
    counters: StepCounters = field(default_factory=StepCounters)
    checks: Checks = field(default_factory=Checks)
    engine: TransferEngine = field(default_factory=TransferEngine)
    ahead: bool = False

    def fetch(self, read: Callable[[Traffic], T]) -> Arrival[T]:
        """Ask for the rows that `read` brings to the device and that are waited for later; in a
        captured step, within the step."""
        begin = self.engine.branch if self.counters.running else self.engine.begin
        return begin(read, self.traffic, self.request.device, ahead=self.ahead)

    def work(self, compute: Callable[[], T]) -> Arrival[T]:
        """Begin work on a prompt that later layers may hide, and whose result is waited for later;
        only for a cache whose rows move `ahead`. It belongs to no step, and counts in no
        `traffic`."""
        assert self.ahead
        return self.engine.work(compute, self.request.device)

    def send(self, write: Callable[[Traffic], None]) -> None:
        """Let `write` move rows away from the device."""
        self.engine.send(write, self.traffic)

    @property
    def checking(self) -> bool:
        """Return whether to check what a policy has just returned. While a step is captured,
        nothing is computed to check."""
        return self.checks.on and not self.counters.capturing

    def on(self, device: torch.device | None) -> CacheState:
        """Return this state for a layer that lies on `device`; None: on the request's device."""
        if device is None or device == self.request.device:
            return self
        return replace(self, request=replace(self.request, device=device))

    def with_dense(self, layers: Iterable[int]) -> CacheState:
        """Return this state with a budget that also reads `layers` whole."""
        budget = self.request.budget
        if budget is None:
            return self
        dense = tuple(sorted({*budget.dense_layers, *layers}))
        return replace(self, request=replace(self.request, budget=replace(budget, dense_layers=dense)))
