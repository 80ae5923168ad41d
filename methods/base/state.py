"""Holds what all layers of one cache share, and the numbers that grow by one with every decode step.

A CUDA graph replays the same work on the same memory, so no number that grows from step to step may
be a Python number: not the row to which a token is written, not the count of tokens to read, not
the position. While steps are captured or replayed (`running`), a layer takes such numbers from
`StepCounters`, which keeps them on the device, otherwise from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

from kernels.per_sequence import PerSequence
from kernels.step_inputs import CaptureError, record_input
from methods.base.request import Request
from methods.tiers.traffic import Traffic
from methods.tiers.transfer import Arrival, TransferEngine

T = TypeVar("T")


def queues(device: torch.device) -> bool:
    """Return whether work is launched on `device` and done later, so that reading a value waits for
    all of it."""
    return device.type != "cpu"


def undeclared(cls: type) -> str:
    """Return why a step of `cls`, which does not declare that it can be captured, is not
    captured."""
    name = cls.__name__
    return f"{name} does not say that its step can be captured: if it can, write `class {name}(..., capturable=True)`"


class StepCounters:
    """Hold the counters of all layers of a cache."""

    def __init__(self) -> None:
        self.running = False
        self.capturing = False  # a step is being captured, so every counter must exist already
        self.steps = 0  # steps since the start
        self.text_tokens = 0  # length of the last forward's text, if it decides how the model rotates
        self._counters: dict[
            tuple[int | PerSequence, torch.device], Tensor
        ] = {}  # by the value that each had at the start
        self._growths: dict[tuple[int, int, torch.device], Tensor] = {}  # by sequences, free slots and device

    def start(self) -> None:
        """Begin to keep numbers on the device."""
        self.running = True

    def stop(self) -> None:
        """Return to numbers in Python."""
        self.running, self.steps = False, 0
        self._counters.clear()
        self._growths.clear()

    def tensor(self, value: int, device: torch.device) -> Tensor:
        """Return a tensor [1] int64 that holds `value`; while running, the same tensor holds one
        more in the next step."""
        if not self.running:
            return torch.full((1,), value, device=device)
        return self.first(value - self.steps, device)

    def first(self, value: int | PerSequence, device: torch.device) -> Tensor:
        """Return a counter [1], or [B] for the numbers of several sequences, that held `value` when
        counting started."""
        if (value, device) not in self._counters:
            if self.capturing:
                raise CaptureError(f"asks for a count of {value + self.steps} that the step before had no use for")
            values = value.values if isinstance(value, PerSequence) else (value,)
            self._counters[value, device] = (
                torch.tensor(values, device=device) + self._growth(value, device) * self.steps
            )
        if isinstance(value, PerSequence) and value.dead is not None:
            record_input("growth", cast(Tensor, self._growth(value, device)))
        return record_input("count", self._counters[value, device])

    def _growth(self, value: int | PerSequence, device: torch.device) -> int | Tensor:
        """Return what a step adds to a counter: one, and nothing for free slots."""
        if not isinstance(value, PerSequence) or value.dead is None:
            return 1
        slots = len(value), value.dead, device
        if slots not in self._growths:
            ones = [1] * (len(value) - value.dead) + [0] * value.dead
            self._growths[slots] = torch.tensor(ones, device=device)
        return self._growths[slots]

    def positions(self, start: int, count: int, device: torch.device) -> Tensor:
        """Return `count` consecutive numbers [count] int64 from `start` on, as positions of tokens
        or rows of a store."""
        if not self.running:
            return torch.arange(start, start + count, device=device)
        first = self.tensor(start, device)
        return first if count == 1 else first + torch.arange(count, device=device)

    def write(self, values: Tensor, into: Tensor, dim: int, start: int) -> None:
        """Write `into[start:] = values` along `dim`, for as many entries as `values` has there."""
        count = values.shape[dim]
        if self.running:
            into.index_copy_(dim, self.positions(start, count, into.device), values)
        else:
            into.narrow(dim, start, count).copy_(values)

    def advance(self) -> None:
        """Add one to every counter, at the end of a step and captured with it."""
        if self._growths:
            grown = [self._growth(value, device) for value, device in self._counters]
            torch._foreach_add_(list(self._counters.values()), cast(list[Tensor], grown))
        elif self._counters:
            torch._foreach_add_(list(self._counters.values()), 1)
        self.steps += 1


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
        device, running = self.request.device, self.counters.running
        return self.engine.begin(read, self.traffic, device, ahead=self.ahead, within_step=running)

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
