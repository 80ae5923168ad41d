"""One decode step, captured once behind each seal and replayed for every further token: a CUDA graph.

The first step behind a seal runs as always, but already in the form that is captured: counts lie on the device
(methods/base/counters.py), tokens are written and read through them. Then it is captured, which runs nothing on the
device, and what it ran in Python is taken back. Both belong to the time to the second token, like the seal; the time
per output token is that of replays alone. A step that cannot be captured after all is run one by one, with the
reason.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.engine.cache import KVCache
from harness.engine.forward import BlockForward
from harness.engine.saved_state import SavedState
from harness.engine.wait import wait_for

RECOVERS = "2.12"  # the first torch whose allocator knows that a capture is over when its end fails
READS_POSITIONS = ("dynamic", "longrope")  # rotations whose code asks the device how long the text is


class StepCapture(Protocol):
    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        """Write down what `step` does, without doing it. -> what does it again, and where its result will be"""


class CaptureBroke(RuntimeError):
    """A capture failed in a way that this torch cannot recover from; the message says what to do."""


class CudaGraphs:
    """Graphs of one engine, one alive at a time, so that each takes over the memory of the one before.

    Torch gives a pool of memory up with the last graph in it, and asserts where a capture opens it again while blocks
    are still in use there, as a cuBLAS workspace that was made inside a capture is. An empty graph that lives as long
    as the pool, the anchor, keeps it open.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._stream: Any = None  # of this device; torch's own for captures is of the one that was current first
        self._anchor: Any = None
        self._graph: Any = None  # of the last step

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        with torch.cuda.device(self.device):
            if self._anchor is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
                self._anchor, _ = self._captured(lambda: torch.zeros(1, device=self.device))
            if self._graph is not None:
                self._graph.reset()  # before the next: torch drops the stream's cuBLAS workspace with a graph
            self._graph, result = self._captured(step)
        return self._graph.replay, result

    def _captured(self, step: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        """Not by `torch.cuda.graph`, which empties the caches of device and pinned host memory each time."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(self._stream):
                # other threads may load and save histories meanwhile, which allocates memory: it is no part of this
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = step()
                finally:
                    graph.capture_end()
        except Exception as error:
            if torch.__version__ < RECOVERS:
                raise CaptureBroke(
                    f"capturing a decode step failed ({_first_cause(error)}), and torch {torch.__version__} cannot go "
                    f"on after that: set graphs=off, or install torch {RECOVERS} or newer."
                ) from error
            raise
        finally:
            torch.cuda.set_stream(current)  # where the capture's end fails, torch stays on its stream
        return graph, result


class CapturedStep:
    """`step(token)` of one sealed cache: token [B 1] -> logits [B V], which the next call overwrites.

    `failure`: why the step could not be captured; the next ones then run one by one, from the state before.
    """

    def __init__(self, forward: BlockForward, cache: KVCache, graphs: StepCapture) -> None:
        self.forward, self.cache, self.graphs = forward, cache, graphs
        self._counters = [member.counters for member in cache.members]
        self._capture_s: float | None = None  # until it is taken
        self.failure: str | None = None
        self._token: Tensor
        self._replay: Callable[[], Any]
        self._logits: Tensor
        self._is_captured = False
        self._after: SavedState | None = None  # what Python knows once the first replay has run

    def __call__(self, token: Tensor) -> Tensor:
        if self.failure is not None:
            return self.forward(token, self.cache)
        if not self._is_captured:
            return self._first(token)
        self._token.copy_(token)
        self._replay()
        if self._after is None:
            self.cache.count_replayed(1)
        else:
            self._after.restore()
            self._after = None
        return self._logits

    def take_capture_s(self) -> float | None:
        """Seconds of the capture, behind the step in which it was; None behind all others."""
        taken, self._capture_s = self._capture_s, None
        return taken

    def close(self) -> None:
        """The cache goes on without; a further turn may follow, or other sequences join."""
        for counters in self._counters:
            counters.stop()

    def _first(self, token: Tensor) -> Tensor:
        self._token = token.clone()
        for counters in self._counters:
            counters.start()
        logits = self._step().clone()
        wait_for(token.device)
        began, before = perf_counter(), SavedState(self.cache)
        self._say_capturing(True)
        try:
            self._replay, self._logits = self.graphs.capture(self._step)
        except CaptureBroke:
            raise
        except Exception as error:  # whatever it is, plain steps can do without
            self.failure = f"capturing a step failed: {_first_cause(error)}"
        else:
            self._say_capturing(False)
            self._after, self._is_captured = SavedState(self.cache).since(before), True
            self._capture_s = perf_counter() - began
        finally:
            before.restore()  # the step has not run
        if self.failure is not None:
            self.close()
        return logits

    def _step(self) -> Tensor:
        logits = self.forward(self._token, self.cache)
        for counters in self._counters:
            counters.advance()
        return logits

    def _say_capturing(self, capturing: bool) -> None:
        for counters in {*self._counters, self.cache.counters}:
            counters.capturing = capturing


def _first_cause(error: BaseException) -> str:
    """In one line. The end of a capture fails because something in it has."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]


def capture_refusal(forward: BlockForward | None, cache: KVCache) -> str | None:
    """Why the decode steps of a sealed cache cannot be captured, or None."""
    if forward is None:
        return "the model runs its own forward"
    if cache.watch is not None:
        return "fidelity compares steps with exact attention"
    if (rotation := getattr(forward.decoder.rotary_emb, "rope_type", None)) in READS_POSITIONS:
        return f"{rotation} rotations depend on the length of the text"
    return next((reason for layer in cache.layers if (reason := layer.capture_refusal())), None)
