"""Measures where the time of a decode step goes: operations by phase, the rest of the method, the
model around it.

Marks are CUDA events on a GPU, so that nothing waits while a step runs, and clock reads on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.engine.cache import KVCache
from harness.engine.step_parts import PHASES, phase_of
from harness.models.devices import wait_for
from kernels.dispatch import watched
from methods.base import AttnInput

METHOD = "method"

# Bytes of an index that operations which score candidates read, by their arguments. Also where the arguments were
# gathered for the operation, the index is read once.
INDEX_BYTES: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        ("row_scores", "row_scores_with_lse", "row_weights", "page_scores", "live_scores"),
        lambda q, x, *_: int(x.nbytes),
    ),
    **dict.fromkeys(
        ("channel_weights", "channel_sums"),
        lambda q, x, channels, *_: int(channels.numel() * x.shape[3] * x.element_size()),
    ),
    "pq_weights": lambda q, centroids, codes, scale: int(centroids.nbytes + codes.nbytes),
    "pq_best": lambda q, centroids, codes, held, *_: int(
        centroids.nbytes + codes.nbytes + held.nbytes
    ),
}
_ATTEND = PHASES["attend"][:3]  # of a decode step
Seen = Callable[[str, tuple[Any, ...]], None]  # an operation and its arguments


class Stopwatch:
    """Measure how long named spans of work on `device` take."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        began = self._mark()
        yield
        self._spans.append((name, began, self._mark()))

    def totals(self) -> dict[str, float]:
        """Return the seconds of each name, 0 for names without a span. This waits for the
        device."""
        spent: dict[str, float] = defaultdict(float)
        wait_for(self.device)
        for name, began, ended in self._spans:
            spent[name] += (
                ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3
            )
        return spent

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


@contextmanager
def clocked(watch: Stopwatch, seen: Seen | None = None) -> Iterator[None]:
    """Clock every operation of kernels/ops.py that runs inside as a span of its phase (`phase_of`).
    `seen` gets its name and arguments. An operation that another one calls belongs to the
    caller's span."""
    within = False

    def around(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        nonlocal within
        if within:
            return call()
        within = True
        try:
            with watch.span(phase_of(name)):
                result = call()
        finally:
            within = False
        if seen is not None:
            seen(name, arguments)
        return result

    with watched(around):
        yield


class Tracer:
    """Measure how long the parts of decode steps take: the phases of the method (select, fetch,
    attend), its rest, and the model. Steps must run in Python, layer by layer and one sequence at a
    time: a replayed graph, or attention of several sequences in one call, cannot be clocked."""

    last: dict[str, float]  # seconds of the last step's parts

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._indices: dict[int, int] = {}  # id of a layer -> index bytes that its decode has read

    @contextmanager
    def step(self, cache: KVCache) -> Iterator[None]:
        """Measure, inside the block, how long each part of a decode step of `cache` takes. The
        seconds are in `last` afterwards."""
        watch = Stopwatch(self.device)
        with _clocked_layers(cache, watch, self._indices), watch.span("step"):
            yield
        spent = watch.totals()
        phases = {phase: spent[phase] for phase in PHASES}
        rest, model = spent[METHOD] - sum(phases.values()), spent["step"] - spent[METHOD]
        self.last = {**phases, "rest": rest, "model": model, "step": spent["step"]}

    def bytes_read(self, cache: KVCache) -> float | None:
        """Return the bytes of keys, values and indices that the last step of `cache` read, or None
        if a layer does not know."""
        total = 0.0
        for layer in cache.method_layers:
            if (read := layer.bytes_read) is None:
                return None
            total += read * (1 + layer.spec.borrowers) + self._indices[id(layer)]
        return total


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """Return the number of a generation's decode steps and the medians of their seconds, of the
    whole step and of each part; None without steps. `steps`: the seconds of each step, by part."""
    if not steps:
        return None
    middle = {name: median(step[name] for step in steps) for name in steps[0]}
    return {"steps": len(steps), "step_s": middle.pop("step"), "parts_s": middle}


@contextmanager
def _clocked_layers(cache: KVCache, watch: Stopwatch, indices: dict[int, int]) -> Iterator[None]:
    """Clock, inside the block, the operations that run in each layer's `decode` and `lend`, and
    nothing else: comparisons with exact attention have a cost of their own, and layers with a sliding
    window are part of the model. `indices` gets the bytes that each layer has read of its index, which is what
    its method scores in order to choose tokens. Keys that were attended to in the same step are not
    counted, since they are read anyway: a method that asks for their weights (H2O, InfLLM) reads no
    index."""

    def clock(layer: int, plain: Callable[[AttnInput], Tensor], x: AttnInput) -> Tensor:
        attended: set[int] = set()  # storages of keys
        indices.setdefault(layer, 0)

        def add(name: str, arguments: tuple[Any, ...]) -> None:
            if name in _ATTEND:
                attended.update(segment.k.untyped_storage().data_ptr() for segment in arguments[1])
            elif name == "log_sum_exps":
                for segment in arguments[1]:
                    add("row_scores", (arguments[0], segment.k))
            elif name in INDEX_BYTES and arguments[1].untyped_storage().data_ptr() not in attended:
                indices[layer] += INDEX_BYTES[name](*arguments)

        with clocked(watch, add), watch.span(METHOD):
            return plain(x)

    indices.clear()
    with ExitStack() as undo:
        for layer in cache.method_layers:
            for name in ("decode", "lend"):
                vars(layer)[name] = partial(clock, id(layer), getattr(layer, name))
                undo.callback(vars(layer).pop, name)
        yield
