"""Clocks, interleaved rounds, medians with an interval, ratios pair by pair."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import sqrt
from statistics import median
from textwrap import shorten
from typing import Any, NamedTuple, TypeVar

import torch

from harness.bench.common.load import LoadWatch, MarkedSeconds
from harness.engine.wait import wait_for

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Call = Callable[[], Any]
CallKey = TypeVar("CallKey")
Result = TypeVar("Result")
Failures = dict[CallKey, str]  # why calls could not be measured
CACHE_BYTES = {"cpu": 1 << 29, "cuda": 1 << 28}  # more than any last-level cache: 260 MiB on some Xeons
PAUSE_CYCLES = 10_000_000  # about 5 ms: no operation and no step of a layer takes as long to launch


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


def marks(*samples: Sequence[float]) -> dict[str, Any]:
    """For a row: of how many samples other load disturbed some, and how many hold launches."""
    flat = [one for some in samples for one in some]
    return {
        "samples": len(flat),
        "disturbed": sum(getattr(one, "disturbed", False) for one in flat),
        "with_launches": sum(getattr(one, "launches", False) for one in flat),
    }


def seconds(call: Call, device: torch.device) -> MarkedSeconds:
    """As a user waits for it: launches, and until the device is done."""
    wait_for(device)
    watch = LoadWatch()
    call()
    wait_for(device)
    return watch.seconds()


def own_seconds(call: Call, device: torch.device) -> MarkedSeconds:
    """The device's own time. On a GPU by CUDA events, behind a pause of the device in which the host launches all of
    `call`; a call that waits for the device, or takes longer to launch, is marked: its time holds launches."""
    if device.type != "cuda":
        return seconds(call, device)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wait_for(device)
    watch = LoadWatch()
    with torch.cuda.device(device):
        torch.cuda._sleep(PAUSE_CYCLES)
        began.record()
        call()
        late = began.query()
        ended.record()
    wait_for(device)
    return MarkedSeconds(began.elapsed_time(ended) / 1e3, late and watch.disturbed(), late)


class Cold:
    """The device's own seconds of a call whose inputs no cache holds, as in a decode step that comes from all other
    layers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.other = torch.zeros(CACHE_BYTES[device.type], dtype=torch.uint8, device=device)

    def __call__(self, call: Call) -> MarkedSeconds:
        self.other.add_(1)
        return own_seconds(call, self.device)


def interleaved(
    calls: Mapping[CallKey, Call],
    clock: Callable[[Call], float],
    rounds: int,
    failures: Failures[CallKey],
    warmup: int = 2,
) -> dict[CallKey, list[float]]:
    """Return `rounds` times of each call, in turn; a call that raises an error is left out, and `failures` says why."""
    for _ in rounds_of(calls, warmup, failures):
        pass
    timed = {name: partial(clock, call) for name, call in calls.items() if name not in failures}
    *_, times = rounds_of(timed, rounds, failures)
    return times


def rounds_of(
    calls: Mapping[CallKey, Callable[[], Result]], rounds: int, failures: Failures[CallKey] | None = None
) -> Iterator[dict[CallKey, list[Result]]]:
    """Run each call `rounds` times, in turn; yield all results so far after each round. With `failures`, a call that
    raises an error is left out from then on, its results too, and its reason is put there."""
    done: dict[CallKey, list[Result]] = {key: [] for key in calls}
    for place in range(rounds):
        for key in turned(done, place):
            try:
                done[key].append(calls[key]())
            except Exception as error:
                if failures is None:
                    raise
                failures[key] = why(error)
                del done[key]
            if failures is not None and key in failures:
                release()
        yield done


def why(error: Exception) -> str:
    """Return the kind and the words of an error, in one line of at most 200 characters."""
    return shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")


def release() -> None:
    """Give back the memory of a call that failed, so that the next one has it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def turned(keys: Collection[CallKey], place: int) -> list[CallKey]:
    """Of round `place`: the order turns round from round to round, so that nothing always comes first."""
    return list(keys)[:: -1 if place % 2 else 1]
