"""`python -m harness.bench ops`: every operation at the shapes that methods need, in every backend that runs here.

Each is held against its reference in plain torch, against the limit of this machine (bytes to read by measured
bandwidth, or products by measured speed, whichever takes longer), and against what a user would take in its place. All
calls of an operation run in turn, with nothing of their inputs in a cache; ratios are of neighbours.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from harness.bench import calibrate
from harness.bench.common import arguments, output
from harness.bench.common.measure import DTYPES, Call, Cold, estimate, interleaved, marks, ratios
from harness.bench.common.synthetic import Shape
from harness.bench.common.traffic import bytes_read
from harness.bench.op_cases import Inputs, OpCase, cases
from harness.bench.rivals import rival
from harness.terminal.tables import Column
from kernels import ops
from kernels.dispatch import REFERENCE, Op, use_backend

OPS = {op.name: op for op in ops.ALL}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
RIVAL = "rival"


@torch.inference_mode()
def measure(
    case: OpCase, shape: Shape, limits: calibrate.Limits, rounds: int, compiled: bool = False
) -> list[dict[str, Any]]:
    """A row per backend; the one that methods get comes first."""
    op, beside = OPS[case.op], rival(case, compiled)
    refused = {name: reason for name in op.targets if (reason := op.refusal(name, *case.args))}
    calls: dict[str, Call] = {name: partial(_run, op, name, case) for name in op.targets if name not in refused}
    if beside is not None and beside.call is not None:
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


def limit_s(case: OpCase, shape: Shape, limits: calibrate.Limits) -> float:
    """Seconds that this machine needs at least."""
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
            for row in measure(case, inputs.shape, limits, options.rounds, options.compile):
                report.add(row, _progress(row))


def wanted(options: argparse.Namespace) -> Iterator[Inputs]:
    """Raises `ValueError` for sizes that do not go together."""
    shape = arguments.shape(options, options.device)
    for tokens in options.tokens:
        yield Inputs(shape, tokens, options.budget, options.prefill, options.inner)


def _progress(row: dict[str, Any]) -> str:
    return f"{row['label']} {row['time_s'].median * 1e3:.3f} ms, {row['of_limit'].median:.0%} of the limit"


def table(rows: Sequence[output.Row]) -> list[Column]:
    return [
        output.column("operation", "", rows, lambda row: row["op"], left=True),
        output.column("for", "", rows, lambda row: row["what"], left=True),
        output.column("backend", "", rows, lambda row: row["backend"], left=True),
        output.column("time", "ms", rows, output.scaled("time_s", 1e3)),
        output.column("of limit", "%", rows, output.scaled("of_limit", 100)),
        output.column("torch / it", "", rows, lambda row: row["reference"]),
        output.column("rival", "", rows, lambda row: row["rival"], left=True),
        output.column("rival / it", "", rows, lambda row: row["beside_rival"]),
    ]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False, prog="python -m harness.bench ops", description=__doc__)
    made.add_argument("--ops", nargs="*", default=[], choices=sorted(OPS), metavar="OP", help="all by default")
    made.add_argument("--tokens", nargs="+", type=arguments.count, default=[32768], help="of the prompt")
    made.add_argument("--budget", type=arguments.count, default=2048, help="tokens chosen of them")
    made.add_argument(
        "--prefill", type=arguments.count, default=2048, help="tokens of a prompt whose attention is quadratic"
    )
    made.add_argument("--inner", type=arguments.count, help="channels of the MLP; 3.5 times the model's by default")
    made.add_argument("--compile", action="store_true", help="torch.compile as the rival of the model's own parts")
    arguments.add_shape(made)
    arguments.add_run(made)
    return made


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    list(wanted(options))  # what is wrong is found now
    limits = calibrate.calibrate(arguments.current(options.device))
    print(calibrate.line(limits), flush=True)
    title = (
        f"Operations: {options.heads} query and {options.kv_heads} KV heads of {options.head_dim}, {options.dtype}, "
        f"{options.device}"
    )
    report = output.Report("ops", title, options, table, limits=limits, synthetic=True)
    run(options, limits, report)
    rows, unit = report.finish(), "times as fast as plain torch"
    if not options.no_plot:
        output.bars(report.folder / "plot.png", rows, label="label", y="reference", unit=unit, title=title)
    return 0
