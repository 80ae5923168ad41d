"""Keeps numbers that grow by one with every decode step on the device, so that a step can be
captured and replayed.

A CUDA graph replays the same work on the same memory, so no number that grows from step to step may
be a Python number: not the row to which a token is written, not the count of tokens to read, not
the position. While steps are captured or replayed (`running`), a layer takes such numbers from
here, otherwise from Python."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from kernels.per_sequence import PerSequence
from kernels.step_inputs import CaptureError, record_input


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
