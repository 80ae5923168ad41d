"""Brings rows of keys and values to the device while the model works, in the order in which they
were asked for.

A method asks for rows as soon as it knows which (`begin`), goes on computing, and waits
(`Arrival.wait`) when it needs them. Until then nothing happens, or, with `ahead`, rows move: in the
caller's thread, or in one of the engine's own, on a CUDA device on a stream parallel to the
model's. A cache whose rows move ahead may also pass on work on a prompt that later layers hide,
such as clustering its keys (`work`): an engine does one piece after the other.

A device has one engine, whoever moves its rows (`shared_engine`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache, partial
from time import perf_counter
from typing import Generic, TypeVar
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from methods.tiers.lanes import INLINE, TransferLane
from methods.tiers.pinned_memory import PinnedMemory
from methods.tiers.traffic import Traffic

T = TypeVar("T")


class TransferEngine:
    """Move keys and values between host and device, and compute on the CPU in parallel to the
    model, for all caches of one device and for the store of conversations."""

    def __init__(self, *, threads: int = 0, works: bool = False, pinned_memory: PinnedMemory | None = None) -> None:
        """`threads`: how many threads move rows that are asked for ahead of their use; 0: the
        caller moves them. `works`: whether a thread computes what `work` is given; else the caller
        does. `pinned_memory`: lends host memory that is pinned before a clock starts."""
        self._lanes: WeakSet[TransferLane] = WeakSet()
        self.copy_lane, self.work_lane = self.lane("move", threads), self.lane("work", int(works))
        self.beside, self.pinned_memory = threads > 0, pinned_memory

    def lane(self, name: str, threads: int) -> TransferLane:
        """Return a lane, a queue of actions with `threads` threads of its own (with 0 the caller
        runs them), for moving rows of this device; `close` waits for it too."""
        lane = TransferLane(name, threads) if threads else INLINE
        self._lanes.add(lane)
        return lane

    def begin(
        self,
        read: Callable[[Traffic], T],
        into: Traffic,
        on: torch.device,
        *,
        ahead: bool = False,
        within_step: bool = False,
    ) -> Arrival[T]:
        """Return an `Arrival`, whose `wait` returns what `read` returns: keys and values on the
        device `on`. `read` adds the bytes that it moves to the `Traffic` (counts of moved bytes)
        that it is given; once `wait` has returned, they are added to `into`. `ahead`: the rows move
        from now on, else when they are waited for. `within_step`: they are waited for in this step,
        which may be captured in a CUDA graph, so no thread takes part."""
        kind: type[Arrival[T]] = Branch if ahead and within_step else Arrival
        return kind(self.copy_lane if ahead and not within_step else INLINE, read, into, on, ahead)

    def work(self, compute: Callable[[], T], on: torch.device) -> Arrival[T]:
        """Begin to run `compute` on the CPU in parallel to the model, once the device `on` has done
        all work launched so far. The result's `wait` returns what it returns."""

        def read(moved: Traffic) -> T:
            reach(on)
            return compute()

        return Arrival(self.work_lane, read, Traffic(), on, ahead=True)

    def send(self, write: Callable[[Traffic], None], into: Traffic) -> None:
        """Run `write`, which moves rows away from the device and adds their bytes to the `Traffic`
        (counts of moved bytes) that it is given; then add these to `into`."""
        moved = Traffic()
        write(moved)
        into.add(moved)

    def close(self) -> None:
        """Wait for all transfers and work that were begun, end the threads, and unpin memory that
        is not lent. The engine may be used afterwards: threads start anew."""
        for lane in list(self._lanes):
            lane.close()
        if self.pinned_memory is not None:
            self.pinned_memory.close()


_shared: WeakValueDictionary[object, TransferEngine] = WeakValueDictionary()


def shared_engine(device: torch.device) -> TransferEngine:
    """Return the one engine of a device, which all caches and the store of conversations share. It
    is created at the first call, and again once nobody refers to it."""
    if (engine := _shared.get(device)) is None:
        pinned_memory = PinnedMemory() if device.type == "cuda" else None
        engine = _shared[device] = TransferEngine(threads=1, works=True, pinned_memory=pinned_memory)
    return engine


class Arrival(Generic[T]):
    """Represent something that can be waited for: keys and values on their way to the device, or a
    result of work on the CPU. If nobody waits for keys and values, their bytes are not counted as
    moved, and they do not move if this object is dropped before they begin to."""

    def __init__(
        self, by: TransferLane, read: Callable[[Traffic], T], into: Traffic, on: torch.device, ahead: bool
    ) -> None:
        """`read`: what brings the rows and adds their bytes to the counts that it is given. `by`:
        the lane (a queue with threads) that runs it. `into`: the counts to which the moved bytes
        are added at the first `wait`. `on`: the device. `ahead`: begin now, else at the first
        `wait`."""
        self._by, self._into = by, into
        self._read: Callable[[Traffic], T] | None = read
        self._on = on
        self._moved = Traffic()
        self._future: Future[T] | None = None
        self._exposed_s = 0.0  # seconds for which a caller has waited
        if ahead:
            self._start()

    def wait(self) -> T:
        """Return what was asked for, once it is there. An error while reading is raised here. May
        be called again."""
        if self._future is None:
            self._start()
        assert self._future is not None
        if self._read is None:
            return self._future.result()
        asked = perf_counter()
        rows = self._future.result()
        self._exposed_s += perf_counter() - asked
        self._moved.exposed_s = self._exposed_s
        self._moved.hidden_s = max(0.0, self._ready - self._began - self._exposed_s)
        self._reach(rows)
        self._into.add(self._moved)  # whose counts may be on the device, made by the stream that moved the rows
        self._read = None
        return rows

    def _reach(self, rows: T) -> None:
        """Make the rows, and the counts of what moved, safe to use on the caller's CUDA stream,
        though a thread has written them on another stream."""
        if self._by is not INLINE:
            _keep_for_this_stream((rows, self._moved.tallies))

    def _start(self) -> None:
        if self._by is INLINE:
            asked = perf_counter()
            self._future = self._by.submit(self._move)
            self._exposed_s = perf_counter() - asked  # the caller has moved them
            return
        run, inference = copy_context().run, torch.is_inference_mode_enabled()
        behind, on, known = reached(self._on), self._on, ref(self)

        def move() -> T:
            if (arrival := known()) is None:
                raise CancelledError
            with torch.inference_mode(inference), beside_the_model(on, behind):
                return arrival._move()

        self._future = self._by.submit(partial(run, move))

    def _move(self) -> T:
        assert self._read is not None
        self._began = perf_counter()
        rows = self._read(self._moved)
        self._ready = perf_counter()
        return rows


class Branch(Arrival[T]):
    """Represent keys and values that arrive within one step: on a CUDA device, they are read on a
    stream that forks from the model's where they are asked for, and joins it again where they are
    waited for, which a CUDA graph can capture."""

    def _reach(self, rows: T) -> None:
        join(self._on)
        _keep_for_this_stream((rows, self._moved.tallies))

    def _start(self) -> None:
        with forked(self._on):
            super()._start()


def _keep_for_this_stream(rows: object) -> None:
    """Tell torch's allocator that the caller's CUDA stream uses the tensors in `rows`, which
    another stream has allocated, so that their memory is not given away too early."""
    for tensor in tree_leaves(rows):
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


@contextmanager
def beside_the_model(on: torch.device, behind: torch.cuda.Event | None = None) -> Iterator[None]:
    """Run the GPU work of this block on a stream of its own, in parallel to the model's, after the
    event `behind` (None: at once). When the block ends, its work is complete."""
    if on.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(on)
    with torch.cuda.stream(stream):
        if behind is not None:
            stream.wait_event(behind)
        yield
        stream.synchronize()


@cache
def _side(on: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(on)


@contextmanager
def forked(on: torch.device) -> Iterator[None]:
    """Run the GPU work of this block on a second stream, after all that the caller's stream has
    been given so far, and in parallel to what it is given later. If a CUDA graph is being captured,
    both become branches of it."""
    if on.type != "cuda":
        yield
        return
    side = _side(on)
    side.wait_stream(torch.cuda.current_stream(on))
    with torch.cuda.stream(side):
        yield


def join(on: torch.device) -> None:
    """Let the caller's CUDA stream wait for all work that `forked` blocks have put on the second
    stream of the device `on`. The host does not wait."""
    if on.type == "cuda":
        torch.cuda.current_stream(on).wait_stream(_side(on))


def reach(on: torch.device) -> None:
    """Wait on the host until all work that this thread's CUDA stream was given is done."""
    if on.type == "cuda":
        torch.cuda.current_stream(on).synchronize()


def reached(on: torch.device) -> torch.cuda.Event | None:
    """Return a CUDA event that is reached once all work given to the caller's stream so far is
    done; None if the device has no streams."""
    if on.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(on))
    return event
