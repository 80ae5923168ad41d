"""Counts that lie on the device and go on by themselves, for decode steps that are recorded once and repeated.

A CUDA graph repeats the same work on the same memory, so nothing that grows from step to step may be a number in
Python: not where a token is written, not how many are read, not its position. While the clock runs, a layer asks it
for such a number; else it uses its own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def queues(device: torch.device) -> bool:
    """Whether work is launched there and done later, so that to read a value is to wait for all of it."""
    return device.type != "cpu"


class RecordingError(RuntimeError):
    """A step did something that cannot be repeated as it was recorded; the message says what."""


class Clock:
    """One for all layers of a batch."""

    def __init__(self) -> None:
        self.running = False
        self.recording = False  # what is asked for now must be there already
        self.steps = 0  # since the start
        self._counts: dict[int, Tensor] = {}  # by what they held then

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        """Back to numbers in Python."""
        self.running, self.steps = False, 0
        self._counts.clear()

    def now(self, value: int, device: torch.device) -> Tensor:
        """[1] int64 that holds `value`; while the clock runs the same tensor holds one more in the next step."""
        if not self.running:
            return torch.full((1,), value, device=device)
        first = value - self.steps
        if first not in self._counts:
            if self.recording:
                raise RecordingError(f"asks for a count of {value} that the step before had no use for")
            self._counts[first] = torch.full((1,), value, device=device)
        return self._counts[first]

    def places(self, start: int, count: int, device: torch.device) -> Tensor:
        """[count] int64, `start` and what follows: positions, or rows of a store."""
        if not self.running:
            return torch.arange(start, start + count, device=device)
        first = self.now(start, device)
        return first if count == 1 else first + torch.arange(count, device=device)

    def write(self, values: Tensor, into: Tensor, dim: int, start: int) -> None:
        """`values` to the places of `into` from `start` on, along `dim`."""
        count = values.shape[dim]
        if self.running:
            into.index_copy_(dim, self.places(start, count, into.device), values)
        else:
            into.narrow(dim, start, count).copy_(values)

    def tick(self) -> None:
        """At the end of a step; part of what is repeated."""
        torch._foreach_add_(list(self._counts.values()), 1)
        self.steps += 1
