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

from harness.bench.common import arguments, limits, output
from harness.bench.common.measure import (
    DTYPES,
    Call,
    Cold,
    estimate,
    interleaved,
    marks,
    ratios,
    release,
    why,
)
from harness.bench.common.operations import bytes_read
from harness.bench.common.output import Cell, failed_row
from harness.bench.common.synthetic import LayerShape
from harness.bench.op_cases import GROUPS, Inputs, OpCase
from harness.bench.rivals import rival
from harness.jobs.machine import free_bytes
from harness.terminal.arguments import count
from kernels import ops
from kernels.dispatch import REFERENCE, Op, use_backend

OPS = {op.name: op for op in ops.ALL}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
RIVAL = "rival"
SCORED = "prefill_attention"  # whose reference keeps the scores of all queries


@torch.inference_mode()
def measure(
    case: OpCase, shape: LayerShape, known: limits.Limits, rounds: int
) -> list[dict[str, Any]]:
    """Return one row per backend of an operation; the backend that methods get comes first. A
    backend that raises an error, or whose attention scores do not fit into memory, becomes a row
    that says why."""
    ops.forget_used()
    op, failures = OPS[case.op], dict[str, str]()
    refused = {name: reason for name in op.targets if (reason := op.refusal(name, *case.args))}
    calls: dict[str, Call] = {
        name: partial(_run, op, name, case) for name in op.targets if name not in refused
    }
    try:
        beside = rival(case)
    except Exception as error:  # its inputs may not fit
        beside, failures[RIVAL] = None, why(error)
    if beside is not None:
        calls[RIVAL] = beside.call
    with_scores = [REFERENCE] * (case.op == SCORED) + [RIVAL] * (
        beside is not None and beside.keeps_scores
    )
    if with_scores and (too_large := scores_too_large(case, shape.device)):
        failures |= {name: too_large for name in with_scores if calls.pop(name, None)}
    times = interleaved(calls, Cold(shape.device), rounds, failures)
    limit = limit_s(case, shape, known)
    common = {
        "op": case.op,
        "what": case.what,
        "limit_s": limit,
        "rival": beside and beside.name,
        "refused": refused,
        "code": output.timed_code(),
    }
    return [
        common
        | {
            "backend": name,
            "label": f"{case.op} {case.what}: {name}",
            "time_s": estimate(spent),
            "of_limit": estimate([limit / seconds for seconds in spent]),
            "reference": None
            if name == REFERENCE or REFERENCE in failures
            else ratios(times[REFERENCE], spent),
            "rival_s": estimate(times[RIVAL]) if RIVAL in times else None,
            "beside_rival": ratios(times[RIVAL], spent) if RIVAL in times else None,
            **marks(spent),
        }
        for name, spent in times.items()
        if name != RIVAL
    ] + [
        failed_row(f"{case.op} {case.what}: {name}", reason, **common, backend=name)
        for name, reason in failures.items()
    ]


def scores_too_large(case: OpCase, device: torch.device) -> str | None:
    """Return the reason why a backend that keeps the attention scores of all queries (in fp32, and
    their softmax beside them) does not fit into free memory; None if it does. Trying could end the
    process."""
    q, k = case.args[:2]
    needed, free = 2 * 4 * q.shape[:3].numel() * k.shape[2], free_bytes(str(device))
    if free is None or needed <= free:
        return None
    return f"its scores take {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free"


def limit_s(case: OpCase, shape: LayerShape, known: limits.Limits) -> float:
    """Return the least seconds that this machine needs for an operation: to read its bytes or to
    compute its products, whichever takes longer."""
    read = bytes_read(case.op, case.args) / known["read_gb_s"]
    return max(read, case.flops / known["matmul_gflop_s"][NAMES[shape.dtype]]) / 1e9


def _run(op: Op, backend: str, case: OpCase) -> Any:
    with use_backend(backend):
        return op(*case.args)


def run(options: argparse.Namespace, known: limits.Limits, report: output.Report) -> None:
    for inputs in wanted(options):
        torch.manual_seed(inputs.tokens)
        for group in GROUPS:
            try:
                for case in group(inputs):
                    if (options.ops and case.op not in options.ops) or report.skips(
                        f"{case.op} {case.what}"
                    ):
                        continue
                    for row in measure(case, inputs.shape, known, options.rounds):
                        report.add(row, f"{row['label']} {_told(row)}")
            except Exception as error:  # of the inputs: those of the calls are rows already
                label = f"further cases of {group.__name__.strip('_')} at {inputs.tokens}"
                report.add(failed_row(label, why(error)), f"{label}: {why(error)}")
                release()


def _told(row: output.BenchRow) -> str:
    if "error" in row:
        return str(row["error"])
    return f"{row['time_s'].median * 1e3:.3f} ms, {row['of_limit'].median:.0%} of the limit"


def wanted(options: argparse.Namespace) -> Iterator[Inputs]:
    """Yield the inputs of the operations, one for each number of tokens. Raise `ValueError` for
    sizes that do not go together."""
    shape = arguments.shape(options)
    for tokens in options.tokens:
        yield Inputs(shape, tokens, options.budget, options.prefill)


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
    ops = {
        "nargs": "*",
        "default": [],
        "choices": sorted(OPS),
        "metavar": "OP",
        "help": "all by default",
    }
    sizes = {
        "tokens": [32768],
        "budget": {"type": count, "default": 2048},
        "prefill": 2048,
    }
    shared = arguments.LAYER | arguments.FAST | {"rounds": 15}
    return arguments.parser("ops", __doc__, ops=ops, **sizes, **shared)


def main(options: argparse.Namespace) -> None:
    list(wanted(options))  # what is wrong is found now
    known = limits.told(options.device)
    title = (
        f"Operations: {options.heads} query and {options.kv_heads} KV heads of {options.head_dim}, {options.dtype}, "
        f"{options.device}"
    )
    report = output.Report("ops", title, options, TABLE, limits=known, synthetic=True)
    run(options, known, report)
    report.finish()
