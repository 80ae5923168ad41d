"""`python -m harness.bench layer`: one attention layer, decoding one token, for every method and context length.

The keys and values of the prompt are random and were never computed; each step has a new random query, the worst case
for a method that keeps what the last step fetched. A method's step and Full's run in turn. The parts of a step come
from further, clocked steps: scores and choice (select), gathering and rebuilding (fetch), attention (attend), the rest.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from harness.bench.common import arguments, limits, methods, output
from harness.bench.common.measure import (
    MarkedSeconds,
    estimate,
    marks,
    own_seconds,
    ratios,
    rounds_of,
    seconds,
)
from harness.bench.common.operations import bytes_read
from harness.bench.common.output import Cell
from harness.bench.common.synthetic import LayerShape
from harness.engine.step_parts import PHASES
from harness.engine.trace import Stopwatch, clocked
from kernels.threads import step_threads
from kernels.toolchain import compiled_s
from methods.abilities import asked
from methods.base import AttnInput, CacheState, KVLayer, Method, Request
from methods.full import Full
from methods.layers import Layer
from methods.tiers.tier import DEVICE

# of the measured layer: Quest and InfiniGen keep layers 0 and 1 dense, a pyramid's middle has its mean
INDEX = 2
TRACED = 5  # steps with a clock in each operation


class LayerDecoding:
    """Runs one attention layer of a method whose prompt is there already, and feeds it one new
    random token per step."""

    def __init__(
        self, method: Method, shape: LayerShape, tokens: int, options: argparse.Namespace
    ) -> None:
        """Prefill and seal the layer with `tokens` random tokens, with room for the steps that the rounds of the
        benchmark take."""
        specs = shape.specs()
        budget, codec = methods.given_to(method, options)
        request = Request(
            batch=1,
            capacity=tokens + 4 * options.rounds + TRACED + 8,
            dtype=shape.dtype,
            device=shape.device,
            budget=budget,
            codec=codec,
            abilities=asked(budget, codec),
            placement=options.placement if method.offloads else DEVICE,
            prepared=method.prepare(specs, shape.observe()),
        )
        self.shape, self.position = shape, tokens - 1  # of the last token
        self._all = method.start(specs, CacheState(request))  # a layer may look at the others
        self.layer: KVLayer = self._all[INDEX]
        shape.fill([self.layer], tokens, attending=not method.dense_prefill)
        began = perf_counter()
        self.seal_s = seconds(self.layer.seal, shape.device)
        self.compile_s = compiled_s(began)
        self.next: AttnInput
        reads = self.layer.reads if isinstance(self.layer, Layer) else None
        self.guess: Callable[..., None] | None = getattr(reads, "guess", None)

    def step(self) -> None:
        with step_threads(self.shape.device):
            if self.guess is not None:  # a layer that chooses while the one before it runs
                self.guess(self.next, None)
            self.layer.decode(self.next)

    def advance(self) -> None:
        self.position += 1
        self.next = self.shape.token(3 * self.position, self.position)


@torch.inference_mode()
def measure(
    method: Method, full: LayerDecoding, tokens: int, options: argparse.Namespace
) -> dict[str, Any]:
    assert isinstance(full.layer, Layer)
    # without the tokens of the method before
    full.position, full.layer.store.length = tokens - 1, tokens
    own = LayerDecoding(method, full.shape, tokens, options)

    def next_step(decoding: LayerDecoding) -> MarkedSeconds:
        decoding.advance()
        return own_seconds(decoding.step, decoding.shape.device)

    for decoding in (full, own) * 2:
        next_step(decoding)
    times = rounds_of(
        {"own": partial(next_step, own), "full": partial(next_step, full)}, options.rounds
    )
    parts, read = trace(own)
    step_s = estimate(times["own"])
    return {
        "step_s": step_s,
        "full_s": estimate(times["full"]),
        "speedup": ratios(times["full"], times["own"]),
        "parts_s": parts,
        "read_bytes": read,
        "gb_s": read / step_s.median / 1e9,
        "seal_s": own.seal_s,
        "compile_s": own.compile_s,
        "attended": sum(own.layer.attended),
        "fallback": own.layer.fallback,
        **marks(*times.values()),
    }


def trace(decoding: LayerDecoding) -> tuple[dict[str, float], float]:
    """Return the seconds of each phase of a step, and the bytes that its operations read; medians
    over a few steps."""
    phases: dict[str, list[float]] = defaultdict(list)
    device, reads, read = decoding.shape.device, list[int](), list[int]()
    for _ in range(TRACED):
        decoding.advance()
        watch = Stopwatch(device)
        with clocked(watch, lambda name, given: read.append(bytes_read(name, given))):
            whole = own_seconds(decoding.step, device)
        spent = watch.totals()
        for phase in PHASES:
            phases[phase].append(spent[phase])
        phases["rest"].append(whole - sum(spent.values()))
        reads.append(sum(read))
        read.clear()
    return {phase: median(values) for phase, values in phases.items()}, median(reads)


def run(options: argparse.Namespace, report: output.Report) -> None:
    shape = arguments.shape(options)

    def after(tokens: int) -> methods.MeasureMethod:
        full = LayerDecoding(Full(), shape, tokens, options)
        return lambda method: measure(method, full, tokens, options)

    def told(row: dict[str, Any]) -> str:
        return f"{row['step_s'].median * 1e3:.3f} ms, {row['speedup'].median:.2f} x Full"

    methods.measured(options, report, after, told)


def table(limit_gb_s: float) -> output.Table:
    return output.table(
        Cell("tokens", "tokens"),
        Cell("method", "method", left=True),
        Cell("step", "step_s", "ms", 1e3),
        Cell("Full / it", "speedup"),
        *(Cell(phase, f"parts_s.{phase}", "ms", 1e3) for phase in (*PHASES, "rest")),
        Cell("read", "read_bytes", "MB", 1e-6),
        Cell("GB/s", "gb_s"),
        Cell("of limit", "gb_s", "%", 100 / limit_gb_s),
        Cell("attended", "attended"),
        Cell("seal", "seal_s", "s"),
        Cell("of it compiling", "compile_s", "s"),
    )


def parser() -> argparse.ArgumentParser:
    lengths = [4096, 16384, 32768, 65536, 131072]
    shared = arguments.LAYER | arguments.METHODS | arguments.FAST | {"rounds": 15}
    return arguments.parser("layer", __doc__, tokens=lengths, budget=2048, **shared)


def main(options: argparse.Namespace) -> None:
    methods.chosen(options)  # what is wrong is found now
    arguments.shape(options)
    known = limits.told(options.device)
    title = (
        f"One decode step of one layer: {options.heads} query and {options.kv_heads} KV heads of {options.head_dim}, "
        f"{options.dtype}, {methods.title(options)}, {options.device}; prompt KV synthetic"
    )
    report = output.Report(
        "layer", title, options, table(known["read_gb_s"]), limits=known, synthetic=True
    )
    run(options, report)
    labels = ("prompt tokens", "times faster than Full")
    report.finish(partial(output.lines, x="tokens", y="speedup", series="method", labels=labels))
