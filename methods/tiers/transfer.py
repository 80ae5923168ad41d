"""Brings rows of keys and values to the device while the model works, in the order in which they
were asked for.

A method asks for rows as soon as it knows which (`begin`), goes on computing, and waits
(`Arrival.wait`) when it needs them. Until then nothing happens, or, with `ahead`, rows move. Rows in
host memory, which a CUDA device reads itself, come on a second stream: events order it and the
model's stream, no thread takes part, and the host never waits. Rows in files come in a thread of
the engine. A cache whose rows move ahead may also pass on work on a prompt that later layers hide,
such as clustering its keys (`work`): an engine does one piece after the other.

A device has one engine, whoever moves its rows (`shared_engine`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from contextvars import copy_context
from copy import deepcopy
from functools import cache, partial
from threading import get_ident
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

    def __init__(
        self, *, threads: int = 0, works: bool = False, pinned_memory: PinnedMemory | None = None
    ) -> None:
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
        by_device: bool = False,
    ) -> Arrival[T]:
        """Return an `Arrival`, whose `wait` returns what `read` returns: keys and values on the
        device `on`. `read` adds the bytes that it moves to the `Traffic` (counts of moved bytes)
        that it is given; once `wait` has returned, they are added to `into`. `ahead`: the rows move
        from now on, else when they are waited for. `by_device`: the device itself moves them while
        `read` only launches work, as for rows in host memory, so no thread is needed."""
        if not ahead:
            return Arrival(read, into)
        return Branch(read, into, on) if by_device else InThread(read, into, on, self.copy_lane)

    def work(self, compute: Callable[[], T], on: torch.device) -> Arrival[T]:
        """Begin to run `compute` on the CPU in parallel to the model, once the device `on` has done
        all work launched so far. The result's `wait` returns what it returns."""

        def read(moved: Traffic) -> T:
            if on.type == "cuda":
                torch.cuda.current_stream(on).synchronize()
            return compute()

        return InThread(read, Traffic(), on, self.work_lane)

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
        engine = _shared[device] = TransferEngine(
            threads=1, works=True, pinned_memory=pinned_memory
        )
    return engine


class Arrival(Generic[T]):
    """Represent keys and values that come to the device when they are waited for. Its subclasses
    represent what comes earlier: in a thread (`InThread`) or on a second stream (`Branch`). If
    nobody waits, the bytes are not counted as moved."""

    def __init__(self, read: Callable[[Traffic], T], into: Traffic) -> None:
        """`read`: what brings the rows and adds their bytes to the counts that it is given. `into`:
        the counts to which the moved bytes are added at the first `wait`."""
        self._read: Callable[[Traffic], T] | None = read
        self._into, self._moved = into, Traffic()
        self._rows: T

    def wait(self) -> T:
        """Return what was asked for, once it is there. An error while reading is raised here, or
        for a `Branch` where the rows are asked for. May be called again."""
        if self._read is not None:
            self._rows = self._come(self._read)
            # whose counts may be on the device, made by the stream that moved the rows
            self._into.add(self._moved)
            # and with it the tensors that it reads, which may be overwritten from now on
            self._read = None
        return self._rows

    def __deepcopy__(self, memo: dict[int, object]) -> Arrival[T]:
        rows = deepcopy(self.wait(), memo)
        return Arrival(lambda _: rows, Traffic())

    def _come(self, read: Callable[[Traffic], T]) -> T:
        """Return the rows, and make them, and the counts of what moved, safe to use on the caller's
        stream."""
        asked = perf_counter()
        rows = read(self._moved)
        self._moved.exposed_s = perf_counter() - asked
        return rows


class InThread(Arrival[T]):
    """Represent keys and values from files, or a result of work on the CPU, that a thread brings.
    They do not move if this object is dropped before they begin to."""

    def __init__(
        self, read: Callable[[Traffic], T], into: Traffic, on: torch.device, lane: TransferLane
    ) -> None:
        """Begin now. `lane`: the queue with threads that runs `read`; without threads, the caller
        does. `on`: the device to which rows go."""
        super().__init__(read, into)
        run, inference = copy_context().run, torch.is_inference_mode_enabled()
        behind, known = reached(on), ref(self)
        self._began = self._ready = 0.0  # seconds of the clock, between which the rows move

        def move() -> T:
            if (arrival := known()) is None or arrival._read is None:
                raise CancelledError
            with torch.inference_mode(inference), beside_the_model(on, behind):
                arrival._began = perf_counter()
                rows = arrival._read(arrival._moved)
            arrival._ready = perf_counter()
            return rows

        asked = perf_counter()
        self._future = lane.submit(partial(run, move))
        # seconds in which the caller moved them
        self._kept_s = 0.0 if lane.beside else perf_counter() - asked

    def _come(self, read: Callable[[Traffic], T]) -> T:
        asked = perf_counter()
        rows = self._future.result()
        self._moved.exposed_s = self._kept_s + perf_counter() - asked
        self._moved.hidden_s = max(0.0, min(asked, self._ready) - self._began - self._kept_s)
        for tensor in tree_leaves((rows, self._moved.tallies)):
            # another stream has made it, and must not reuse it yet
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return rows


class Branch(Arrival[T]):
    """Represent keys and values that a CUDA device reads in host memory, on a stream that forks from
    the model's where they are asked for. Where they are waited for, the model's stream waits for
    them, and for nothing that was asked for later; the host does not wait. A CUDA graph can capture
    all that."""

    def __init__(self, read: Callable[[Traffic], T], into: Traffic, on: torch.device) -> None:
        super().__init__(read, into)
        self._on, self._captured = on, capturing(on)
        with forked(on) as self._join:
            self._rows = read(self._moved)

    def _come(self, read: Callable[[Traffic], T]) -> T:
        self._join()
        return self._rows

    def __del__(self) -> None:
        """Let the caller's stream wait also if nobody has waited, as after an error: it may be
        given the memory that the second stream still reads, such as the numbers of rows."""
        if self._read is not None and not (self._captured or capturing(self._on)):
            self._join()


@contextmanager
def beside_the_model(on: torch.device, behind: torch.cuda.Event | None = None) -> Iterator[None]:
    """Run the GPU work of this block on a stream of the calling thread, in parallel to the model's,
    after the event `behind` (None: at once). When the block ends, its work is complete."""
    if on.type != "cuda":
        yield
        return
    stream = _of_thread(on, get_ident())
    with torch.cuda.stream(stream):
        if behind is not None:
            stream.wait_event(behind)
        yield
        stream.synchronize()


@cache
def _of_thread(on: torch.device, thread: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(on)


@cache
def second_stream(model: torch.cuda.Stream) -> torch.cuda.Stream:
    """Return the CUDA stream that brings keys and values to the device for a model whose own work
    runs on the stream `model`, always the same one. The usual stream and the stream of captures
    have one each, because a capture must hold no work of others. Its priority is higher than that
    of captures: kernels that read host memory are few and slow, so they start first. Torch hands out
    streams in turn from a pool per priority, and nothing else here asks for this one."""
    return torch.cuda.Stream(model.device, priority=-2)


@contextmanager
def forked(on: torch.device) -> Iterator[Callable[[], None]]:
    """Run the GPU work of this block on a second stream, after all that the caller's stream has
    been given so far, and in parallel to what it is given later. Yield a function that, after the
    block, lets the caller's stream wait for this work. If a CUDA graph is being captured, both
    streams become branches of it.

    What the block allocates belongs to the second stream, which reuses it in later blocks. These
    wait for the caller's stream first, and so for all that has read it there. What the block reads
    must stay alive until the caller's stream waits."""
    if on.type != "cuda":
        yield lambda: None
        return
    second, done = second_stream(torch.cuda.current_stream(on)), torch.cuda.Event()
    second.wait_stream(torch.cuda.current_stream(on))
    with torch.cuda.stream(second):
        try:
            yield lambda: torch.cuda.current_stream(on).wait_event(done)
        finally:
            done.record(second)


def join(on: torch.device) -> None:
    """Let the caller's CUDA stream, which captures a graph, wait for all that `forked` blocks have
    added to the graph: a capture ends with an error if a branch is left."""
    model = torch.cuda.current_stream(on)
    with torch.cuda.stream(second_stream(model)):
        branched = capturing(on)
    if branched:
        model.wait_stream(second_stream(model))


def capturing(on: torch.device) -> bool:
    """Return whether the caller's CUDA stream is being captured; False if the device has no streams."""
    return on.type == "cuda" and torch.cuda.is_current_stream_capturing()


def reached(on: torch.device) -> torch.cuda.Event | None:
    """Return a CUDA event that is reached once all work given to the caller's stream so far is
    done; None if the device has no streams."""
    if on.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(on))
    return event
