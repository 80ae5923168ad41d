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
from kernels.step_inputs import CaptureError, record_input, to_device
from methods.base.request import Request
from methods.tiers.tier import DISK
from methods.tiers.traffic import Traffic
from methods.tiers.transfer import Arrival, TransferEngine

T = TypeVar("T")


def queues(device: torch.device) -> bool:
    """Return whether operations on `device` are launched and done later, as on a GPU, so that
    reading a value waits for all of them."""
    return device.type != "cpu"


def undeclared(cls: type) -> str:
    """Return the reason for which a decode step of `cls` is not captured in a CUDA graph: the class
    does not declare that it can be."""
    name = cls.__name__
    return f"{name} does not say that its step can be captured: if it can, write `class {name}(..., capturable=True)`"


class StepCounters:
    """Hold, for all layers of a cache, the numbers that grow by one with each decode step. While
    steps are captured or replayed they are tensors on the device."""

    def __init__(self) -> None:
        self.running = False
        self.capturing = False  # a step is being captured, so every counter must exist already
        self.steps = 0  # steps since the start
        # length of the last forward's text, if it decides how the model rotates
        self.text_tokens = 0
        self._counters: dict[
            tuple[int | PerSequence, torch.device], Tensor
        ] = {}  # by the value that each had at the start
        # by sequences, free slots and device
        self._growths: dict[tuple[int, int, torch.device], Tensor] = {}

    def start(self) -> None:
        """Hold the numbers that grow with each step, such as a text's length, on the device from
        now on, for steps that are captured in a CUDA graph and replayed."""
        self.running = True

    def stop(self) -> None:
        """Hold the numbers that grow with each step in Python again, and drop their tensors on the
        device."""
        self.running, self.steps = False, 0
        self._counters.clear()
        self._growths.clear()

    def tensor(self, value: int, device: torch.device) -> Tensor:
        """Return a tensor [1] int64 that holds `value`. Between `start` and `stop`, further steps
        get this same tensor, which has then grown by one with each."""
        if not self.running:
            return torch.full((1,), value, device=device)
        return self.first(value - self.steps, device)

    def first(self, value: int | PerSequence, device: torch.device) -> Tensor:
        """Return the counter on the device that began with `value` and has grown by one with each
        step so far: [1], or [B] if `value` has a number per sequence. It is made when it is first
        asked for."""
        if (value, device) not in self._counters:
            if self.capturing:
                raise CaptureError(
                    f"asks for a count of {value + self.steps} that the step before had no use for"
                )
            grown = value + self.steps
            numbers = grown.values if isinstance(grown, PerSequence) else (grown,)
            self._counters[value, device] = to_device(numbers, device)
        if isinstance(value, PerSequence) and value.dead is not None:
            record_input("growth", cast(Tensor, self._growth(value, device)))
        return record_input("count", self._counters[value, device])

    def _growth(self, value: int | PerSequence, device: torch.device) -> int | Tensor:
        """Return what each step adds to the counter that began with `value`: 1, or with free slots
        (places in a joint step for sequences that join later) a tensor [B] of ones, and zeros for
        these."""
        if not isinstance(value, PerSequence) or value.dead is None:
            return 1
        slots = len(value), value.dead, device
        if slots not in self._growths:
            ones = [1] * (len(value) - value.dead) + [0] * value.dead
            self._growths[slots] = to_device(ones, device)
        return self._growths[slots]

    def positions(self, start: int, count: int, device: torch.device) -> Tensor:
        """Return `count` consecutive numbers [count] int64 from `start` on, as positions of tokens
        or rows of a store."""
        if not self.running:
            return torch.arange(start, start + count, device=device)
        first = self.tensor(start, device)
        return first if count == 1 else first + torch.arange(count, device=device)

    def write(self, values: Tensor, into: Tensor, dim: int, start: int) -> None:
        """Write `values` into `into` along `dim`, from index `start` on. It works in captured steps
        too, where `start` grows."""
        count = values.shape[dim]
        if self.running:
            into.index_copy_(dim, self.positions(start, count, into.device), values)
        else:
            into.narrow(dim, start, count).copy_(values)

    def advance(self) -> None:
        """Add one to every counter, at the end of a decode step; the addition is captured with the
        step."""
        if self._growths:
            grown = [self._growth(value, device) for value, device in self._counters]
            torch._foreach_add_(list(self._counters.values()), cast(list[Tensor], grown))
        elif self._counters:
            torch._foreach_add_(list(self._counters.values()), 1)
        self.steps += 1


@dataclass
class Checks:
    """Say whether the return values of a method's functions are checked at the moment. They are
    from the seal of a turn to its end, once in a run for a first turn and once for a further one,
    and when decoding drops tokens for the first time ("drop"). `pending` names what is still to
    check, and is shared by all caches of a run."""

    pending: set[str] = field(default_factory=set)
    on: bool = False

    def begin(self, turn: str) -> None:
        """Turn the checks of what a method's functions return on, if none was made yet in a turn of
        the kind `turn` ("first" or "further"), and off otherwise. It is called when a turn's prompt
        is complete."""
        self.on = self.take(turn)

    def take(self, kind: str) -> bool:
        """Return whether `kind` has not been checked yet; from now on it has."""
        new = kind in self.pending
        self.pending.discard(kind)
        return new


@dataclass
class CacheState:
    """Hold what all layers of a cache share: the `request`, what changes with every step
    (`traffic`, `counters`, `checks`), and the `engine` that moves keys and values between host and
    device for all caches of the device. `ahead`: they move as soon as they are asked for, otherwise
    when they are waited for. `example`: a name of the sequence, by which a method that draws at random
    draws the same wherever that sequence runs (`draw_for`)."""

    request: Request
    traffic: Traffic = field(default_factory=Traffic)
    counters: StepCounters = field(default_factory=StepCounters)
    checks: Checks = field(default_factory=Checks)
    engine: TransferEngine = field(default_factory=TransferEngine)
    ahead: bool = False
    example: str = ""
    # until the next layer defers, or the step ends
    deferred: list[Callable[[], None]] = field(default_factory=list)
    _elsewhere: dict[torch.device, CacheState] = field(default_factory=dict, init=False, repr=False)

    def fetch(self, read: Callable[[Traffic], T], *, early: bool = False) -> Arrival[T]:
        """Ask for keys and values: `read` brings them to the device and adds the bytes that it
        moves to the `Traffic` (counts of moved bytes) that it is given. The result's `wait` returns
        what `read` returns. `early`: the caller computes something before it waits, so that rows
        may move meanwhile."""
        device, running = self.request.device, self.counters.running
        by_device = running or (queues(device) and self.request.placement != DISK)
        return self.engine.begin(
            read, self.traffic, device, ahead=self.ahead and early, by_device=by_device
        )

    def defer(self, action: Callable[[], None]) -> None:
        """Run `action` later in this step: when another layer defers one, or at the end. A layer
        so puts off a wait for rows that nothing reads before the next step, which then come while
        about one layer of the model computes."""
        self.run_deferred()
        self.deferred.append(action)

    def run_deferred(self) -> None:
        """Run the action that a layer has deferred in this step, if there is one."""
        while self.deferred:
            self.deferred.pop()()

    def work(self, compute: Callable[[], T]) -> Arrival[T]:
        """Begin to compute something on the CPU in parallel to the model, such as a clustering of a
        prompt's keys; the result's `wait` returns what `compute` returns. Only caches whose rows
        move `ahead` may do so. It adds nothing to the counts of moved bytes."""
        assert self.ahead
        return self.engine.work(compute, self.request.device)

    @property
    def checking(self) -> bool:
        """Return whether to check what a method's function has just returned. While a step is
        captured, nothing is computed to check."""
        return self.checks.on and not self.counters.capturing

    def on(self, device: torch.device | None) -> CacheState:
        """Return this state with `device` as its request's device, the same for all layers that lie
        there; None: the state as it is."""
        if device is None or device == self.request.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = replace(self, request=replace(self.request, device=device))
        return self._elsewhere[device]

    def draw_for(self, example: str) -> None:
        """Let the layers draw at random for the sequence of this name."""
        for state in (self, *self._elsewhere.values()):
            state.example = example

    def with_dense(self, layers: Iterable[int]) -> CacheState:
        """Return this state with a budget under which the layers with the indices `layers` read
        everything, in addition to those that did."""
        budget = self.request.budget
        if budget is None:
            return self
        dense = tuple(sorted({*budget.dense_layers, *layers}))
        return replace(
            self, request=replace(self.request, budget=replace(budget, dense_layers=dense))
        )
