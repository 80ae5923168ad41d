"""Clocks, interleaved rounds, medians with an interval, ratios pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

Call = Callable[[], Any]
CACHE_BYTES = {"cpu": 1 << 29, "cuda": 1 << 28}  # more than any last-level cache: 260 MiB on some Xeons


class Estimate(NamedTuple):
    """The median and the interval that holds it in 95 of 100 cases (between order statistics, no distribution
    assumed); with fewer than 6 values the interval is their whole range."""

    median: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    ordered, count = sorted(values), len(values)
    cut = max(0, int((count - 1.96 * sqrt(count)) / 2)) if count >= 6 else 0
    return Estimate(median(ordered), ordered[cut], ordered[count - 1 - cut])


def ratios(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Of two calls that ran in turn: each quotient is of neighbours, so that a slow moment slows down both."""
    return estimate([a / b for a, b in zip(above, below, strict=True)])


def seconds(call: Call, device: torch.device) -> float:
    """Until the device is done."""
    _wait(device)
    began = perf_counter()
    call()
    _wait(device)
    return perf_counter() - began


class Cold:
    """Seconds of a call whose inputs no cache holds, as in a decode step that comes from all other layers. On a GPU by
    CUDA events: its own time, without the launch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.other = torch.zeros(CACHE_BYTES[device.type], dtype=torch.uint8, device=device)

    def __call__(self, call: Call) -> float:
        self.other.add_(1)
        if self.device.type != "cuda":
            return seconds(call, self.device)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(self.device):
            began.record()
            call()
            ended.record()
        _wait(self.device)
        return began.elapsed_time(ended) / 1e3


def interleaved(
    calls: Mapping[str, Call], clock: Callable[[Call], float], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """`rounds` times of each call, in turn; the order turns round from round to round."""
    for _ in range(warmup):
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for place in range(rounds):
        for name in list(calls)[:: -1 if place % 2 else 1]:
            times[name].append(clock(calls[name]))
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
