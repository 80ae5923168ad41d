"""`python -m harness.bench fit --machine FILE`: what steps take on this machine beside their bytes, method by method.

Steps are timed over synthetic keys and values of several lengths, each as the fastest of --rounds turns. The bandwidth
is fitted to Full's, then seconds per layer and per token of the prompt to each method's, and machine.yaml is written
with both for harness.plan. Each time stands beside what the other lengths predict for it. FILE is what
`python -m harness.bench calibrate` writes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from harness.bench.common import arguments, methods, models, output
from harness.bench.common.measure import marks
from harness.bench.common.output import Cell
from harness.bench.decode import CALIBRATION, ModelDecoding, attachment
from harness.engine.hf import routed
from harness.machines import machine as machines
from harness.machines.fitting import NoLineError, TimedStep, layer_and_token_s, line, predicted_s
from harness.machines.machine import Machine, MethodConstants
from harness.machines.plan import Workload
from harness.models.base import LoadedModel, ModelInfo
from harness.prompts.calibration import calibration_text
from methods.base import BudgetError, Method
from methods.full import Full
from methods.tiers.tier import DEVICE

FULL = "full"
TABLE = output.table(
    Cell("tokens", "tokens"),
    Cell("method", "method", left=True),
    Cell("step", "step_s", "ms", 1e3),
    Cell("predicted", "predicted_s", "ms", 1e3),
    Cell("missed by", "error_share", "%", 100),
)


def fitted(there: Machine, steps: Mapping[str, Sequence[TimedStep]]) -> Machine:
    """The machine with Full's bandwidth, and with what layers of each method take beside their bytes."""
    read_gb_s, of_full = line(there, steps[FULL])
    made = replace(there, read_gb_s=_rounded(read_gb_s), basis="measured", source="python -m harness.bench fit")
    constants = {}
    for name, of_method in steps.items():
        layer_s, token_s = (of_full, 0.0) if name == FULL else layer_and_token_s(made, of_method)
        constants[name] = MethodConstants(_rounded(layer_s), _rounded(token_s), placement=of_method[0].load.placement)
    return replace(made, methods=constants)


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def left_out(there: Machine, steps: Mapping[str, Sequence[TimedStep]], name: str, step: TimedStep) -> float:
    """Seconds of a step by what all steps over other lengths were fitted to."""
    others = {
        method: [other for other in of_method if other.load.tokens != step.load.tokens]
        for method, of_method in steps.items()
    }
    made = fitted(there, {method: of_method for method, of_method in others.items() if of_method})
    return predicted_s(made, step, made.methods.get(name, MethodConstants()))


def run(
    options: argparse.Namespace, loaded: LoadedModel, text: list[int], info: ModelInfo, report: output.Report
) -> dict[str, list[TimedStep]]:
    """The steps of every method at every length."""
    steps: dict[str, list[TimedStep]] = {}
    for tokens in options.tokens:
        for name, method in ({FULL: Full()} | methods.chosen(options.methods, options.config_dir)).items():
            if report.out_of_time(f"{name} at {tokens}"):
                continue
            try:
                times = _times(method, tokens, options, loaded, text)
            except (BudgetError, torch.OutOfMemoryError) as error:
                report.add(
                    {"method": name, "tokens": tokens, "label": name, "error": str(error)},
                    f"{name} at {tokens}: {error}",
                )
                continue
            load = Workload(
                method=method,
                name=name,
                budget=options.budget if method.uses_budget else None,
                placement=options.placement if method.offloads else DEVICE,
                tokens=tokens,
                new=options.new * (options.rounds + 1),
                dtype=options.dtype,
            )
            steps.setdefault(name, []).append(TimedStep(info, load, 1, min(times)))
            row = {"method": name, "tokens": tokens, "step_s": min(times), **marks(times)}
            report.add(row, f"{name} at {tokens}: {1e3 * min(times):.2f} ms")
    return steps


def _times(method: Method, tokens: int, options: argparse.Namespace, loaded: LoadedModel, text: list[int]) -> list[Any]:
    ids = torch.tensor([(text * (tokens // len(text) + 1))[-tokens:]], device=loaded.model.device)
    with closing(attachment(method, loaded, text, options)) as kv, routed(loaded.model):
        decoding = ModelDecoding(kv, ids, options)
        return [decoding.timed_turn() for _ in range(options.rounds)]


def parser() -> argparse.ArgumentParser:
    model = {"machine": None, "shape": None, "layers": None}
    shared = model | arguments.METHODS | arguments.FAST
    return arguments.parser("fit", __doc__, tokens=[2048, 8192, 24576], new=16, budget=512, **shared)


def main(options: argparse.Namespace) -> None:
    options.synthetic, options.graphs, options.link = (
        True,
        False,
        None,
    )  # as ModelDecoding and `attachment` ask for them
    methods.chosen(options.methods, options.config_dir)  # a wrong name is found now
    there = machines.machine(options.machine)
    if len(set(options.tokens)) < 3:
        raise ValueError("--tokens needs three lengths: a line is fitted to two, and predicts the third.")
    source = models.source(options.shape, options.layers)
    loaded, info = source.load(options.dtype, options.device), source.describe()
    text = calibration_text(source.tokenizer(), CALIBRATION)
    title = f"Steps of {loaded.name} beside their bytes, {options.dtype}, {options.device}, budget {options.budget}"
    report = output.Report("fit", title, options, TABLE, synthetic=True, model=loaded.name)
    steps = run(options, loaded, text, info, report)
    report.show([_beside(row, there, steps) for row in report.rows], "each length by the others")
    report.finish()
    machines.write(report.folder / "machine.yaml", fitted(there, steps))


def _beside(row: Mapping[str, Any], there: Machine, steps: Mapping[str, Sequence[TimedStep]]) -> dict[str, Any]:
    """A row with what the other lengths predict for it, if they lie on a line at all."""
    if "error" in row:
        return dict(row)
    step = next(step for step in steps[row["method"]] if step.load.tokens == row["tokens"])
    try:
        predicted = left_out(there, steps, row["method"], step)
    except NoLineError:
        return dict(row)
    return {**row, "predicted_s": predicted, "error_share": predicted / step.step_s - 1}
