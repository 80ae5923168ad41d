"""A transfer engine in virtual time: what a link carries and a worker computes takes as long as arithmetic says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from methods.tiers.lanes import INLINE
from methods.tiers.traffic import Traffic
from methods.tiers.transfer import Arrival, TransferEngine


class Lane:
    """Does one thing after the other."""

    def __init__(self) -> None:
        self.free = 0.0

    def take(self, seconds: float, asked: float) -> float:
        """Return when something is done that takes so long and was asked for at a moment."""
        self.free = max(self.free, asked) + seconds
        return self.free


class VirtualEngine(TransferEngine):
    """Moves and computes at once, and says by `time` when that would have been done: `bytes_s` bytes per second cross
    the link, and a piece of work takes `work_s`. Who computes otherwise adds to `time`."""

    def __init__(self, bytes_s: float = float("inf"), work_s: float = 0.0) -> None:
        super().__init__()
        self.bytes_s, self.work_s = bytes_s, work_s
        self.time, self.exposed_s = 0.0, 0.0
        self.link, self.worker = Lane(), Lane()

    def compute(self, seconds: float) -> None:
        self.time += seconds

    def begin(self, read: Callable[[Traffic], Any], into: Traffic, on: torch.device, *, ahead: bool = False) -> Any:
        return VirtualArrival(self, self._crosses, read, into, on, ahead)

    def work(self, compute: Callable[[], Any], on: torch.device) -> Any:
        return VirtualArrival(self, self._works, lambda moved: compute(), Traffic(), on, ahead=True)

    def _crosses(self, moved: Traffic, asked: float) -> float:
        return self.link.take(moved.settle().to_device_bytes / self.bytes_s, asked)

    def _works(self, moved: Traffic, asked: float) -> float:
        return self.worker.take(self.work_s, asked)


class VirtualArrival(Arrival[Any]):
    """Stands for rows, or for a result, that is there at a moment of the engine's time."""

    def __init__(
        self, engine: VirtualEngine, done: Callable[[Traffic, float], float], *rest: Any, **named: Any
    ) -> None:
        self._engine, self._done = engine, done
        super().__init__(INLINE, *rest, **named)

    def wait(self) -> Any:
        """Let time pass until it is there, once."""
        first, asked = self._read is not None, self._engine.time
        rows = super().wait()
        if first:
            self._engine.time = max(asked, self._there)
            if self._done == self._engine._crosses:
                self._engine.exposed_s += self._engine.time - asked
        return rows

    def _move(self) -> Any:
        rows = super()._move()
        self._there = self._done(self._moved, self._engine.time)
        return rows
