"""Brings rows to the device beside the model's work, in the order in which they were asked for.

A method asks for rows as soon as it knows which (`begin`), goes on computing, and waits (`Arrival.wait`) where it needs
them. Until then nothing happens, or, `ahead`, rows move: in the caller's thread, or in one of the engine's own, on a
CUDA device on a stream beside the model's. A cache whose rows move ahead may also give away work on a prompt that later
layers hide, such as clustering its keys (`work`): an engine does one piece after the other.

A device has one engine, whoever moves its rows (`shared_engine`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextvars import copy_context
from functools import partial
from typing import Generic, TypeVar
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from methods.tiers.slabs import Slabs
from methods.tiers.traffic import Traffic
from methods.tiers.transfer.lanes import INLINE, TransferLane
from methods.tiers.transfer.links import Link, Links, TransferClock, WallClock
from methods.tiers.transfer.spans import Spans
from methods.tiers.transfer.streams import beside_the_model, forked, join, reach, reached

T = TypeVar("T")


class TransferEngine:
    """Moves rows, and works beside the model, for all caches of one device and for the store of what they leave."""

    def __init__(
        self,
        *,
        threads: int = 0,
        works: bool = False,
        links: Links | None = None,
        clock: TransferClock | None = None,
        worker: Link | None = None,
        slabs: Slabs | None = None,
    ) -> None:
        """`threads`: so many move rows that are asked for ahead; 0: the caller does. With `links`, which are for tiers
        in one memory, it must be the caller, so that their order is that of the calls. `works`: a thread does what is
        given to `work`. `worker` says in its place how long a piece takes, as a link that carries one byte. `slabs`:
        host memory that is pinned before a clock starts."""
        assert not (threads and links)
        self.links, self.clock, self.worker = links, clock or WallClock(), worker
        self._lanes: WeakSet[TransferLane] = WeakSet()
        self.mover, self.hands = self.lane("move", threads), self.lane("work", int(works))
        self.beside, self.slabs = threads > 0, slabs

    def lane(self, name: str, threads: int) -> TransferLane:
        """Return a lane of its own for somebody who moves rows of this device as well, which `close` drains too."""
        lane = TransferLane(name, threads) if threads else INLINE
        self._lanes.add(lane)
        return lane

    def begin(
        self, read: Callable[[Traffic], T], into: Traffic, on: torch.device, *, ahead: bool = False
    ) -> Arrival[T]:
        """Begin to bring to the device `on` what `read` returns, which counts the bytes that it moves. What is waited
        for counts in `into` as well. `ahead`: rows move from now on."""
        return Arrival(self, self.mover if ahead else INLINE, self._carried, read, into, on, ahead)

    def branch(
        self, read: Callable[[Traffic], T], into: Traffic, on: torch.device, *, ahead: bool = False
    ) -> Arrival[T]:
        """Begin the same in a step that may be captured: no thread takes part, and whoever asks waits for the rows in
        this step."""
        kind: type[Arrival[T]] = Branch if ahead else Arrival
        return kind(self, INLINE, self._carried, read, into, on, ahead)

    def work(self, compute: Callable[[], T], on: torch.device) -> Arrival[T]:
        """Begin to compute something on the CPU beside the model, once all that the device `on` has been given is
        done."""

        def read(moved: Traffic) -> T:
            reach(on)
            return compute()

        return Arrival(self, self.hands, self._worked, read, Traffic(), on, ahead=True)

    def _carried(self, moved: Traffic, asked: float) -> tuple[float, float] | None:
        return None if self.links is None else self.links.carry(moved, asked)

    def _worked(self, moved: Traffic, asked: float) -> tuple[float, float] | None:
        return None if self.worker is None else self.worker.carry(1, asked)

    def send(self, write: Callable[[Traffic], None], into: Traffic) -> None:
        """Let `write` put rows away from the device, which counts the bytes; the caller does not wait for the link."""
        moved = Traffic()
        asked = self.clock.now()
        write(moved)
        into.add(moved)
        if self.links is not None:
            self.links.carry(moved, asked)

    def left(self, moved: Traffic, asked: float, spans: Spans) -> float:
        """Note in `spans` when rows were on their way that a lane was `asked` to put away from the device, and has, and
        return when they have arrived."""
        began, ready = self._carried(moved, asked) or (asked, self.clock.now())
        spans.add(began, ready)
        return ready

    def drain(self) -> None:
        """Wait until all that was sent away has arrived."""
        if self.links is not None and self.links.to_host is not None:
            self.clock.wait_until(self.links.to_host.free)

    def close(self) -> None:
        """Wait for all that is under way in any lane, end the threads, and unpin what nobody has. Whoever goes on, as
        another user of the device may, starts new ones."""
        for lane in list(self._lanes):
            lane.close()
        self.drain()
        if self.slabs is not None:
            self.slabs.close()


_shared: WeakValueDictionary[object, TransferEngine] = WeakValueDictionary()


def shared_engine(device: torch.device, links: Links | None = None) -> TransferEngine:
    """Return the engine of a device, or of a CPU with such `links` beside it, which all have who move rows there."""
    key = device, links and links.rates
    if (engine := _shared.get(key)) is None:
        slabs = Slabs() if device.type == "cuda" else None
        engine = _shared[key] = TransferEngine(threads=int(links is None), works=True, links=links, slabs=slabs)
    return engine


class Arrival(Generic[T]):
    """Stands for rows that are on their way, or for a result of work. Rows that nobody waits for count nowhere, and do
    not move if nobody can wait for them any more before they have begun to."""

    def __init__(
        self,
        engine: TransferEngine,
        by: TransferLane,
        taking: Callable[[Traffic, float], tuple[float, float] | None],
        read: Callable[[Traffic], T],
        into: Traffic,
        on: torch.device,
        ahead: bool,
    ) -> None:
        """`by`: who reads. `taking`: says when that begins and ends, None: as it really does. `ahead`: it begins
        now."""
        self._engine, self._by, self._taking, self._into = engine, by, taking, into
        self._read: Callable[[Traffic], T] | None = read
        self._on = on
        self._moved = Traffic()
        self._future: Future[T] | None = None
        self._exposed_s = 0.0  # for which a caller has stood still
        if ahead:
            self._start()

    def wait(self) -> T:
        """Return the rows once they are there. Raises what reading them has raised. May be called again."""
        if self._future is None:
            self._start()
        assert self._future is not None
        if self._read is None:
            return self._future.result()
        clock, asked = self._engine.clock, self._engine.clock.now()
        rows = self._future.result()
        clock.wait_until(self._ready)
        self._exposed_s += clock.now() - asked
        self._moved.exposed_s = self._exposed_s
        self._moved.hidden_s = max(0.0, self._ready - self._began - self._exposed_s)
        self._reach(rows)
        self._into.add(self._moved)  # whose counts may be on the device, made by the stream that moved the rows
        self._read = None
        return rows

    def _reach(self, rows: T) -> None:
        """Let the caller's stream use the rows, and the counts of what moved."""
        if self._by is not INLINE:
            _keep_for_this_stream((rows, self._moved.tallies))

    def _start(self) -> None:
        engine, asked = self._engine, self._engine.clock.now()
        if self._by is INLINE:
            self._future = self._by.submit(partial(self._move, asked))
            self._exposed_s = engine.clock.now() - asked  # the caller has moved them
            return
        run, inference = copy_context().run, torch.is_inference_mode_enabled()
        behind, on, known = reached(self._on), self._on, ref(self)

        def move() -> T:
            if (arrival := known()) is None:
                raise CancelledError
            with torch.inference_mode(inference), beside_the_model(on, behind):
                return arrival._move(asked)

        self._future = self._by.submit(partial(run, move))

    def _move(self, asked: float) -> T:
        assert self._read is not None
        began = self._engine.clock.now()
        rows = self._read(self._moved)
        self._began, self._ready = self._taking(self._moved, asked) or (began, self._engine.clock.now())
        return rows


class Branch(Arrival[T]):
    """Stands for rows that come within a step: on a CUDA device, on a stream that leaves the model's where they are
    asked for, and joins it again where they are waited for."""

    def _reach(self, rows: T) -> None:
        join(self._on)
        _keep_for_this_stream((rows, self._moved.tallies))

    def _start(self) -> None:
        with forked(self._on):
            super()._start()


def _keep_for_this_stream(rows: object) -> None:
    """Tell torch's allocator that the caller's stream uses memory which another stream has allocated."""
    for tensor in tree_leaves(rows):
        if isinstance(tensor, Tensor) and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
