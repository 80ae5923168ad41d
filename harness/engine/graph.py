"""One decode step, captured and replayed for every further token: a CUDA graph, or its like on the CPU.

The first step behind a seal runs as always, but already in the form that is captured: counts lie on the device
(methods/base/counters.py), tokens are written and read through them. Then it is captured, which runs nothing on the
device, and what it ran in Python is taken back. Both belong to the time to the second token, like the seal; the time
per output token is that of replays alone. A step that cannot be captured after all is run one by one, with the
reason.

A step of a size (`SlotsCache`) is kept when its sequences leave it, and serves others of this size: their first step
runs as always, and what it was told is written to where the captured step reads it (kernels/step_inputs.py). Others are
captured anew behind each seal, and whenever sequences join or leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.engine.batch.cache import SlotsCache
from harness.engine.cache import KVCache
from harness.engine.forward import BlockForward
from harness.engine.kept_steps import KeptStep, KeptSteps
from harness.engine.saved_state import SavedState
from harness.engine.wait import wait_for
from kernels.ragged import Ragged
from kernels.step_inputs import recording_inputs
from methods.base import CacheState
from methods.tiers.traffic import Traffic

RECOVERS = "2.12"  # the first torch whose allocator knows that a capture is over when its end fails


class StepCapture(Protocol):
    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        """Write down what `step` does, without doing it. -> what does it again, and where its result will be"""

    def drop(self, replay: Callable[[], Any]) -> None:
        """What was captured is not done again."""

    def own_bytes(self, replay: Callable[[], Any]) -> int:
        """Of the memory in which it computes, those that no other uses."""


class CaptureBroke(RuntimeError):
    """A capture failed in a way that this torch cannot recover from; the message says what to do."""


class CudaGraphs:
    """Graphs of one engine, in one pool of memory: what a step makes for its own use another one may overwrite.

    Torch gives a pool of memory up with the last graph in it, and asserts where a capture opens it again while blocks
    are still in use there, as a cuBLAS workspace that was made inside a capture is. An empty graph that lives as long
    as the pool, the anchor, keeps it open.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        self._stream: Any = None  # of this device; torch's own for captures is of the one that was current first
        self._anchor: Any = None

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        with torch.cuda.device(self.device):
            if self._anchor is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
                self._anchor, _ = self._captured(lambda: torch.zeros(1, device=self.device))
            graph, result = self._captured(step)
        return graph.replay, result

    def drop(self, replay: Any) -> None:
        replay.__self__.reset()  # not during a capture: torch drops the stream's cuBLAS workspace with a graph

    def own_bytes(self, replay: Callable[[], Any]) -> int:
        return 0  # all graphs share the pool

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


class CpuGraphs:
    """The same of an engine on the CPU (kernels/cpu/graph.py)."""

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        from kernels.cpu.graph import CpuGraph  # which builds compiled code

        graph = CpuGraph()
        with graph.capturing():
            result = step()
        return graph.replay, result

    def drop(self, replay: Callable[[], Any]) -> None:
        """Nothing: its memory goes with whoever held it."""

    def own_bytes(self, replay: Any) -> int:
        return sum(room.size for room in replay.__self__.rooms)


def graphs_on(device: torch.device) -> StepCapture:
    """What captures the steps of an engine."""
    return CpuGraphs() if device.type == "cpu" else CudaGraphs(device)


def usual_graphs(device: torch.device) -> StepCapture | None:
    """Return what captures the steps of an engine under graphs=auto: CUDA graphs on a GPU, nothing on a CPU."""
    return None if device.type == "cpu" else graphs_on(device)


class CapturedStep:
    """`step(token)` of one sealed cache: token [B 1] -> logits [B V], which the next call overwrites.

    `failure`: why the step could not be captured; the next ones then run one by one, from the state before.
    """

    def __init__(
        self, forward: BlockForward, cache: KVCache, graphs: StepCapture, kept: KeptSteps | None = None
    ) -> None:
        """`kept`: other steps of the engine."""
        self.forward, self.cache, self.graphs, self.kept = forward, cache, graphs, kept
        self._counters = [member.counters for member in cache.members]
        self._capture_s: float | None = None  # until it is taken
        self.failure: str | None = None
        self._token: Tensor
        self._replay: Callable[[], Any] | None = None
        self._logits: Tensor
        self._kept: KeptStep | None = None  # what other sequences may take behind these
        self._after: Callable[[], None] | None = None  # lets Python know of the first replay
        self._moved: list[tuple[CacheState, Traffic]] = []  # by a replay, of what is the same in each

    def __call__(self, token: Tensor) -> Tensor:
        rows = len(token)
        token = token if not self.cache.free else torch.cat([token, token.new_zeros(self.cache.free, 1)])
        if self.failure is not None:
            return self.forward(token, self.cache)[:rows]
        if self._replay is None:
            return self._first(token)[:rows]
        self._token.copy_(token)
        self._replay()
        if self._after is None:
            self.cache.count_replayed(1)
            for state, moved in self._moved:
                state.traffic.add(moved)
        else:
            self._after()
            self._after = None
        return self._logits[:rows]

    def take_capture_s(self) -> float | None:
        """Seconds of the capture, behind the step in which it was; None behind all others."""
        taken, self._capture_s = self._capture_s, None
        return taken

    def close(self) -> None:
        """The cache goes on without; a further turn may follow, or other sequences join."""
        for counters in self._counters:
            counters.stop()
        if self.kept is not None and self._kept is not None:
            for step in self.kept.give_back(self._kept):
                self.graphs.drop(step.replay)
        elif self._replay is not None:
            self.graphs.drop(self._replay)

    def _first(self, token: Tensor) -> Tensor:
        self._token = token.clone()
        for counters in self._counters:
            counters.start()
        with recording_inputs(self.cache.step_inputs) if self.cache.step_inputs is not None else nullcontext():
            logits = self._step().clone()
        wait_for(token.device)
        began = perf_counter()
        if not self._serve_by_kept():
            self._capture()
        if self.failure is None:
            self._capture_s = perf_counter() - began
        return logits

    def _serve_by_kept(self) -> bool:
        """Let a step that other sequences have left serve these."""
        cache = self.cache
        if not isinstance(cache, SlotsCache) or cache.step_inputs is None or self.kept is None:
            return False
        if (kept := self.kept.take(cache)) is None:
            return False
        self._token, self._logits, self._replay, self._kept = kept.token, kept.logits, kept.replay, kept
        cache.take_joined(kept.joined)

        def after() -> None:
            cache.count_replayed(1)
            cache.take_results(kept.results)

        self._after = after
        return True

    def _capture(self) -> None:
        states = [member.state for member in self.cache.members]
        counted = [state.traffic.copy() for state in states]
        before = SavedState(self.cache)
        held = self.cache.results() if isinstance(self.cache, SlotsCache) else []
        self._say_capturing(True)
        try:
            replay, self._logits = self.graphs.capture(self._step)
        except CaptureBroke:
            raise
        except Exception as error:  # whatever it is, plain steps can do without
            self.failure = f"capturing a step failed: {_first_cause(error)}"
        else:
            self._say_capturing(False)
            self._moved = [(state, state.traffic.less(one)) for state, one in zip(states, counted, strict=True)]
            self._replay, self._after = replay, SavedState(self.cache).since(before).restore
            self._kept = self._for_others(replay, held)
        finally:
            before.restore()  # the step has not run
        if self.failure is not None:
            self.close()

    def _for_others(self, replay: Callable[[], Any], before: Sequence[Mapping[str, Any]]) -> KeptStep | None:
        """The step, if it takes all of its sequences' memory by what it was told. `before`: what its policies held
        before it was captured, of which it has replaced some."""
        cache = self.cache
        if (
            not isinstance(cache, SlotsCache)
            or cache.step_inputs is None
            or cache.step_inputs.read_memory
            or self.kept is None
        ):
            return None
        results = [_results(*pair) for pair in zip(before, cache.results(), strict=True)]
        return KeptStep(
            self._token,
            self._logits,
            replay,
            cache.form,
            cache.step_inputs,
            cache.joined(),
            results,
            self.graphs.own_bytes(replay),
        )

    def _step(self) -> Tensor:
        logits = self.forward(self._token, self.cache)
        for counters in self._counters:
            counters.advance()
        return logits

    def _say_capturing(self, capturing: bool) -> None:
        for counters in {*self._counters, self.cache.counters}:
            counters.capturing = capturing


def _results(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Tensor | Ragged]:
    """Where a captured step leaves what it chose."""
    made = {name: value for name, value in after.items() if value is not before.get(name)}
    return {name: value for name, value in made.items() if isinstance(value, Tensor | Ragged)}


def _first_cause(error: BaseException) -> str:
    """In one line. The end of a capture fails because something in it has."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]


def capture_refusal(forward: BlockForward | None, cache: KVCache) -> str | None:
    """Why the decode steps of a sealed cache cannot be captured, or None."""
    if forward is None:
        return "the model runs its own forward"
    if any(member.watch is not None for member in cache.members):
        return "fidelity compares steps with exact attention"
    if forward.rotary is not None:
        return f"{forward.rotary.kinds} rotations depend on the length of the text"
    return next((reason for layer in cache.layers if (reason := layer.capture_refusal())), None)
