"""Measures times: clocks that notice if other processes held a call up, rounds in which calls take
turns, medians with intervals, and ratios of neighbouring calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import sqrt
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from textwrap import shorten
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch

from harness.models.devices import wait_for

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Call = Callable[[], Any]
CallKey = TypeVar("CallKey")
Result = TypeVar("Result")
Failures = dict[CallKey, str]  # why calls could not be measured
# more than any last-level cache: 260 MiB on some Xeons
CACHE_BYTES = {"cpu": 1 << 29, "cuda": 1 << 28}
PAUSE_CYCLES = 10_000_000  # about 5 ms: no operation and no step of a layer takes as long to launch
TOLERATED = 0.02  # share of a measured time that its threads may wait for a CPU
# a thread that was put off waits about that long, where the system does not count it
SLICE_S = 0.004


class MarkedSeconds(float):
    """A measured time. `disturbed`: other processes took our CPU meanwhile; `launches`: on a GPU,
    the time includes launches of kernels by the host."""

    disturbed: bool
    launches: bool

    def __new__(
        cls, value: float, disturbed: bool = False, launches: bool = False
    ) -> MarkedSeconds:
        self = super().__new__(cls, value)
        self.disturbed, self.launches = disturbed, launches
        return self


class LoadCounts(NamedTuple):
    """Count how often and how long the threads of this process have waited for a CPU so far."""

    switches: int  # involuntary: a thread could go on, and somebody else got its CPU
    waited_s: float  # ready to run, without a CPU


class LoadWatch:
    """A stopwatch, started when it is made, that also notices if other processes take our CPU."""

    def __init__(self) -> None:
        self._before, self._began = counts(), perf_counter()

    def seconds(self) -> MarkedSeconds:
        return MarkedSeconds(perf_counter() - self._began, self.disturbed())

    def disturbed(self) -> bool:
        """Return True if, since the start, a thread lost its CPU to another process, and all
        threads together waited for a noticeable share of the time.

        Both are needed: in a long time the system itself takes a CPU now and then, and in a short
        one every thread that wakes up waits a little.
        """
        passed, now = perf_counter() - self._began, counts()
        switches, waited_s = (
            after - before for after, before in zip(now, self._before, strict=True)
        )
        return switches > 0 and waited_s > TOLERATED * passed


def counts() -> LoadCounts:
    """Return the counts of this process: measured per thread on Linux, estimated elsewhere."""
    threads = list(_threads(Path("/proc/self/task")))
    if threads:
        return LoadCounts(*map(sum, zip(*threads, strict=True)))
    switches = getrusage(RUSAGE_SELF).ru_nivcsw
    return LoadCounts(switches, switches * SLICE_S)


def _threads(folder: Path) -> Iterator[LoadCounts]:
    for task in folder.iterdir() if folder.is_dir() else ():
        # it has just ended, or the system does not count
        with suppress(OSError, IndexError, ValueError):
            switches = int(
                (task / "status").read_text().rpartition("nonvoluntary_ctxt_switches:")[2]
            )
            yield LoadCounts(switches, int((task / "schedstat").read_text().split()[1]) / 1e9)


class Estimate(NamedTuple):
    """A median and its 95 % confidence interval (between order statistics, so that no distribution
    is assumed). With fewer than 6 values the interval is their range."""

    median: float
    low: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    ordered, count = sorted(values), len(values)
    cut = max(0, int((count - 1.96 * sqrt(count)) / 2)) if count >= 6 else 0
    return Estimate(median(ordered), ordered[cut], ordered[count - 1 - cut])


def ratios(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Return an estimate of the ratio of two calls that ran in turn: each quotient is of two
    neighbouring measurements, so that a slow moment slows both."""
    return estimate([a / b for a, b in zip(above, below, strict=True)])


def marks(*samples: Sequence[float]) -> dict[str, Any]:
    """Return three entries of a row of the results: how many samples it has, how many of them other
    processes disturbed, and how many include the launches of GPU kernels by the host."""
    flat = [sample for calls in samples for sample in calls]
    return {
        "samples": len(flat),
        "disturbed": sum(getattr(sample, "disturbed", False) for sample in flat),
        "with_launches": sum(getattr(sample, "launches", False) for sample in flat),
    }


def seconds(call: Call, device: torch.device) -> MarkedSeconds:
    """Return the time that a user waits for a call, until the device is done."""
    wait_for(device)
    watch = LoadWatch()
    call()
    wait_for(device)
    return watch.seconds()


def own_seconds(call: Call, device: torch.device) -> MarkedSeconds:
    """Return the time that a call takes on its device. On a GPU it is measured with CUDA events,
    while the device first pauses so that the host can launch all kernels of the call. If the call
    waits for the device or takes longer to launch, the time includes launches and is marked so."""
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
    """A clock for calls whose inputs are in no cache, as in a decode step that comes from all other
    layers: it overwrites a large buffer before each call. Returns the device's own time."""

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
) -> dict[CallKey, list[float]]:
    """Return `rounds` times of each call, after two calls to warm up; the calls take turns. A call that raises an error
    is left out, and `failures` gets the reason."""
    rounds_of(calls, 2, failures)
    timed = {name: partial(clock, call) for name, call in calls.items() if name not in failures}
    return rounds_of(timed, rounds, failures)


def rounds_of(
    calls: Mapping[CallKey, Callable[[], Result]],
    rounds: int,
    failures: Failures[CallKey] | None = None,
) -> dict[CallKey, list[Result]]:
    """Return the results of `rounds` runs of each call, in turn. With `failures`, a call that raises an
    error is dropped with its results, and the reason is stored there; without, the error is raised."""
    done: dict[CallKey, list[Result]] = {key: [] for key in calls}
    for place in range(rounds):
        # reversed in every other round, so that none always comes first
        for key in list(done)[:: -1 if place % 2 else 1]:
            try:
                done[key].append(calls[key]())
            except Exception as error:
                if failures is None:
                    raise
                failures[key] = why(error)
                del done[key]
            if key not in done:
                release()
    return done


def why(error: Exception) -> str:
    """Return the class and the message of an error in one line of at most 200 characters."""
    return shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")


def release() -> None:
    """Collect what a call that failed, for example for lack of memory, has left, and give the memory
    that torch holds in reserve back to the GPU, so that the next call may have it. Raise an error
    if the GPU answers this process no more, as after an illegal access."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
