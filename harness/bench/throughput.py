"""`python -m harness.bench throughput`: the largest batch of each method, and how fast batches decode up to it.

Sequences of --tokens join one batch one after the other, until the memory of the device ends, or the host's, or --most
run. At 1, 2, 4, ... sequences and at the last one steps are timed; the first two tokens of a sequence alone are TTFT
and TT2T. The batch that memory does not hold has a row of its own, with what it took. The largest batch is predicted
beforehand, by the forecast that `python -m harness.plan` uses. On a CPU, say how large a device it stands for
(--device-memory); bytes are counted then where tensors are made. With random weights, or `--synthetic`, nobody computes
the prompts: their keys and values are random, and what computing one would take beside the sequences is kept free, as
forecast.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.bench.common import arguments, methods, models, output
from harness.bench.common.growing import SIZES, GrowingBatch
from harness.bench.common.load import LoadWatch
from harness.bench.common.output import Cell
from harness.bench.decode import CALIBRATION, attachment
from harness.engine.attach import Attachment
from harness.engine.engine import Engine
from harness.engine.hf import routed
from harness.engine.wait import wait_for
from harness.jobs.planning.capacity import size
from harness.machines.machine import Machine
from harness.machines.plan import CHUNK, PlanError, Workload, largest, sequence_of
from harness.models.base import LoadedModel, ModelInfo
from harness.prompts.calibration import calibration_text
from methods.base import BudgetError, CostError, Method
from methods.tiers.tier import DEVICE, DISK, HOST

ASKED, TIME, CAP = "as asked", "time", "more was not tried"


def sweep(growing: GrowingBatch, report: output.Report, what: str) -> Iterator[dict[str, Any]]:
    """A row for each batch that is timed; the last of them says what ended there. Behind it comes one for the batch
    that failed, if memory ended it."""
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
        elif count == growing.options.most:
            ended = ASKED
        elif count >= 2 ** (SIZES - 1):
            ended = CAP
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
    if ended in (DEVICE, HOST):
        yield {"batch": count + 1, "failed": ended, **growing.refused}


def predicted(
    info: ModelInfo, method: Method, name: str, tokens: int, placement: str, options: argparse.Namespace
) -> tuple[int | None, int]:
    """The largest batch by the forecast of bytes, and what computing a prompt takes beside it; None and 0 for a method
    without formulas. A CPU is forecast as it computes, with files for the host's rows, which then count apart from its
    own."""
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
        return None, 0
    return largest(gpu, info, load, sequence)[0], sequence.passing


def alone(kv: Attachment, ids: Tensor) -> dict[str, Any]:
    """The first two tokens of one sequence."""
    watch = LoadWatch()
    chunk = CHUNK if kv.method.dense_prefill else None
    first, second = Engine(kv, prefill_chunk=chunk).generate(ids, max_new_tokens=2).token_s
    return {"ttft_s": first, "tt2t_s": second, "alone_disturbed": watch.disturbed()}


def run(
    options: argparse.Namespace, loaded: LoadedModel, info: ModelInfo, text: list[int], report: output.Report
) -> None:
    for tokens in options.tokens:
        ids = torch.tensor([(text * (tokens // len(text) + 1))[-tokens:]], device=loaded.model.device)
        for name, method in methods.chosen(options.methods, options.config_dir).items():
            if report.out_of_time(f"{name} at {tokens}"):
                continue
            placement = options.placement if method.offloads else DEVICE
            row: dict[str, Any] = {"method": name, "tokens": tokens, "placement": placement}
            try:
                row["predicted"], prompt = predicted(info, method, name, tokens, placement, options)
                kv = attachment(method, loaded, text[-CALIBRATION:], options, options.overlap)
                _measure(kv, ids, options, prompt if options.synthetic else 0, row, report)
            except (BudgetError, torch.OutOfMemoryError, ValueError) as error:
                reason = " ".join(str(error).split())
                report.add({**row, "label": name, "error": reason}, f"{name} at {tokens}: {reason}")


def _measure(
    kv: Attachment, ids: Tensor, options: argparse.Namespace, prompt: int, row: dict[str, Any], report: output.Report
) -> None:
    what, rows = f"{row['method']} at {row['tokens']}", list[dict[str, Any]]()
    with closing(kv), routed(kv.model):
        first = {} if options.synthetic else alone(kv, ids)
        if options.synthetic:  # what a method returns is checked in the first cache, whose batch attends one by one
            GrowingBatch(kv, ids, options, prompt).join()
        growing = GrowingBatch(kv, ids, options, prompt)
        memory = growing.memory

        def put(made: dict[str, Any]) -> None:
            if rows and rows[-1]["batch"] == made["batch"]:  # timed already, as the last
                made = rows.pop() | made
                report.rows.pop()
            rows.append(row | made if "failed" in made else row | first | made)
            report.add(rows[-1], f"{what}: {made['batch']} sequences, {_told(made)}")

        try:
            for made in sweep(growing, report, what):
                put(made)
        except torch.OutOfMemoryError:  # in a step
            if not rows:
                raise
            put({"batch": rows[-1]["batch"], "ended": DEVICE})
            put({"batch": len(growing.batch.slots), "failed": DEVICE})
        del growing
    wait_for(kv.model.device)
    if left := memory.left():
        report.left_out.append(f"{size(left)} that {what} has not given back")


def _told(made: dict[str, Any]) -> str:
    if "failed" in made:
        return f"more than the {made['failed']} holds"
    ended = f"; ended by {made['ended']}" if "ended" in made else ""
    return f"{made['rate']:.1f} tokens/s, {made['tpot_s'].median * 1e3:.2f} ms{ended}"


TABLE = output.table(
    Cell("tokens", "tokens"),
    Cell("method", "method", left=True),
    Cell("placement", "placement", left=True),
    Cell("batch", "batch"),
    Cell("predicted", lambda row: row["predicted"] if "ended" in row else None),
    Cell("ended by", lambda row: row.get("ended") or ("fails" if "failed" in row else None), left=True),
    Cell("decode", "rate", "tok/s"),
    Cell("TPOT", "tpot_s", "ms", 1e3),
    Cell("TTFT", lambda row: row.get("ttft_s"), "s"),
    Cell("TT2T", lambda row: row.get("tt2t_s"), "s"),
    Cell("device", "device_bytes", "MiB", 2**-20),
    Cell("host", lambda row: row.get("host_bytes") or None, "MiB", 2**-20),
    Cell("no graph because", "plain_steps", left=True),
    Cell("one by one because", "one_by_one", left=True),
)


def parser() -> argparse.ArgumentParser:
    model = {"shape": None, "layers": None, "synthetic": False, "graphs": False, "link": None, "overlap": False}
    sizes = {"device_memory": None, "host_memory": None, "most": None}
    shared = model | sizes | arguments.METHODS | arguments.FAST | {"placement": HOST}
    del shared["rounds"]
    return arguments.parser("throughput", __doc__, tokens=[2048, 4096], new=50, budget=0.2, **shared)


def main(options: argparse.Namespace) -> None:
    options.synthetic |= options.shape is not None
    if options.device_memory is None and options.device == "cpu":
        raise ValueError("--device-memory says how large a device this CPU stands for: give it, as 2GB.")
    arguments.check_bus(options)
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
    shown = [
        {**row, "rates": [row["rate"]] * 3, "what": f"{row['method']}, {row['tokens']}"}
        for row in rows
        if "rate" in row
    ]
    output.lines(path, shown, x="batch", y="rates", series="what", labels=labels, title=title)
