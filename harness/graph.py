"""One decode step, recorded once behind each seal and repeated for every further token: a CUDA graph.

The first step behind a seal runs as always, but already in the form that is recorded: counts lie on the device
(methods/clock.py), tokens are written and read through them. Then it is recorded, which runs nothing. Both belong to
the time to the second token, like the seal; the time per output token is that of repeats alone.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.cache import KVCache
from harness.forward import BlockForward

READS_POSITIONS = ("dynamic", "longrope")  # rotations whose code asks the device how long the text is


class Recorder(Protocol):
    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        """Write down what `step` does, without doing it. -> what does it again, and where its result will be"""


class CudaGraphs:
    """Graphs of one engine, one alive at a time, so that each takes over the memory of the one before."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()
        return graph.replay, result


class RepeatedStep:
    """`step(token)` of one sealed cache: token [B 1] -> logits [B V], which the next call overwrites."""

    def __init__(self, forward: BlockForward, cache: KVCache, recorder: Recorder) -> None:
        self.forward, self.cache, self.recorder = forward, cache, recorder
        self.recorded_s: float | None = None
        self._token: Tensor
        self._repeat: Callable[[], Any]
        self._logits: Tensor

    def __call__(self, token: Tensor) -> Tensor:
        if self.recorded_s is None:
            return self._first(token)
        self._token.copy_(token)
        self._repeat()
        self.cache.count_repeated(1)
        return self._logits

    def close(self) -> None:
        """The cache goes on without; a further turn may follow."""
        self.cache.clock.stop()

    def _first(self, token: Tensor) -> Tensor:
        self._token = token.clone()
        self.cache.clock.start()
        logits = self._step().clone()
        began = perf_counter()
        self.cache.clock.recording = True
        try:
            self._repeat, self._logits = self.recorder.record(self._step)
        finally:
            self.cache.clock.recording = False
        self.cache.count_repeated(-1)  # counted while it was recorded, but it has not run
        self.recorded_s = perf_counter() - began
        return logits

    def _step(self) -> Tensor:
        logits = self.forward(self._token, self.cache)
        self.cache.clock.tick()
        return logits


def unrepeatable(forward: BlockForward | None, cache: KVCache) -> str | None:
    """Why the decode steps of a sealed cache cannot be recorded, or None."""
    if forward is None:
        return "the model runs its own forward"
    if cache.watch is not None:
        return "fidelity compares steps with exact attention"
    if (rotation := getattr(forward.decoder.rotary_emb, "rope_type", None)) in READS_POSITIONS:
        return f"{rotation} rotations depend on the length of the text"
    return next((reason for layer in cache.layers if (reason := layer.unrepeatable())), None)
