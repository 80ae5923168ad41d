"""torch.cuda's graphs and streams on a CPU: captures are tapes, and pools of memory fail where torch's do.

Work beside the model's runs at once, and is checked: what one stream reads or overwrites, the other must have done
with, by an event for which the first has waited. The same holds for memory that may be used again. Memory that a graph
computes in holds anything when it is replayed.

A capture that multiplies leaves a block in its pool, as the workspace of a cuBLAS handle does. Torch counts the
graphs of a pool; once the last has gone, a capture that opens the pool again while blocks lie in it fails an assertion
(pytorch#189126).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.dispatch import watched
from kernels.step_inputs import CaptureError
from tests.cpu_graph import CpuGraph, StepMemory
from tests.dispatched import changed_by, is_launch, tensors

ANYTHING = 0x5A  # in every byte of memory that nobody has written
MODEL, SECOND = 0, 1  # streams


class RaceError(AssertionError):
    """Two streams use the same memory, and no event says which of them is first."""


@dataclass
class Memory:
    """A storage, with the last operation of each stream that has read it, and that has written to it."""

    storage: StorageWeakRef
    owner: int  # the stream that may use it again
    read: list[int] = field(default_factory=lambda: [0, 0])
    written: list[int] = field(default_factory=lambda: [0, 0])


class TwoStreams:
    """In place of `forked` of methods/tiers/transfer.py: the model's stream, and a second one.

    `noted`: what was done, in order: ("fork", number), ("wait", number), and the names of the operations of
    kernels/ops.py that the model's stream was given."""

    active: ClassVar[TwoStreams | None] = None

    def __init__(self) -> None:
        self.stream = MODEL
        self.noted: list[tuple[str, Any]] = []
        self._known = [[0, 0], [0, 0]]  # for each stream, the operations of both that it comes behind
        self._memory: dict[int, Memory] = {}
        self._shared = set[int]()  # what others than its owner have used
        self._forks = 0

    @contextmanager
    def forked(self, on: torch.device) -> Iterator[Callable[[], None]]:
        graph, number, done = StreamedGraph.current(), self._forks, list[int]()
        assert self.stream == MODEL, "a fork within a fork"
        self._catch_up(SECOND, self._known[MODEL])
        self._forks, self.stream = self._forks + 1, SECOND
        self.noted.append(("fork", number))

        def wait() -> None:
            if graph is not StreamedGraph.current():
                raise CaptureError("waits for an event of another capture, or of none")
            self.noted.append(("wait", number))
            self._catch_up(MODEL, done)

        try:
            yield wait
        finally:
            done += self._known[SECOND]
            self.stream = MODEL

    def _catch_up(self, stream: int, known: list[int]) -> None:
        self._known[stream] = list(map(max, self._known[stream], known))

    @property
    def open(self) -> int:
        """How many operations of the second stream the model's stream has not waited for."""
        return self._known[SECOND][SECOND] - self._known[MODEL][SECOND]

    def used(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Check an operation of torch, and note what it uses. While the second stream has nothing to do, the model's
        needs no check: the next fork comes behind it."""
        if self.stream == MODEL and not self.open:
            return
        changed = changed_by(func, args, kwargs)
        given, results = _storages((args, kwargs)), _storages(out)
        fresh = {at: results[at] for at in results.keys() - given.keys()}
        if fresh:
            self._give_away()
        if not is_launch(func, args, kwargs, out, changed):
            written = {}
        else:
            self._known[self.stream][self.stream] += 1
            written = _storages(changed) | fresh
        for at, storage in (given | fresh).items() if written or fresh else ():
            memory = self._memory.setdefault(at, Memory(StorageWeakRef(storage), self.stream if at in fresh else MODEL))
            self._use(func, at, memory, at in written, at in given and bool(written))

    def _use(self, func: Any, at: int, memory: Memory, writes: bool, reads: bool) -> None:
        other = 1 - self.stream
        before = max(memory.written[other], memory.read[other] if writes else 0)
        if before > self._known[self.stream][other]:
            raise RaceError(f"{func} of stream {self.stream} meets an operation of stream {other}")
        now = self._known[self.stream][self.stream]
        for noted in (memory.written,) * writes + (memory.read,) * reads:
            noted[self.stream] = now
        if memory.owner != self.stream:
            self._shared.add(at)

    def _give_away(self) -> None:
        """Check that memory which this stream may get now is not in use by the other one."""
        other = 1 - self.stream
        for at in [at for at in self._shared if self._memory[at].storage.expired()]:
            memory = self._memory[at]
            if memory.owner == self.stream:
                if max(memory.read[other], memory.written[other]) > self._known[self.stream][other]:
                    raise RaceError(f"stream {other} still uses memory that stream {self.stream} may get again")
                self._shared.remove(at)
                del self._memory[at]


class _Watch(TorchDispatchMode):
    def __init__(self, streams: TwoStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if StreamedGraph.current() is None:
            self._streams.used(func, args, kwargs or {}, out)
        return out


def _storages(value: Any) -> dict[int, torch.UntypedStorage]:
    storages = (x.untyped_storage() for x in tensors(value))
    return {storage._cdata: storage for storage in storages if storage.nbytes()}


class StreamedGraph(CpuGraph):
    """Operations that were captured together, of the model's stream and of one beside it."""

    capturing_now: ClassVar[list[StreamedGraph]] = []

    def __init__(self) -> None:
        super().__init__()
        self._streams = dict[int, int]()  # by the address of memory, the stream that may use it again

    @classmethod
    def current(cls) -> StreamedGraph | None:
        return cls.capturing_now[-1] if cls.capturing_now else None

    @property
    def rooms(self) -> Collection[StepMemory]:
        """What this stream may use again: torch's allocator keeps the memory of each apart."""
        return [room for at, room in self._places.items() if self._streams[at] == self._stream]

    def _on_the_cpu(self, like: Tensor) -> Tensor:
        result = super()._on_the_cpu(like)
        self._streams.setdefault(result.untyped_storage().data_ptr(), self._stream)
        return result

    @property
    def _stream(self) -> int:
        return TwoStreams.active.stream if TwoStreams.active else MODEL

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.capturing_now.append(self)
        try:
            with super().capturing():
                yield
        finally:
            self.capturing_now.pop()
        if TwoStreams.active is not None and TwoStreams.active.open:
            raise CaptureError("the stream beside the model's was not joined before the capture ended")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if TwoStreams.active is not None:
            TwoStreams.active.used(func, args, kwargs or {}, out)
        return out

    def replay(self) -> None:
        for room in self._places.values():
            torch.empty(0, dtype=torch.uint8).set_(room.storage).fill_(ANYTHING)
        super().replay()


@contextmanager
def side_stream() -> Iterator[TwoStreams]:
    """Let rows that come beside the model's work do so on a stream of their own, which is checked."""
    streams = TwoStreams()

    def note(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        if streams.stream == MODEL:
            streams.noted.append(("op", name))
        return call()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("methods.tiers.transfer.forked", streams.forked)
        patch.setattr("methods.tiers.transfer.capturing", lambda on: StreamedGraph.current() is not None)
        patch.setattr(TwoStreams, "active", streams)
        with watched(note), _Watch(streams):
            yield streams


class Pool:
    def __init__(self) -> None:
        self.graphs = 0  # alive
        self.blocks = 0
        self.opened = False


class Graph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self._graph, self._pool = StreamedGraph(), None

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"  # threads of a history store go on
        assert not gc.isenabled(), "what is freed within a capture may wait for the device"
        if pool.opened and not pool.graphs and pool.blocks:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        pool.opened, self._pool = True, pool
        pool.graphs += 1
        self._capturing = self._graph.capturing()
        self._capturing.__enter__()

    def capture_end(self) -> None:
        assert self._pool is not None
        self._capturing.__exit__(None, None, None)
        products = [call for call in self._graph.calls if "mm" in str(getattr(call, "func", ""))]
        self._pool.blocks += bool(products)  # one made a workspace

    def replay(self) -> None:
        assert self._pool is not None, "a graph that was reset is replayed"
        self._graph.replay()

    def reset(self) -> None:
        if self._pool is not None:
            self._pool.graphs -= 1
        self._pool = None

    __del__ = reset


@contextmanager
def installed() -> Iterator[None]:
    """In place of torch.cuda's, for what harness/engine/graph.py asks of it."""
    stands_in: dict[str, Any] = {
        "device": lambda device: nullcontext(), "graph_pool_handle": Pool, "CUDAGraph": Graph,
        "Stream": lambda priority: object(), "stream": lambda stream: nullcontext(), "current_stream": object,
        "set_stream": lambda stream: None, "synchronize": lambda: None,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in stands_in.items():
            patch.setattr(torch.cuda, name, fake)
        for name in ("join", "second_stream"):  # a `StreamedGraph` says whether a stream has to be joined
            patch.setattr(f"harness.engine.graph.{name}", lambda _: None)
        yield
