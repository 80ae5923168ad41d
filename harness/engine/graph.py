"""Captures one decode step as a CUDA graph and replays it for every further token.

The first step after a seal runs as always, but already in the form that is captured: counts lie on
the device (methods/base/state.py), and tokens are written and read through them. Then the step
is captured, which runs nothing on the device, and its changes to Python objects are undone. Both
count in the time to the second token, as the seal does; the time per output token is that of
replays alone. A capture that fails is an error: `capture_refusal` knows beforehand what cannot be
captured.

A step of a size (`SlotsCache`) is kept when its sequences leave it, and serves other sequences of
this size: their first step runs as always, and the inputs it records are copied to where the
captured step reads them (kernels/step_inputs.py). Other steps are captured again after each seal,
and whenever sequences join or leave."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from harness.engine.batch.cache import SlotsCache
from harness.engine.cache import KVCache
from harness.engine.forward import BlockForward
from harness.engine.saved_state import SavedState
from harness.models.devices import wait_for
from kernels import ops
from kernels.ragged import Ragged
from kernels.step_inputs import MOST_KEPT_BYTES, StepInputs, recording_inputs
from methods.base import CacheState
from methods.tiers.traffic import Traffic
from methods.tiers.transfer import join, second_stream

MOST = 64  # captured steps that are kept for other sequences


class StepCapture(Protocol):
    """Define how the decode steps of an engine are captured, to be replayed without running
    Python."""

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        """Record what `step` does without doing it. Return a function that does it again, and the
        tensor that will hold its result."""

    def drop(self, replay: Callable[[], Any]) -> None:
        """Free a captured step, which must not be replayed again."""


class CaptureBroke(RuntimeError):
    """Report that the capture of a decode step failed; the message says how to run without
    captures."""


class CudaGraphs:
    """Capture CUDA graphs for one engine, all in one memory pool: one graph may overwrite the
    temporary tensors of another.

    Torch frees a pool with its last graph, and fails if a capture reopens it while blocks of it are
    still in use, such as a cuBLAS workspace that was made during a capture. An empty graph, the
    anchor, keeps the pool open as long as this object lives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: Any = None
        # on this device; torch's own capture stream is on the device that was current first
        self._stream: Any = None
        self._anchor: Any = None

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        with torch.cuda.device(self.device):
            if self._anchor is None:
                self._pool = torch.cuda.graph_pool_handle()
                # torch hands out streams in turn from a pool per priority: no transfer's is of this one
                self._stream = torch.cuda.Stream(priority=-1)
                second_stream(self._stream)  # is made now, and not within a capture
                self._anchor, _ = self._captured(lambda: torch.zeros(1, device=self.device))
            graph, result = self._captured(step)
        return graph.replay, result

    def drop(self, replay: Any) -> None:
        # not during a capture, since torch drops the stream's cuBLAS workspace with a graph
        replay.__self__.reset()

    def _captured(self, step: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        """Capture `step` without `torch.cuda.graph`, which empties the caches of device memory and
        of pinned host memory each time. No garbage is collected meanwhile: what is freed within a capture
        may wait for the device, which ends the capture with an error."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        collects = gc.isenabled()
        gc.disable()
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(self._stream):
                # other threads may load and save histories meanwhile; memory that they allocate is no part of the graph
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = step()
                    join(self.device)
                finally:
                    graph.capture_end()
        finally:
            # if the end of the capture fails, torch stays on the capture's stream
            torch.cuda.set_stream(current)
            if collects:
                gc.enable()
        return graph, result


def usual_graphs(device: torch.device) -> StepCapture | None:
    """Return what captures the steps of an engine under graphs=auto: CUDA graphs on a GPU, None on
    a CPU."""
    return None if device.type == "cpu" else CudaGraphs(device)


class KeptStep(NamedTuple):
    """Hold a captured decode step, a CUDA graph, so that other sequences can replay it. `picked` is
    its input and an output (`CapturedStep.picked`), with free slots; `logits` is its other output.
    `step_inputs`: tensors that describe the sequences (lengths, addresses); those of other sequences
    are written into them before a replay. `form`: what the caches of other sequences must have in
    common with its own (`SlotsCache.form`).

    `joined`: tensors that hold a state of all sequences and that a step changes, such as caches of
    recently read rows. `results`: the tensors in which a step leaves which tokens it chose."""

    picked: Tensor
    logits: Tensor
    replay: Callable[[], Any]
    form: Hashable
    step_inputs: StepInputs
    joined: list[dict[str, Tensor]]
    results: list[dict[str, Tensor | Ragged]]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for layer in self.joined for x in layer.values())


class KeptSteps:
    """Keep captured decode steps (CUDA graphs) of one engine that no sequences use at present, for
    others of the same size: as many slots (rows of the batch), the same methods and kinds of
    layers, and the same powers of two of lengths and budgets. At most MOST steps and
    MOST_KEPT_BYTES are kept, those used last; the very last one stays however large it is."""

    def __init__(self) -> None:
        self._steps: list[KeptStep] = []  # in order of their last use

    def take(self, cache: SlotsCache) -> KeptStep | None:
        """Take out a captured step that fits the sequences of `cache`, which have taken their first
        step. Return None if none fits."""
        form, inputs = cache.form, cache.step_inputs
        assert inputs is not None
        for at, step in enumerate(self._steps):
            own = step.step_inputs
            if step.form == form and own.kinds == inputs.kinds and own.take_over(inputs):
                return self._steps.pop(at)
        return None

    def give_back(self, step: KeptStep) -> list[KeptStep]:
        """Keep a captured step that its sequences no longer use. Return the steps that are dropped
        to make room for it."""
        self._steps.append(step)
        dropped: list[KeptStep] = []
        while len(self._steps) > MOST or (
            len(self._steps) > 1 and sum(kept.nbytes for kept in self._steps) > MOST_KEPT_BYTES
        ):
            dropped.append(self._steps.pop(0))
        return dropped


class CapturedStep:
    """Capture the decode step of one sealed cache, as a CUDA graph on a GPU, and replay it:
    `step(token)` takes tokens [B 1] and returns logits [B V], which the next call overwrites.

    A step ends with the most likely tokens, which it writes to where the next step reads its own:
    `picked` [2 B] holds them, and below each 1 if its logits are finite, else 0. Pass
    `picked[0].unsqueeze(1)` as the next tokens, and nothing is copied."""

    picked: Tensor

    def __init__(
        self,
        forward: BlockForward,
        cache: KVCache,
        graphs: StepCapture,
        kept: KeptSteps,
    ) -> None:
        """`kept`: captured steps of the engine that may serve this cache."""
        self.forward, self.cache, self.graphs, self.kept = forward, cache, graphs, kept
        self._counters = [member.counters for member in cache.members]
        self._capture_s: float | None = None  # seconds of the capture, until they are taken
        self._picked: Tensor  # `picked`, with free slots: the step's input and output
        self._replay: Callable[[], Any] | None = None
        self._logits: Tensor
        self._kept: KeptStep | None = None  # the step that other sequences may use after these
        # updates Python objects after the first replay
        self._after: Callable[[], None] | None = None
        # traffic of each replay, where it is always the same
        self._moved: list[tuple[CacheState, Traffic]] = []

    def __call__(self, token: Tensor) -> Tensor:
        rows = len(token)
        if self._replay is None:
            return self._first(token)[:rows]
        if token.data_ptr() != self._picked.data_ptr():
            self._picked[0, :rows] = token[:, 0]
        self._replay()
        self.picked = self._picked[:, :rows]
        if self._after is None:
            self.cache.count_replayed(1)
            for state, moved in self._moved:
                state.traffic.add(moved)
        else:
            self._after()
            self._after = None
        return self._logits[:rows]

    def take_capture_s(self) -> float | None:
        """Return the seconds that the capture took, once: after the step in which it happened.
        Return None after all other steps."""
        taken, self._capture_s = self._capture_s, None
        return taken

    def close(self) -> None:
        """Stop replaying. The cache goes on without this step: a further turn may follow, or other
        sequences may join."""
        for counters in self._counters:
            counters.stop()
        if self._kept is not None:
            for step in self.kept.give_back(self._kept):
                self.graphs.drop(step.replay)
        elif self._replay is not None:
            self.graphs.drop(self._replay)

    def _first(self, token: Tensor) -> Tensor:
        self._picked = token.new_zeros(2, len(token) + self.cache.free)
        self._picked[0, : len(token)] = token[:, 0]
        self.picked = self._picked[:, : len(token)]
        for counters in self._counters:
            counters.start()
        self.forward.make_table()
        inputs = self.cache.step_inputs
        with nullcontext() if inputs is None else recording_inputs(inputs):
            logits = self._step().clone()
        wait_for(token.device)
        began = perf_counter()
        if not self._serve_by_kept():
            self._capture()
        self._capture_s = perf_counter() - began
        return logits

    def _serve_by_kept(self) -> bool:
        """Use a captured step that other sequences have left, if one fits. Return whether one
        did."""
        cache = self.cache
        if not isinstance(cache, SlotsCache) or cache.step_inputs is None:
            return False
        if (kept := self.kept.take(cache)) is None:
            return False
        self._kept = kept
        self._picked, self._logits, self._replay = kept.picked, kept.logits, kept.replay
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
        counting = {*self._counters, self.cache.counters}
        for counters in counting:
            counters.capturing = True
        try:
            replay, self._logits = self.graphs.capture(self._step)
            for counters in counting:
                counters.capturing = False
            self._moved = [
                (state, state.traffic.less(was)) for state, was in zip(states, counted, strict=True)
            ]
            self._replay, self._after = replay, SavedState(self.cache).since(before).restore
            self._kept = self._for_others(replay, held)
        except torch.OutOfMemoryError:
            raise  # it has advice of its own
        except Exception as error:
            raise CaptureBroke(
                f"Capturing a decode step failed ({_first_cause(error)}): set graphs=off."
            ) from error
        finally:
            before.restore()  # the step has not run

    def _for_others(
        self, replay: Callable[[], Any], before: Sequence[Mapping[str, Any]]
    ) -> KeptStep | None:
        """Return the captured step in a form that other sequences can use; None if it reads memory
        of its own sequences that no recorded input (`step_inputs`) names. `before`: for each policy
        (a method's rule in a layer), its attributes before the capture, of which the step has
        replaced some."""
        cache, inputs = self.cache, self.cache.step_inputs
        if not isinstance(cache, SlotsCache) or inputs is None or inputs.read_memory:
            return None
        # a step leaves what it chose in the attributes that it replaces
        results = [
            {
                name: value
                for name, value in after.items()
                if value is not was.get(name) and isinstance(value, Tensor | Ragged)
            }
            for was, after in zip(before, cache.results(), strict=True)
        ]
        picked, logits = self._picked, self._logits
        return KeptStep(picked, logits, replay, cache.form, inputs, cache.joined(), results)

    def _step(self) -> Tensor:
        logits = self.forward(self._picked[0].unsqueeze(1), self.cache)
        ops.likeliest_tokens(logits, self._picked)
        for counters in self._counters:
            counters.advance()
        return logits


def _first_cause(error: BaseException) -> str:
    """Return, in one line, the first of the errors that led to `error`. The end of a capture fails
    because something inside it failed."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0]


def capture_refusal(forward: BlockForward | None, cache: KVCache) -> str | None:
    """Return why the decode steps of a sealed cache cannot be captured, or None."""
    if forward is None:
        return "the model runs its own forward"
    if any(member.watch is not None for member in cache.members):
        return "fidelity compares steps with exact attention"
    if forward.rotary is not None:
        return f"{forward.rotary.kinds} rotations depend on the length of the text"
    return next((reason for layer in cache.layers if (reason := layer.capture_refusal())), None)
