"""Replays a schedule over a table of costs: when each lane works, when the device waits, when tokens are out.

The device does its operations in the schedule's order, and what it hands over begins no earlier than the operation
before has ended. A link serves one transfer after the other, first come first served, and knows nothing of the other
links; of the workers the one that is free first takes the next piece of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from harness.machines.costs import CostTable
from harness.machines.schedule import (
    COMPUTE,
    LANES,
    TO_DEVICE,
    WORKERS,
    Lane,
    LayerBorder,
    Operation,
    ScheduleEvent,
    Submitted,
    TokenOut,
    Waited,
)
from methods.tiers.transfer.spans import Spans


class LaneSpan(NamedTuple):
    """What a lane did from `start` to `end`, in seconds from the start of the schedule; `layer` is None before the
    first border."""

    lane: Lane
    name: str
    start: float
    end: float
    layer: int | None


@dataclass(frozen=True, slots=True)
class ScheduleTimes:
    """The times of a replayed schedule."""

    spans: list[LaneSpan]
    token_s: list[float]  # when each token was out
    end_s: float  # of the device's own work

    @property
    def tt2t_s(self) -> float | None:
        """Seconds to the second token; None where the schedule has no second."""
        return self.token_s[1] if len(self.token_s) > 1 else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token behind the second; None where there are fewer than three tokens."""
        count = len(self.token_s)
        return (self.token_s[-1] - self.token_s[1]) / (count - 2) if count > 2 else None

    def busy(self, *lanes: Lane) -> Spans:
        return Spans(*((span.start, span.end) for span in self.spans if span.lane in lanes))

    def exposed_s(self, lane: Lane) -> float:
        """Seconds in which the lane worked and the device did not."""
        return self.busy(lane).seconds_without(self.busy(COMPUTE))

    def hidden_s(self, lane: Lane) -> float:
        """Seconds in which the lane and the device worked side by side."""
        return self.busy(lane).seconds - self.exposed_s(lane)


class _Machine:
    """The lanes while a schedule runs."""

    def __init__(self, costs: CostTable) -> None:
        self.costs, self.now = costs, 0.0  # of the device
        self.layer: int | None = None
        self.spans: list[LaneSpan] = []
        self.token_s: list[float] = []
        self.ended: dict[int, float] = {}  # of submitted work, by its key
        self._free = {lane: [0.0] for lane in LANES} | {WORKERS: [0.0] * costs.workers}
        self._gathers: list[tuple[float, float]] = []

    def take(self, event: ScheduleEvent) -> None:
        match event:
            case Operation():
                self.compute(event.name, self.costs.operation_s(event))
            case Submitted():
                self.submit(event)
            case Waited():
                self.now = max(self.now, self._end(event.key))
            case LayerBorder():
                self.layer = event.layer
                if self.costs.layer_s:
                    self.compute("layer", self.costs.layer_s)
            case TokenOut():
                self.token_s.append(self.now)

    def compute(self, name: str, seconds: float) -> None:
        start, self.now = self.now, self._slowed(seconds)
        self.spans.append(LaneSpan(COMPUTE, name, start, self.now, self.layer))

    def submit(self, work: Submitted) -> None:
        free = self._free[work.lane]
        place = free.index(min(free))
        start = max(self.now, free[place], *(self._end(key) for key in work.after))
        end = free[place] = self.ended[work.key] = start + self.costs.submitted_s(work)
        if work.gather:
            self._gathers.append((start, end))
        self.spans.append(LaneSpan(work.lane, work.name, start, end, self.layer))
        if work.lane == TO_DEVICE and self.costs.copied_bytes_s < inf:
            self.compute("copy", work.nbytes / self.costs.copied_bytes_s)

    def _end(self, key: int) -> float:
        if key not in self.ended:
            raise ValueError(f"The schedule waits for work {key}, which nothing before has submitted.")
        return self.ended[key]

    def _slowed(self, seconds: float) -> float:
        """When the device has done work of so many seconds. A gather that runs then was submitted before."""
        now, left = self.now, seconds
        for start, end in sorted(self._gathers):
            if end <= now:
                continue
            if now + left <= start:
                break
            left -= max(0.0, start - now)
            now = max(now, start)
            done = min(left, (end - now) / self.costs.gather_slows)
            left -= done
            now += done * self.costs.gather_slows
        return now + left


def replay(schedule: Sequence[ScheduleEvent], costs: CostTable) -> ScheduleTimes:
    """Raises `ValueError` for a schedule that waits for work which it has not submitted."""
    machine = _Machine(costs)
    for event in schedule:
        machine.take(event)
    return ScheduleTimes(machine.spans, machine.token_s, machine.now)
