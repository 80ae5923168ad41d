"""`python -m harness.bench profile`: where the time of a decode step goes, kernel by kernel, for every method.

Tokens are decoded as in `bench decode`, after random keys and values of the prompt, under torch's
profiler: it counts kernels on a GPU, where steps are captured as in a run, and operations of torch on a CPU. Calls
and times are those of a whole step divided by the number of layers. Kernels that take less than a hundredth of the time
make up the last row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from harness.bench.common import arguments, methods, output
from harness.bench.common.output import BenchRow, Cell
from harness.bench.decode import Attach, Decoding, prepared, prompt_ids
from harness.engine.hf import routed
from harness.models.devices import wait_for
from harness.terminal.tables import Column
from methods.base import Method

SMALL = 0.01  # of all time: kernels below it are counted together
OTHERS = "all others"


def measure(
    method: Method, attach: Attach, ids: torch.Tensor, options: argparse.Namespace
) -> dict[str, Any]:
    """Decode turns under the profiler. ids [1 S]: the prompt. Return the kernels of a step, the longest first: for
    each its name, calls per layer, microseconds per layer and microseconds per call."""
    with closing(attach(method)) as kv, routed(kv.model):
        decoding = Decoding(kv, ids, options)
        activity = ProfilerActivity.CUDA if kv.model.device.type == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiler:
            for _ in range(options.rounds):
                decoding.turn()
            wait_for(kv.model.device)
        kernels = per_layer(profiler, activity, options.rounds * (options.new - 1) * len(kv.specs))
    return {"kernels": kernels, "layer_us": sum(kernel["layer_us"] for kernel in kernels)}


def per_layer(profiler: profile, activity: ProfilerActivity, layers: int) -> list[dict[str, Any]]:
    """Return what the profiler has counted, by name, divided by the number of `layers` of all steps together."""
    events = [
        (event.key, event.count, event.self_device_time_total if activity is ProfilerActivity.CUDA
         else event.self_cpu_time_total)
        for event in profiler.key_averages()
    ]  # fmt: skip
    whole = sum(us for *_, us in events)
    large = sorted(
        (event for event in events if event[2] >= SMALL * whole), key=lambda event: -event[2]
    )
    rest = [event for event in events if event not in large]
    large.append((OTHERS, sum(count for _, count, _ in rest), sum(us for *_, us in rest)))
    return [
        {"kernel": name, "calls": count / layers, "layer_us": us / layers, "each_us": us / count}
        for name, count, us in large
        if count
    ]


def table(rows: Sequence[BenchRow]) -> list[Column]:
    """Return the columns of a table with a line for each kernel of each row."""
    lines = [{**row, **kernel} for row in rows for kernel in row["kernels"]]
    return output.table(
        Cell("tokens", "tokens"),
        Cell("method", "method", left=True),
        Cell("kernel", lambda line: line["kernel"][:60], left=True),
        Cell("calls per layer", "calls"),
        Cell("time per layer", "layer_us", "us"),
        Cell("each", "each_us", "us"),
    )(lines)


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of this benchmark."""
    model = {"shape": None, "layers": None, "overlap": "auto"}
    shared = model | arguments.METHODS | arguments.FAST | {"rounds": 2}
    return arguments.parser("profile", __doc__, tokens=[7936], new=10, budget=0.2, **shared)


def main(options: argparse.Namespace) -> None:
    """Measure, print, and write the table and all figures."""
    if options.new < 2:
        raise ValueError(f"--new {options.new} leaves no step to profile: use at least 2.")
    options.synthetic = True
    methods.chosen(options)  # a wrong name is found now
    loaded, text, attach = prepared(arguments.source(options.shape, options.layers), options)

    def after(tokens: int) -> methods.MeasureMethod:
        ids = prompt_ids(text, tokens, loaded, options)
        return partial(measure, attach=attach, ids=ids, options=options)

    def told(row: dict[str, Any]) -> str:
        longest = ", ".join(
            f"{kernel['kernel'][:30]} {kernel['layer_us']:.1f}" for kernel in row["kernels"][:3]
        )
        return f"{row['layer_us']:.1f} us per layer: {longest}"

    title = f"Kernels of a decode step of {loaded.name}, {options.dtype}, {options.device}, {methods.title(options)}"
    report = output.Report("profile", title, options, table, synthetic=True)
    methods.measured(options, report, after, told)
    report.finish()
