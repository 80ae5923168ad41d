"""`python -m harness.bench throughput`: the largest batch of each method, and how fast batches decode up to it.

Sequences of --tokens join one batch one after the other, until the memory of the device ends, or the host's, or --most
run. At 1, 2, 4, ... sequences and at the last one steps are timed; the first two tokens of a sequence alone are TTFT
and TT2T. The largest batch is predicted beforehand, by the forecast that `python -m harness.plan` uses. On a CPU, say
how large a device it stands for (--device-memory); bytes are counted then where tensors are made. With random weights,
or `--synthetic`, nobody computes the prompts: their keys and values are random, and the prediction still leaves room
for a prompt.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from harness.bench.common import arguments, methods, models, output
from harness.bench.common.load import LoadWatch
from harness.bench.common.measure import estimate, marks, seconds
from harness.bench.common.output import Cell
from harness.bench.common.synthetic import LayerShape
from harness.bench.decode import CALIBRATION, attachment
from harness.engine.attach import Attachment
from harness.engine.batch.running import RunningBatch
from harness.engine.cache import KVCache
from harness.engine.engine import Engine
from harness.engine.footprint import footprint
from harness.engine.graph import graphs_on
from harness.engine.hf import routed
from harness.engine.wait import wait_for
from harness.jobs.planning.capacity import size
from harness.machines.allocations import Allocations
from harness.machines.machine import Machine
from harness.machines.plan import CHUNK, PlanError, Workload, largest, sequence_of
from harness.models.base import LoadedModel, ModelInfo
from harness.prompts.calibration import calibration_text
from methods.base import BudgetError, CostError, Method
from methods.tiers.tier import DEVICE, DISK, HOST

SIZES = 12  # batches that are timed, at most: up to 2048 sequences
ASKED, TIME = "as asked", "time"


class Memory:
    """Counts what is taken at most: on a GPU by torch's allocator, else by a hook on what makes tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.counted = device, Allocations()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self.before = self._taken()

    def counting(self) -> Any:
        return nullcontext() if self.device.type == "cuda" else self.counted

    def most(self) -> int:
        """Bytes on the device at most, without what was there before."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return self.counted.peaks[DEVICE]

    def left(self) -> int:
        """Bytes that are still taken."""
        gc.collect()
        return self._taken() - self.before

    def _taken(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else self.counted.alive.total()


class GrowingBatch:
    """Sequences of the same prompt `ids` [1 S] that decode together, one more at a time."""

    def __init__(self, kv: Attachment, ids: Tensor, options: argparse.Namespace, weights: int) -> None:
        self.kv, self.ids, self.options, self.weights = kv, ids, options, weights
        graphs = graphs_on(kv.model.device) if options.graphs else None
        self.engine = Engine(kv, prefill_chunk=CHUNK if kv.method.dense_prefill else None, graphs=graphs)
        self.batch, self.memory = RunningBatch(self.engine), Memory(kv.model.device)
        self.taken, self.host = weights, 0  # of the device at most, and of the host, by those that fit
        self.steps = max(3, (options.new - 2) // SIZES)  # at each size, the first untimed

    @torch.inference_mode()
    def join(self) -> None:
        """Let one more run, which takes a step by itself first, for some methods make room then. Raises
        `torch.OutOfMemoryError`."""
        cache = self.kv.start(KVCache, capacity=self.ids.shape[1] + self.options.new)
        logits = self._filled(cache) if self.options.synthetic else self.engine.prefill(cache, self.ids, whole=True)
        ending: Any = {"began": perf_counter(), "max_new_tokens": self.options.new}
        first = RunningBatch(self.engine)
        slot = first.join(cache, logits, self.ids[:, :0], **ending)
        first.step()
        first.leave(slot)
        self.batch.join(cache, logits, self.ids[:, :0], **ending)

    def _filled(self, cache: KVCache) -> Tensor:
        """Random keys and values, layer by layer, as a prompt comes."""
        model, spec = self.kv.model, self.kv.specs[0]
        shape = LayerShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, model.dtype, model.device)
        for index, layer in enumerate(cache.layers):
            shape.fill([layer], self.ids.shape[1], attending=not self.kv.method.dense_prefill)
            if cache.closes_early:
                cache.close(index)
        cache.num_tokens = self.ids.shape[1]
        return torch.zeros(1, model.config.vocab_size, device=model.device)

    def ended_by(self) -> str | None:
        """Which memory is exceeded; where none is, what is taken so far fits."""
        taken, limit = self.weights + self.memory.most(), self.options.host_memory
        host = self.host + footprint(self.batch.slots[-1].cache.layers)[HOST]
        if taken > self.options.device_memory:
            return DEVICE
        if limit is not None and host > limit:
            return HOST
        self.taken, self.host = taken, host
        return None

    def timed(self) -> dict[str, Any]:
        """Steps of those that run."""
        self.batch.step()
        times = [seconds(self.batch.step, self.kv.model.device) for _ in range(self.steps - 1)]
        step = estimate(times)
        return {
            "batch": len(self.batch.slots),
            "tpot_s": step,
            "rate": len(self.batch.slots) / step.median,
            "device_bytes": self.taken,
            "host_bytes": self.host,
            "plain_steps": self.engine.plain_steps,
            "one_by_one": self.engine.one_by_one,
            **marks(times),
        }


def sweep(growing: GrowingBatch, report: output.Report, what: str) -> Iterator[dict[str, Any]]:
    """A row for each batch that is timed; the last says what ended there."""
    timed, ended = 0, None
    while ended is None:
        try:
            with growing.memory.counting():
                growing.join()
        except torch.OutOfMemoryError:
            ended = DEVICE
            break
        count = len(growing.batch.slots)
        ended = growing.ended_by()
        if ended is not None:
            growing.batch.leave(growing.batch.slots[-1])
        elif count == growing.options.most or count >= 2 ** (SIZES - 1):
            ended = ASKED
        elif report.out_of_time(f"{what}, more than {count}"):
            ended = TIME
        elif count & (count - 1) == 0:
            timed = count
            yield growing.timed()
    count = len(growing.batch.slots)
    if not count:
        needed = f"beside {size(growing.weights)} of weights it takes {size(growing.memory.most())} of the device"
        raise ValueError(f"not even one sequence fits: {needed} with its prompt. Give more --{ended}-memory.")
    yield (growing.timed() if count != timed else {"batch": count}) | {"ended": ended}


def predicted(
    info: ModelInfo, method: Method, name: str, tokens: int, placement: str, options: argparse.Namespace
) -> int | None:
    """The largest batch by the forecast of bytes; None for a method without formulas. A CPU is forecast as it computes,
    with files for the host's rows, which then count apart from its own."""
    on_cpu, budget = options.device == "cpu", options.budget if method.uses_budget else None
    gpu = Machine(
        name="here", device="cuda", device_bytes=options.device_memory, host_bytes=options.host_memory, read_gb_s=1.0,
        basis="measured", source="",
    )  # fmt: skip
    load = Workload(
        method=method, name=name, budget=budget, placement=placement, tokens=tokens, new=options.new,
        dtype=options.dtype,
    )  # fmt: skip
    try:
        sequence = sequence_of(gpu, info, load, rounded=not on_cpu)
        if on_cpu:
            away = replace(load, placement=DISK if placement == HOST else placement)
            sequence = sequence_of(replace(gpu, device="cpu"), info, away)._replace(host=sequence.host)
    except (CostError, PlanError):
        return None
    return largest(gpu, info, load, sequence)[0]


def alone(kv: Attachment, ids: Tensor) -> dict[str, Any]:
    """The first two tokens of one sequence."""
    watch = LoadWatch()
    chunk = CHUNK if kv.method.dense_prefill else None
    first, second = Engine(kv, prefill_chunk=chunk).generate(ids, max_new_tokens=2).token_s
    return {"ttft_s": first, "tt2t_s": second, "alone_disturbed": watch.disturbed()}


def run(
    options: argparse.Namespace, loaded: LoadedModel, info: ModelInfo, text: list[int], report: output.Report
) -> None:
    weights = sum(x.nbytes for x in loaded.model.parameters())
    for tokens in options.tokens:
        ids = torch.tensor([(text * (tokens // len(text) + 1))[-tokens:]], device=loaded.model.device)
        for name, method in methods.chosen(options.methods, options.config_dir).items():
            if report.out_of_time(f"{name} at {tokens}"):
                continue
            placement = options.placement if method.offloads else DEVICE
            row: dict[str, Any] = {"method": name, "tokens": tokens, "placement": placement}
            try:
                row["predicted"] = predicted(info, method, name, tokens, placement, options)
                _measure(attachment(method, loaded, text[-CALIBRATION:], options), ids, options, weights, row, report)
            except (BudgetError, torch.OutOfMemoryError, ValueError) as error:
                reason = " ".join(str(error).split())
                report.add({**row, "error": reason}, f"{name} at {tokens}: {reason}")


def _measure(
    kv: Attachment, ids: Tensor, options: argparse.Namespace, weights: int, row: dict[str, Any], report: output.Report
) -> None:
    what, rows = f"{row['method']} at {row['tokens']}", list[dict[str, Any]]()
    with closing(kv), routed(kv.model):
        first = {} if options.synthetic else alone(kv, ids)
        if options.synthetic:  # what a method returns is checked in the first cache, whose batch attends one by one
            GrowingBatch(kv, ids, options, weights).join()
        growing = GrowingBatch(kv, ids, options, weights)
        memory = growing.memory
        for made in sweep(growing, report, what):
            if rows and rows[-1]["batch"] == made["batch"]:  # timed already, as the last
                made = rows.pop() | made
                report.rows.pop()
            rows.append(row | first | made)
            step_ms = made["tpot_s"].median * 1e3
            told = f"{what}: {made['batch']} sequences, {made['rate']:.1f} tokens/s, {step_ms:.2f} ms"
            report.add(rows[-1], told + (f"; ended by {made['ended']}" if "ended" in made else ""))
        del growing
    wait_for(kv.model.device)
    if left := memory.left():
        report.left_out.append(f"{size(left)} that {what} has not given back")


TABLE = output.table(
    Cell("tokens", "tokens"),
    Cell("method", "method", left=True),
    Cell("placement", "placement", left=True),
    Cell("batch", "batch"),
    Cell("predicted", lambda row: row["predicted"] if "ended" in row else None),
    Cell("ended by", lambda row: row.get("ended"), left=True),
    Cell("decode", "rate", "tok/s"),
    Cell("TPOT", "tpot_s", "ms", 1e3),
    Cell("TTFT", lambda row: row.get("ttft_s"), "s"),
    Cell("TT2T", lambda row: row.get("tt2t_s"), "s"),
    Cell("device", "device_bytes", "MiB", 2**-20),
    Cell("host", output.some("host_bytes"), "MiB", 2**-20),
    Cell("no graph because", "plain_steps", left=True),
    Cell("one by one because", "one_by_one", left=True),
)


def parser() -> argparse.ArgumentParser:
    model = {"shape": None, "layers": None, "synthetic": False, "graphs": False, "link": None}
    sizes = {"device_memory": None, "host_memory": None, "most": None}
    shared = model | sizes | arguments.METHODS | arguments.FAST | {"placement": HOST}
    del shared["rounds"]
    return arguments.parser("throughput", __doc__, tokens=[2048, 4096], new=50, budget=0.2, **shared)


def main(options: argparse.Namespace) -> None:
    options.synthetic |= options.shape is not None
    if options.device_memory is None and options.device == "cpu":
        raise ValueError("--device-memory says how large a device this CPU stands for: give it, as 2GB.")
    methods.chosen(options.methods, options.config_dir)  # a wrong name is found now
    source = models.source(options.shape, options.layers)
    loaded = source.load(options.dtype, options.device)
    if options.device_memory is None:
        options.device_memory = torch.cuda.get_device_properties(loaded.model.device).total_memory
    models.check_window(loaded, 0 if options.synthetic else max(options.tokens), options.new)
    longest = CALIBRATION if options.synthetic else max(CALIBRATION, *options.tokens)
    text = calibration_text(source.tokenizer(), longest)
    filled = "prompt KV synthetic" if options.synthetic else "real prefill"
    host = f" and {size(options.host_memory)} of host memory" if options.host_memory else ""
    title = (
        f"Batches with {loaded.name}, {options.dtype}, {options.device}, budget {options.budget}, in "
        f"{size(options.device_memory)}{host}; {filled}"
    )
    report = output.Report("throughput", title, options, TABLE, synthetic=options.synthetic, model=loaded.name)
    run(options, loaded, source.describe(), text, report)
    report.finish(_draw)


def _draw(path: Path, rows: Sequence[output.BenchRow], title: str) -> None:
    """A line for each method and length."""
    labels = ("sequences", "tokens per second, all together")
    shown = [{**row, "rates": [row["rate"]] * 3, "what": f"{row['method']}, {row['tokens']}"} for row in rows]
    output.lines(path, shown, x="batch", y="rates", series="what", labels=labels, title=title)
