"""torch.cuda's graphs and streams on a CPU: captures are tapes, and pools of memory fail where torch's do.

A stream beside the model's runs as late as CUDA may let it: once the model's stream waits for it. Whatever reads its
results before that finds what was there before. Memory that a graph computes in holds anything when it is replayed.

A capture that multiplies leaves a block in its pool, as the workspace of a cuBLAS handle does. Torch counts the
graphs of a pool; once the last has gone, a capture that opens the pool again while blocks lie in it fails an assertion
(pytorch#189126).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from kernels.step_inputs import CaptureError
from tests.cpu_graph import FROM_HOST, CpuGraph, StepMemory, compiled_calls

ANYTHING = 0x5A  # in every byte of memory that nobody has written


class StreamedGraph(CpuGraph):
    """Operations that were captured together, of the model's stream and of one beside it."""

    capturing_now: ClassVar[list[StreamedGraph]] = []

    def __init__(self) -> None:
        super().__init__()
        self._beside: list[Callable[[], Any]] = []  # what the other stream was given, and nobody has waited for
        self._stream, self._streams = 0, dict[int, int]()  # which of the two computes, and whose memory is whose

    @property
    def rooms(self) -> Collection[StepMemory]:
        """What this stream may use again: torch's allocator keeps the memory of each apart."""
        places = self._places.items()
        return [room for at, room in places if self._streams.setdefault(at, self._stream) == self._stream]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.capturing_now.append(self)
        try:
            with super().capturing():
                yield
        finally:
            self.capturing_now.pop()
        if self._beside:
            raise CaptureError("the stream beside the model's was not joined before the capture ended")

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Give what is called here to the other stream."""
        first, self._stream = len(self.calls), 1
        yield
        self._beside += self.calls[first:]
        del self.calls[first:]
        self._stream = 0

    def joined(self) -> None:
        """Let the model's stream wait for the other one."""
        self.calls += self._beside
        self._beside = []

    def replay(self) -> None:
        for room in self._places.values():
            torch.empty(0, dtype=torch.uint8).set_(room.storage).fill_(ANYTHING)
        super().replay()


class SideStream:
    """In place of `forked` and `join` of methods/tiers/transfer.py, also while nothing is captured."""

    def __init__(self) -> None:
        self._given: list[StreamedGraph] = []

    @contextmanager
    def forked(self, on: torch.device) -> Iterator[None]:
        if StreamedGraph.capturing_now:
            with StreamedGraph.capturing_now[-1].forked():
                yield
            return
        work = StreamedGraph()
        with compiled_calls(work.take), _NumbersAtOnce(), work:
            yield
        self._given.append(work)

    def join(self, on: torch.device) -> None:
        if StreamedGraph.capturing_now:
            StreamedGraph.capturing_now[-1].joined()
            return
        given, self._given = self._given, []
        for work in given:
            work.replay()


class _NumbersAtOnce(TorchFunctionMode):
    """Lets numbers come from the host at once, which CUDA waits for as well."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _disable_current_modes() if func in FROM_HOST else nullcontext():
            return func(*args, **(kwargs or {}))


@contextmanager
def side_stream() -> Iterator[None]:
    """Let rows that come beside the model's work do so on a stream of their own."""
    side = SideStream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("methods.tiers.transfer.forked", side.forked)
        patch.setattr("methods.tiers.transfer.join", side.join)
        yield


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
        "device": lambda device: nullcontext(),
        "graph_pool_handle": Pool,
        "CUDAGraph": Graph,
        "Stream": object,
        "stream": lambda stream: nullcontext(),
        "current_stream": object,
        "set_stream": lambda stream: None,
        "synchronize": lambda: None,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in stands_in.items():
            patch.setattr(torch.cuda, name, fake)
        yield
