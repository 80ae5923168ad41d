"""`python -m harness.bench latency`: TTFT, TT2T and TPOT of batches, for every method.

The prompts of a batch are prefilled and sealed one by one, then all decode together; a sequence's clock stands still
while others come, so TTFT is that of one prompt, and TT2T has its seal and the first step of all. A method's batch and
that of --against, Full's by default, run in turn. Each layer waits for the rows that it brings from elsewhere. Nothing
is synthetic.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from harness.bench.common import arguments, methods, models, output
from harness.bench.common.load import LoadWatch, MarkedSeconds
from harness.bench.common.measure import estimate, marks, ratios, rounds_of
from harness.bench.common.output import Cell
from harness.bench.decode import CALIBRATION, attachment
from harness.engine.attach import Attachment
from harness.engine.batch.running import RunningBatch
from harness.engine.engine import Engine
from harness.engine.hf import routed
from harness.models.base import LoadedModel
from harness.prompts.calibration import calibration_text
from methods.base import Method

CLOCKS = {"ttft_s": "TTFT", "tt2t_s": "TT2T", "tpot_s": "TPOT"}


def prompts(text: Sequence[int], tokens: int, batch: int) -> Tensor:
    """[B S] of a text; each sequence begins elsewhere in it, and goes on at its start where it ends."""
    whole = torch.tensor(text).repeat(1 + -(-tokens // len(text)))
    return torch.stack([whole[number % len(text) :][:tokens] for number in range(batch)])


def timed(kv: Attachment, ids: Tensor, new: int) -> dict[str, MarkedSeconds]:
    """Of one batch, means over its sequences. ids [B S]"""
    watch = LoadWatch()
    engine = Engine(kv)
    batch = RunningBatch(engine)
    slots = [engine.join(batch, row, max_new_tokens=new) for row in ids.unsqueeze(1)]
    while batch.slots:
        batch.step()
    disturbed = watch.disturbed()
    times = [slot.out.token_s for slot in slots]
    of_each = [(of_one[0], of_one[1], (of_one[-1] - of_one[1]) / (len(of_one) - 2)) for of_one in times]
    return {
        clock: MarkedSeconds(fmean(seconds), disturbed)
        for clock, seconds in zip(CLOCKS, zip(*of_each, strict=True), strict=True)
    }


def measure(own: Attachment, beside: Attachment, ids: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Of one row."""
    sides = {"own": own} | ({} if own.method == beside.method else {"beside": beside})
    for kv in sides.values():  # kernels are built, and weights read once
        timed(kv, ids[:, :256], 3)
    *_, done = rounds_of({side: partial(timed, kv, ids, options.new) for side, kv in sides.items()}, options.rounds)
    times: dict[str, dict[str, Sequence[MarkedSeconds]]] = {
        side: {clock: [run[clock] for run in runs] for clock in CLOCKS} for side, runs in done.items()
    }
    compared = {
        f"{clock}_ratio": ratios(times["beside"][clock], times["own"][clock]) if "beside" in times else None
        for clock in CLOCKS
    }
    of_runs = marks(*(times[side]["tpot_s"] for side in times))  # the clocks of a run share its mark
    return {clock: estimate(times["own"][clock]) for clock in CLOCKS} | compared | {"batch": len(ids)} | of_runs


def run(options: argparse.Namespace, loaded: LoadedModel, text: list[int], report: output.Report) -> None:
    calibration = text[-CALIBRATION:]
    _, other = methods.parsed(options.against, options.config_dir)
    for batch in options.batches:

        def behind(tokens: int, batch: int = batch) -> methods.MeasureMethod:
            ids = prompts(text, tokens, batch)

            def measured(method: Method) -> dict[str, Any]:
                with (
                    closing(attachment(method, loaded, calibration, options, options.overlap)) as own,
                    closing(attachment(other, loaded, calibration, options, options.overlap)) as beside,
                    routed(loaded.model),
                ):
                    return measure(own, beside, ids, options)

            return measured

        methods.measured(options, report, behind, _told)


def _told(row: dict[str, Any]) -> str:
    times = (f"{name} {1e3 * row[clock].median:.1f} ms" for clock, name in CLOCKS.items())
    return f"{row['batch']} together, {', '.join(times)}"


def table(against: str) -> output.Table:
    """`against`: the name of what runs in turn with each method."""
    return output.table(
        Cell("tokens", "tokens"),
        Cell("batch", "batch"),
        Cell("method", "method", left=True),
        *(
            cell
            for clock, name in CLOCKS.items()
            for cell in (Cell(name, clock, "ms", 1e3), Cell(f"{against} / it, {name}", f"{clock}_ratio"))
        ),
    )


def parser() -> argparse.ArgumentParser:
    model = {"shape": None, "layers": None, "batches": [1, 4], "against": "full", "link": None, "overlap": False}
    shared = model | arguments.METHODS | arguments.FAST
    return arguments.parser("latency", __doc__, tokens=[2048, 4096], new=16, budget=0.2, **shared)


@torch.inference_mode()
def main(options: argparse.Namespace) -> None:
    arguments.check_bus(options)
    methods.chosen([*options.methods, options.against], options.config_dir)  # a wrong name is found now
    source = models.source(options.shape, options.layers)
    loaded = source.load(options.dtype, options.device)
    models.check_window(loaded, max(options.tokens), options.new)
    text = calibration_text(source.tokenizer(), max(CALIBRATION, *options.tokens))
    title = (
        f"Batches of {loaded.name}, {options.dtype}, {options.device}, budget {options.budget}, placement "
        f"{options.placement}{arguments.crossed(options)}, {options.new} new tokens"
    )
    report = output.Report("latency", title, options, table(options.against), model=loaded.name)
    run(options, loaded, text, report)
    report.finish(_draw)


def _draw(path: Any, rows: Sequence[output.BenchRow], title: str) -> None:
    """TT2T against the batch, a line for each method and length."""
    shown = [{**row, "series": f"{row['method']}, {row['tokens']}"} for row in rows]
    labels = ("sequences that decode together", "seconds to the second token")
    output.lines(path, shown, x="batch", y="tt2t_s", series="series", labels=labels, title=title)
