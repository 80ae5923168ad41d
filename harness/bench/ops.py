"""`python -m harness.bench ops`: every operation at the shapes that methods need, in every backend that runs here.

Each is held against its reference in plain torch, against the limit of this machine (bytes to read by measured
bandwidth, or products by measured speed, whichever takes longer), and against what a user would take in its place. All
calls of an operation run in turn, with nothing of their inputs in a cache; ratios are of neighbours.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from harness.bench import calibrate
from harness.bench.common import arguments, output
from harness.bench.common.measure import DTYPES, Call, Cold, estimate, interleaved, marks, ratios
from harness.bench.common.output import Cell
from harness.bench.common.synthetic import LayerShape
from harness.bench.op_cases import Inputs, OpCase, cases
from harness.bench.rivals import rival
from harness.machines.operations import bytes_read
from harness.terminal.numbers import count
from kernels import ops
from kernels.dispatch import REFERENCE, Op, use_backend

OPS = {op.name: op for op in ops.ALL}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
RIVAL = "rival"


@torch.inference_mode()
def measure(case: OpCase, shape: LayerShape, limits: calibrate.Limits, rounds: int) -> list[dict[str, Any]]:
    """Return a row per backend; the one that methods get comes first."""
    op, beside = OPS[case.op], rival(case)
    refused = {name: reason for name in op.targets if (reason := op.refusal(name, *case.args))}
    calls: dict[str, Call] = {name: partial(_run, op, name, case) for name in op.targets if name not in refused}
    if beside is not None:
        calls[RIVAL] = beside.call
    times = interleaved(calls, Cold(shape.device), rounds)
    limit = limit_s(case, shape, limits)
    common = {"op": case.op, "what": case.what, "limit_s": limit, "rival": beside and beside.name, "refused": refused}
    return [
        common
        | {
            "backend": name,
            "label": f"{case.op} {case.what}: {name}",
            "time_s": estimate(spent),
            "of_limit": estimate([limit / one for one in spent]),
            "reference": None if name == REFERENCE else ratios(times[REFERENCE], spent),
            "rival_s": estimate(times[RIVAL]) if RIVAL in times else None,
            "beside_rival": ratios(times[RIVAL], spent) if RIVAL in times else None,
            **marks(spent),
        }
        for name, spent in times.items()
        if name != RIVAL
    ]


def limit_s(case: OpCase, shape: LayerShape, limits: calibrate.Limits) -> float:
    """MarkedSeconds that this machine needs at least."""
    read = bytes_read(case.op, case.args) / limits["read_gb_s"]
    return max(read, case.flops / limits["matmul_gflop_s"][NAMES[case.dtype or shape.dtype]]) / 1e9


def _run(op: Op, backend: str, case: OpCase) -> Any:
    with use_backend(backend):
        return op(*case.args)


def run(options: argparse.Namespace, limits: calibrate.Limits, report: output.Report) -> None:
    for inputs in wanted(options):
        torch.manual_seed(inputs.tokens)
        for case in cases(inputs):
            if (options.ops and case.op not in options.ops) or report.out_of_time(f"{case.op} {case.what}"):
                continue
            for row in measure(case, inputs.shape, limits, options.rounds):
                time_s, of_limit = row["time_s"].median, row["of_limit"].median
                report.add(row, f"{row['label']} {time_s * 1e3:.3f} ms, {of_limit:.0%} of the limit")


def wanted(options: argparse.Namespace) -> Iterator[Inputs]:
    """Raises `ValueError` for sizes that do not go together."""
    shape = arguments.shape(options)
    for tokens in options.tokens:
        yield Inputs(shape, tokens, options.budget, options.prefill, options.inner)


TABLE = output.table(
    Cell("operation", "op", left=True),
    Cell("for", "what", left=True),
    Cell("backend", "backend", left=True),
    Cell("time", "time_s", "ms", 1e3),
    Cell("of limit", "of_limit", "%", 100),
    Cell("torch / it", "reference"),
    Cell("rival", "rival", left=True),
    Cell("rival / it", "beside_rival"),
)


def parser() -> argparse.ArgumentParser:
    ops = {"nargs": "*", "default": [], "choices": sorted(OPS), "metavar": "OP", "help": "all by default"}
    sizes = {"tokens": [32768], "budget": {"type": count, "default": 2048}, "prefill": 2048, "inner": None}
    shared = arguments.LAYER | arguments.FAST | {"rounds": 15}
    return arguments.parser("ops", __doc__, ops=ops, **sizes, **shared)


def main(options: argparse.Namespace) -> None:
    list(wanted(options))  # what is wrong is found now
    limits = calibrate.told(options.device)
    title = (
        f"Operations: {options.heads} query and {options.kv_heads} KV heads of {options.head_dim}, {options.dtype}, "
        f"{options.device}"
    )
    report = output.Report("ops", title, options, TABLE, limits=limits, synthetic=True)
    run(options, limits, report)
    report.finish(partial(output.bars, label="label", y="reference", unit="times as fast as plain torch"))
